"""Runs the exporter's graphs in tests: one pass of the speculative graph over a cache, one of the standard graph."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  by which numpy knows bfloat16
import numpy as np
from numpy.typing import NDArray

from specedge.export.checkpoint import Checkpoint
from specedge.export.emulation import emulated
from specedge.runtime.bundle import GraphSpec
from specedge.runtime.contracts import GraphNames as Names
from specedge.tests.reference import forward, random_tree, session

__all__ = ["Speculative", "Standard", "tree_errors"]


class Speculative:
    """The speculative graph of any flavour, or its twin without a mask, with a cache of its own, from row 0 on."""

    def __init__(self, path: Path, spec: GraphSpec, capacity: int | None = None) -> None:
        with emulated(path.parent, replace(spec, file=path.name, chains="", compact="")) as runnable:
            self.session = session(path.parent / runnable.file)
        self.spec = spec
        self.capacity = capacity or spec.capacity
        shape = (1, spec.kv_heads, self.capacity, spec.head_dim)
        # Garbage in unused rows: whoever reads them is found out.
        self.cache = {
            (layer, kind): self._stored(np.full(shape, 7.0))
            for layer in range(spec.layers)
            for kind in ("key", "value")
        }
        self.length = 0
        self.outputs: dict[str, NDArray[Any]] = {}

    def run(
        self,
        ids: Any,
        depth: NDArray[np.int64] | None = None,
        allowed: NDArray[np.bool_] | None = None,
        wanted: Any = None,
        pad: int = 0,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Runs rows on top of the cache and keeps them in it; returns logits and hidden of the real rows."""
        real, rows = len(ids), len(ids) + pad
        past = self.length
        bias = np.full((1, 1, rows, self.capacity), -np.inf)
        bias[..., :past] = 0
        seen = np.eye(rows, dtype=bool)
        seen[:real, :real] = np.tril(np.ones((real, real), bool)) if allowed is None else allowed
        bias[0, 0, :, past : past + rows][seen] = 0
        bias[0, 0, real:, :past] = -np.inf
        positions = np.full((1, rows), past, np.int64)
        positions[0, :real] += np.arange(real) if depth is None else depth
        tokens = np.zeros((1, rows), np.int64)
        tokens[0, :real] = ids
        feeds = {
            Names.INPUT_IDS: tokens,
            Names.POSITION_IDS: positions,
            Names.ATTENTION_BIAS: self._stored(bias),
            Names.LAST_INDEX: np.array([past + rows - 1], np.int32),
            Names.TOTAL: np.array([self.capacity], np.int32),
            Names.WRITE_INDEX: np.array([past], np.int64),
            Names.LOGIT_ROWS: np.arange(real) if wanted is None else np.array(wanted, np.int64),
        }
        taken = {item.name for item in self.session.get_inputs()}
        feeds = {name: array for name, array in feeds.items() if name in taken}
        binding = self.session.io_binding()
        for name, array in feeds.items():
            binding.bind_input(name, "cpu", 0, self._element(name, array), array.shape, array.ctypes.data)
        for (layer, kind), array in self.cache.items():
            for bind, name in ((binding.bind_input, Names.past), (binding.bind_output, Names.present)):
                bind(name(layer, kind), "cpu", 0, self.spec.cache_element, array.shape, array.ctypes.data)
        free = [item.name for item in self.session.get_outputs() if not item.name.startswith("present")]
        for name in free:
            binding.bind_output(name, "cpu")
        self.session.run_with_iobinding(binding)
        found = [value.numpy() for value in binding.get_outputs()[-len(free) :]]
        self.outputs = dict(zip(free, found, strict=True))
        logits, hidden = self.outputs[Names.LOGITS], self.outputs[Names.HIDDEN]
        self.length += real
        return logits[0], hidden[0, :real]

    def _stored(self, array: NDArray[Any]) -> NDArray[Any]:
        """Floats as cache and mask hold them."""
        return array.astype(self.spec.cache_dtype).view(self.spec.cache_kind)

    def _element(self, name: str, array: NDArray[Any]) -> Any:
        return self.spec.cache_element if name == Names.ATTENTION_BIAS else array.dtype


class Standard:
    """The standard graph with its growing cache."""

    def __init__(self, path: Path, spec: GraphSpec, batch: int = 1) -> None:
        self.session = session(path)
        empty = np.zeros((batch, spec.kv_heads, 0, spec.head_dim), spec.cache_dtype)
        self.cache = {(layer, kind): empty for layer in range(spec.layers) for kind in ("key", "value")}

    def run(self, ids: Any, mask: Any, positions: Any) -> NDArray[np.float32]:
        """Logits [B, S, vocab] of rows on top of the cache."""
        feeds = {Names.INPUT_IDS: ids, Names.ATTENTION_MASK: mask, Names.POSITION_IDS: positions}
        feeds = {name: np.asarray(value, np.int64) for name, value in feeds.items()}
        feeds |= {Names.past(*key): array for key, array in self.cache.items()}
        outputs = [Names.LOGITS, *(Names.present(*key) for key in self.cache)]
        logits, *cache = self.session.run(outputs, feeds)
        self.cache = dict(zip(self.cache, cache, strict=True))
        return logits


def tree_errors(
    graph: Speculative, checkpoint: Checkpoint, rng: np.random.Generator, past: int, pad: int, nodes: int = 12
) -> tuple[float, float]:
    """Runs random rows and a random tree behind them; the largest errors of its logits and hidden rows."""
    before, tokens = rng.integers(0, 160, past), rng.integers(0, 160, nodes)
    if past:
        graph.run(before, pad=pad)
    tree, depth = random_tree(rng, nodes)
    found = graph.run(tokens, depth, tree, pad=pad)
    allowed = np.tril(np.ones((past + nodes, past + nodes), bool))
    allowed[past:, past:] = tree
    positions = np.concatenate([np.arange(past), past + depth])
    expected = forward(checkpoint, np.concatenate([before, tokens]), positions, allowed)
    logits, hidden = (float(np.abs(ours - wanted[past:]).max()) for ours, wanted in zip(found, expected, strict=True))
    return logits, hidden
