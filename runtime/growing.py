"""The standard graph, whose cache grows, as a `Target`: for bundles without a tree mask. Chains only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specedge.runtime.bundle import GraphSpec
from specedge.runtime.contracts import EMPTY_DRAFT, Draft, GraphNames, Rows
from specedge.runtime.errors import BundleError
from specedge.runtime.graph import PREFILL_CHUNK, cache_rows, check_room
from specedge.runtime.providers import open_session

__all__ = ["GrowingDecoder"]

_KINDS = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


class GrowingDecoder:
    """One session of a standard decoder graph.

    Every pass copies the cache, and rewinding slices it; the speculative graph does neither.
    Arguments and errors are those of `Decoder`.
    """

    def __init__(
        self,
        path: Path,
        spec: GraphSpec,
        *,
        capacity: int | None = None,
        device: str = "cpu",
        threads: int | None = None,
    ) -> None:
        self.spec = spec
        self.path = path
        self.capacity = cache_rows(spec, capacity)
        self.length = 0
        self._nodes = 0
        self._session = open_session(path, device=device, threads=threads)
        self._inputs = {item.name: item.type for item in self._session.get_inputs()}
        names = [(layer, kind) for layer in range(spec.layers) for kind in ("key", "value")]
        self._past = [GraphNames.past(*name) for name in names]
        self._present = [GraphNames.present(*name) for name in names]
        missing = {GraphNames.INPUT_IDS, *self._past} - set(self._inputs)
        missing |= {GraphNames.LOGITS, *self._present} - {item.name for item in self._session.get_outputs()}
        if missing:
            raise BundleError(f"{path}: no input or output {min(missing)!r}; export the bundle again")
        kind = _KINDS.get(self._inputs[self._past[0]])
        if kind is None:
            raise BundleError(f"{path}: a cache of {self._inputs[self._past[0]]}; export the bundle again")
        empty = np.zeros((1, spec.kv_heads, 0, spec.head_dim), kind)
        self._cache: list[NDArray[Any]] = [empty] * len(names)

    def padded(self, rows: int) -> int:
        """As many rows as are asked for: a pass of this graph pads none."""
        return rows

    def forward(self, pending: Sequence[int], draft: Draft = EMPTY_DRAFT) -> Rows:
        check_room(self, pending, draft)
        if not draft.is_chain:
            raise ValueError("this bundle's graph has no tree mask: it verifies chains only")
        tokens = [*pending, *draft.tokens]
        self._drop_draft_rows()
        cut = max(len(pending) - 1, 0) // PREFILL_CHUNK * PREFILL_CHUNK
        for start in range(0, cut, PREFILL_CHUNK):
            self._run(tokens[start : start + PREFILL_CHUNK])
            self.length += PREFILL_CHUNK
        logits = self._run(tokens[cut:])
        self.length += len(pending) - cut
        self._nodes = len(draft.tokens)
        return Rows(logits[len(pending) - cut - 1 :])

    def commit(self, path: Sequence[int]) -> None:
        if tuple(path) != tuple(range(len(path))) or len(path) > self._nodes:
            raise ValueError(f"path {tuple(path)} is not a prefix of the {self._nodes} nodes of the last pass")
        self.length += len(path)
        self._drop_draft_rows()

    def rewind(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot rewind a cache of {self.length} rows to {length}")
        self.length = length
        self._drop_draft_rows()

    def close(self) -> None:
        """Frees the session and the cache."""
        del self._session, self._cache

    def _drop_draft_rows(self) -> None:
        self._nodes = 0
        if self._cache[0].shape[2] > self.length:
            self._cache = [tensor[:, :, : self.length] for tensor in self._cache]

    def _run(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        past = self._cache[0].shape[2]
        feeds: dict[str, NDArray[Any]] = dict(zip(self._past, self._cache, strict=True))
        feeds[GraphNames.INPUT_IDS] = np.asarray([tokens], np.int64)
        if GraphNames.ATTENTION_MASK in self._inputs:
            feeds[GraphNames.ATTENTION_MASK] = np.ones((1, past + len(tokens)), np.int64)
        if GraphNames.POSITION_IDS in self._inputs:
            feeds[GraphNames.POSITION_IDS] = np.arange(past, past + len(tokens), dtype=np.int64)[None]
        logits, *self._cache = self._session.run([GraphNames.LOGITS, *self._present], feeds)
        return np.asarray(logits[0], np.float32)
