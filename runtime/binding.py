"""Buffers and IOBinding of one width of a speculative graph; refilled in place, so a pass binds nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specedge.runtime.bundle import GraphSpec
from specedge.runtime.cache import Cache
from specedge.runtime.contracts import Draft, Floats, GraphNames
from specedge.runtime.memory import Buffer, HostMemory, Memory
from specedge.runtime.tree import positions, visibility

if TYPE_CHECKING:
    import onnxruntime as ort

__all__ = ["Binding"]

_HOST = HostMemory()
_BFLOAT16_CUT = 0xFF80  # the bits of -infinity


class Binding:
    """One width.

    Args:
        session: Of the graph.
        spec: Its entry in the manifest.
        cache: Where keys and values are.
        slots: Which layer of the cache each layer of the graph works in.
        width: Rows of a pass.
        logit_rows: Rows whose logits it gives.
        memory: Where the session's tensors live.
        masked: Whether the graph takes a mask; the twin without one runs chains.
        run_options: Of every run.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        spec: GraphSpec,
        cache: Cache,
        slots: Sequence[int],
        width: int,
        logit_rows: int,
        memory: Memory,
        *,
        masked: bool = True,
        run_options: ort.RunOptions | None = None,
    ) -> None:
        self._session, self._spec, self._memory, self._options = session, spec, memory, run_options
        self._io = session.io_binding()
        self._width = width
        self._causal = spec.flavour == "gqa"
        self._masked = slice(0, 0)  # columns where the last pass left -inf
        self._cut = _BFLOAT16_CUT if spec.cache_dtype == "bfloat16" else -np.inf
        self._inputs: dict[str, Buffer] = {}
        self._ids = self._input(GraphNames.INPUT_IDS, (1, width), np.int64)[0]
        self._positions = self._input(GraphNames.POSITION_IDS, (1, width), np.int64)[0]
        self._logit_rows = self._input(GraphNames.LOGIT_ROWS, (logit_rows,), np.int64)
        self._bias: NDArray[Any] | None = None
        if masked:
            shape, kind = (1, 1, width, cache.capacity), spec.cache_kind
            self._bias = self._input(GraphNames.ATTENTION_BIAS, shape, kind, element=spec.cache_element)[0, 0]
        if self._causal:
            self._place = self._input(GraphNames.LAST_INDEX, (1,), np.int32)
            # The kernel looks at it on the host, wherever it runs.
            self._input(GraphNames.TOTAL, (1,), np.int32, _HOST)[0] = cache.capacity
        else:
            self._place = self._input(GraphNames.WRITE_INDEX, (1,), np.int64)
        self._bind_outputs(logit_rows)
        self._bind_cache(slots, cache)
        self._sparse: Floats | None = None
        self._found: NDArray[np.int64] | None = None

    def fill(self, pending: Sequence[int], draft: Draft, start: int) -> None:
        """Writes a pass's tokens, positions and mask; rows beyond them are padding."""
        committed, used = len(pending), len(pending) + len(draft.tokens)
        self._ids[:committed] = pending
        self._ids[committed:used] = draft.tokens
        if draft.is_chain:
            self._positions[:used] = np.arange(start, start + used)
        else:
            self._positions[:used] = positions(start, committed, draft.parents)
        self._ids[used:] = 0
        self._positions[used:] = start
        self._logit_rows[:] = committed - 1
        self._logit_rows[: used - committed + 1] = np.arange(committed - 1, used)
        self._place[0] = start + self._width - 1 if self._causal else start
        fresh = self._mask_tree(start, committed, draft) if self._causal else self._mask_all(start, committed, draft)
        self._push(GraphNames.ATTENTION_BIAS if fresh else "")

    def fill_apart(
        self, tokens: Sequence[int], positions: Sequence[int], sees: NDArray[np.bool_], wanted: Sequence[int]
    ) -> None:
        """Writes a pass over rows of several sequences; `sees` is [rows, total]."""
        assert self._bias is not None
        self._ids[:], self._positions[:], self._logit_rows[:] = tokens, positions, wanted
        total = sees.shape[1]
        if not self._causal:
            self._bias[:] = self._cut
        self._bias[:, :total] = np.where(sees, 0, self._cut)
        self._place[0] = total - 1 if self._causal else total - self._width
        self._push(GraphNames.ATTENTION_BIAS)

    def run(self) -> None:
        """Runs the graph over what was filled in."""
        self._session.run_with_iobinding(self._io, self._options)

    def logits(self, looked_at: int | None = None) -> Floats:
        """Logits of the last run, [logit_rows, vocab].

        Args:
            looked_at: How many of a row's likeliest tokens anyone will look at; None: all. On a device that finds
                these itself only they are carried over: as log-probabilities, all others -inf.
        """
        if looked_at is None or self._memory.local or not self._top_ids or looked_at >= self._spec.top:
            return self._all_logits()
        self._top_ids.pull()
        self._top_values.pull()
        ids, values = self._top_ids.host[0], self._top_values.host[0]
        if (values[:, looked_at - 1] == values[:, -1]).any():  # a tie may go on beyond what was found
            return self._all_logits()
        if self._sparse is None:
            self._sparse = np.full(self._logits.host.shape[1:], -np.inf, np.float32)
        elif self._found is not None:
            np.put_along_axis(self._sparse, self._found, -np.inf, 1)
        np.put_along_axis(self._sparse, ids, values, 1)
        self._found = ids.copy()
        return self._sparse

    def hidden(self) -> tuple[Floats, Floats | None]:
        """Hidden rows of the last run, [width, hidden_size], and inner ones where the graph gives them."""
        self._hidden.pull()
        if self._inner is None:
            return self._hidden.host[0], None
        self._inner.pull()
        return self._hidden.host[0], self._inner.host[0]

    def _all_logits(self) -> Floats:
        self._logits.pull()
        logits: Floats = self._logits.host[0]
        return logits

    def _mask_tree(self, start: int, committed: int, draft: Draft) -> bool:
        """Attention is causal by itself, so a chain needs no mask: only a tree's non-ancestors are cut."""
        if self._bias is None:
            if not draft.is_chain:
                raise ValueError("this graph has no tree mask: it verifies chains only")
            return False
        changed = self._masked != slice(0, 0) or not draft.is_chain
        self._bias[:, self._masked] = 0
        self._masked = slice(0, 0)
        if not draft.is_chain:
            used = committed + len(draft.tokens)
            self._masked = slice(start, start + used)
            self._bias[:used, self._masked] = np.where(visibility(committed, draft.parents), 0, self._cut)
        return changed

    def _mask_all(self, start: int, committed: int, draft: Draft) -> bool:
        """The mask says everything: what is behind, each row's own path, and of padding only itself."""
        assert self._bias is not None
        used = committed + len(draft.tokens)
        self._bias[:] = self._cut
        self._bias[:, :start] = 0
        self._bias[:used, start : start + used] = np.where(visibility(committed, draft.parents), 0, self._cut)
        rows = np.arange(used, self._width)
        self._bias[rows, start + rows] = 0
        return True

    def _input(
        self, name: str, shape: tuple[int, ...], dtype: Any, memory: Memory | None = None, element: Any = None
    ) -> NDArray[Any]:
        where = self._memory if memory is None else memory
        buffer = self._inputs[name] = where.buffer(shape, dtype)
        self._bind(self._io.bind_input, name, buffer, where, element)
        return buffer.host

    def _output(self, name: str, shape: tuple[int, ...], dtype: Any) -> Buffer:
        buffer = self._memory.buffer(shape, dtype)
        self._bind(self._io.bind_output, name, buffer, self._memory)
        return buffer

    def _bind_outputs(self, logit_rows: int) -> None:
        spec, width = self._spec, self._width
        self._logits = self._output(GraphNames.LOGITS, (1, logit_rows, spec.vocab_size), np.float32)
        self._hidden = self._output(GraphNames.HIDDEN, (1, width, spec.hidden_size), np.float32)
        self._inner: Buffer | None = None
        if spec.taps:
            self._inner = self._output(GraphNames.INNER, (1, width, len(spec.taps) * spec.hidden_size), np.float32)
        self._top_ids: Buffer | None = None
        if spec.top:
            self._top_ids = self._output(GraphNames.TOP_IDS, (1, logit_rows, spec.top), np.int64)
            self._top_values = self._output(GraphNames.TOP_LOGPROBS, (1, logit_rows, spec.top), np.float32)

    def _bind_cache(self, slots: Sequence[int], cache: Cache) -> None:
        """Layer l of the graph works in layer slots[l] of the cache; input and output are one place."""
        for layer, slot in enumerate(slots):
            for offset, kind in enumerate(("key", "value")):
                where = (
                    self._memory.device,
                    0,
                    self._spec.cache_element,
                    cache.shape,
                    cache.pointer(2 * slot + offset),
                )
                self._io.bind_input(GraphNames.past(layer, kind), *where)
                self._io.bind_output(GraphNames.present(layer, kind), *where)

    def _push(self, mask: str) -> None:
        """Carries the inputs over; the mask only where it changed."""
        if not self._memory.local:
            for name, buffer in self._inputs.items():
                if name not in (GraphNames.ATTENTION_BIAS, GraphNames.TOTAL) or name == mask:
                    buffer.push()

    @staticmethod
    def _bind(bind: Any, name: str, buffer: Buffer, memory: Memory, element: Any = None) -> None:
        kind = buffer.host.dtype if element is None else element
        bind(name, memory.device, 0, kind, buffer.host.shape, buffer.pointer)
