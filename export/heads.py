"""Writes Medusa heads as a graph: the target's last row in, each head's likeliest tokens out.

All heads are in one graph. Where they do not depend on each other and share the vocabulary matrix,
their rows go through one product; in a chain each head embeds the likeliest guess of the one before.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specedge.export.checkpoint import Checkpoint
from specedge.export.decoder import save_graph
from specedge.export.dialects import Dialect, find_dialect
from specedge.export.heads_file import Heads
from specedge.export.kernels import check_kernels
from specedge.export.linear import Linears
from specedge.export.nodes import GraphBuilder
from specedge.export.norms import rms_norm
from specedge.export.vocabulary import Vocabulary
from specedge.export.weights import WeightFile
from specedge.models import find_family, read_dimensions
from specedge.models.medusa import NORM_EPS, HeadsConfig
from specedge.quant.formats import EMBEDDING, HEAD, nearest
from specedge.quant.layer import Layer
from specedge.quant.recipe import Recipe
from specedge.runtime.bundle import HeadsSpec
from specedge.runtime.contracts import GraphNames as Names

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["FILE", "write_heads"]

FILE = "heads/medusa.onnx"
_PLACES, _IDS, _ONES = "places", "guessed", "ones"

Matrix = NDArray[np.float32]


def write_heads(heads: Heads, checkpoint: Checkpoint, folder: Path, recipe: Recipe, device: str = "cpu") -> HeadsSpec:
    """Writes heads into the folder of a bundle.

    Args:
        heads: The heads.
        checkpoint: The target, whose vocabulary they use.
        folder: The bundle's.
        recipe: How they are stored.
        device: "cpu", "cuda" or "tensorrt".

    Raises:
        ExportError: The device has no kernel for a node.
        StorageError: A file cannot be written.
    """
    path = folder / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    with WeightFile(path.with_suffix(".onnx_data")) as weights:
        stored = _Stored.store(heads, checkpoint, weights, recipe)
        dialect = find_dialect(device)
        model = stored.graph(weights, dialect)
    check_kernels(model, dialect, FILE)
    save_graph(model, path)
    config = heads.config
    return HeadsSpec(
        file=FILE,
        precision=recipe.form.name,
        heads=config.heads,
        guesses=config.listed,
        vocabulary=config.guesses,
        hidden_size=config.hidden_size,
        weight_bytes=weights.size,
        taps=config.taps,
        chain=config.chain,
        recipe=recipe.name,
    )


@dataclass(frozen=True)
class _Stored:
    """Heads in a weight file, ready to be read by a graph."""

    config: HeadsConfig
    dtype: str
    linears: Linears
    vocabulary: Vocabulary

    @classmethod
    def store(cls, heads: Heads, checkpoint: Checkpoint, weights: WeightFile, recipe: Recipe) -> _Stored:
        config, form = heads.config, recipe.form
        stored = cls(config, form.dtype, Linears(form.dtype), Vocabulary(form.dtype))
        quantise = nearest(form, 0)
        family = find_family(checkpoint.config.get("model_type"))
        sizes = read_dimensions(family, checkpoint.config)
        ids = np.arange(sizes.vocab_size) if heads.vocabulary is None else heads.vocabulary
        if config.chain or (sizes.tied and config.lm_head != "own"):
            stored.vocabulary.store(
                weights, EMBEDDING, quantise(EMBEDDING, checkpoint.tensors[family.embedding][ids], None)
            )
        if config.lm_head != "own" and not sizes.tied:
            stored.vocabulary.store(weights, HEAD, quantise(HEAD, checkpoint.tensors[family.head][ids], None))
        for name, tensor in heads.tensors.items():
            layer, _, kind = name.rpartition(".")
            if kind == "weight":
                own = layer.endswith("lm_head")
                bias = heads.tensors.get(f"{layer}.bias")
                stored.linears.store(weights, layer, quantise(HEAD if own else layer, tensor, bias))
            elif kind in ("down", "up"):
                stored.linears.store(weights, name, Layer(tensor))
        weights.add(_IDS, ids.astype(np.int64))
        weights.add(_ONES, np.ones(config.hidden_size, form.dtype))
        if config.chain:
            places = np.full(sizes.vocab_size, -1, np.int32)
            places[ids] = np.arange(len(ids))
            weights.add(_PLACES, places)
        return stored

    def graph(self, weights: WeightFile, dialect: Dialect) -> ModelProto:
        config, graph = self.config, GraphBuilder(weights, self.dtype, dialect)
        state = self._start(graph)
        place = self._place_of_token(graph) if config.chain else ""
        together = not config.chain and config.lm_head == "shared"
        rows, logits = [], []
        chosen: list[str] = []
        chances: list[str] = []
        for head in range(config.heads):
            row = self._blocks(graph, head, state, place)
            if together:
                rows.append(row)
                continue
            state = row if config.chain else state
            logits.append(self._logits(graph, head, row))
            self._add_best(graph, logits[-1], chosen, chances)
            if config.chain:
                first = graph.op("Slice", chosen[-1], graph.integers(0), graph.integers(1), graph.integers(1))
                place = graph.op("Reshape", first, graph.integers(-1))
        if together:
            logits = [self.vocabulary.logits(graph, graph.op("Concat", *rows, axis=0))]
            self._add_best(graph, logits[0], chosen, chances)
        guesses = graph.op("Concat", *chosen, axis=0)
        graph.op("Gather", graph.weight(_IDS), guesses, axis=0, name=Names.GUESSES)
        graph.cast(graph.op("Concat", *logits, axis=0), "float32", Names.HEAD_LOGITS)
        graph.op("Identity", graph.weight(_IDS), name=Names.GUESSED)
        graph.cast(graph.op("Concat", *chances, axis=0), "float32", Names.CHANCES)
        graph.output(Names.CHANCES, "float32", [config.heads, config.listed])
        graph.output(Names.GUESSES, "int64", [config.heads, config.listed])
        graph.output(Names.HEAD_LOGITS, "float32", [config.heads, config.guesses])
        graph.output(Names.GUESSED, "int64", [config.guesses])
        return graph.model("specedge_medusa")

    def _start(self, graph: GraphBuilder) -> str:
        size, taps = self.config.hidden_size, len(self.config.taps)
        hidden = graph.cast(graph.input(Names.HIDDEN, "float32", [1, size]), self.dtype)
        if not taps:
            return hidden
        inner = graph.cast(graph.input(Names.INNER, "float32", [1, taps * size]), self.dtype)
        parts = self._norm(graph, graph.op("Reshape", inner, graph.integers(taps, size)))
        fused = self.linears.apply(graph, graph.op("Reshape", parts, graph.integers(1, taps * size)), "fuse")
        return graph.op("Add", hidden, fused)

    def _place_of_token(self, graph: GraphBuilder) -> str:
        token = graph.input(Names.TOKEN, "int64", [1])
        return graph.cast(graph.op("Gather", graph.weight(_PLACES), token, axis=0), "int64")

    def _blocks(self, graph: GraphBuilder, head: int, rows: str, place: str) -> str:
        for block in range(self.config.blocks):
            prefix = f"heads.{head}.blocks.{block}"
            if not self.config.width:
                rows = graph.op("Add", rows, _silu(graph, self.linears.apply(graph, rows, f"{prefix}.square")))
                continue
            read = self._norm(graph, rows)
            if self.config.chain and not block:
                read = graph.op("Concat", read, self._embed(graph, place), axis=-1)
            wide = _silu(graph, self.linears.apply(graph, read, f"{prefix}.wide"))
            rows = graph.op("Add", rows, self.linears.apply(graph, wide, f"{prefix}.narrow"))
        return rows

    def _embed(self, graph: GraphBuilder, place: str) -> str:
        """The normed embedding of a place, [1, hidden]; zero for tokens that are never guessed."""
        known = graph.op("Max", place, graph.integers(0))
        looked_up = self.vocabulary.embed(graph, graph.op("Reshape", known, graph.integers(1, 1)))
        row = self._norm(graph, graph.op("Reshape", looked_up, graph.integers(1, self.config.hidden_size)))
        is_known = graph.cast(graph.op("GreaterOrEqual", place, graph.integers(0)), self.dtype)
        return graph.op("Mul", row, is_known)

    def _norm(self, graph: GraphBuilder, rows: str) -> str:
        return rms_norm(graph, rows, graph.weight(_ONES), NORM_EPS)

    def _logits(self, graph: GraphBuilder, head: int, row: str) -> str:
        name = f"heads.{head}.lm_head"
        if self.config.lm_head == "own":
            return self.linears.apply(graph, row, name)
        logits = self.vocabulary.logits(graph, row)
        if self.config.lm_head == "lowrank":
            low = self.linears.apply(graph, row, f"{name}.down")
            logits = graph.op("Add", logits, self.linears.apply(graph, low, f"{name}.up"))
        return logits

    def _add_best(self, graph: GraphBuilder, logits: str, chosen: list[str], chances: list[str]) -> None:
        """Adds the places of the largest logits, [rows, guesses], and their probabilities."""
        places = f"{logits}.best"
        outputs = (f"{logits}.values", places)  # its first output may not be left out
        graph.ops("TopK", (logits, graph.integers(self.config.listed)), outputs, axis=-1)
        chosen.append(places)
        # ReduceLogSumExp would take ten times as long on a CPU.
        chances.append(graph.op("GatherElements", graph.op("Softmax", logits, axis=-1), places, axis=-1))


def _silu(graph: GraphBuilder, x: str) -> str:
    return graph.op("Mul", x, graph.op("Sigmoid", x))
