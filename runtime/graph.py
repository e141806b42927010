"""A decoder graph with its cache: the speculative graph as a `Target`.

Shapes of the graph depend on the number of rows only (total_sequence_length is always the
capacity), so every width keeps one persistent IOBinding whose buffers are refilled in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specedge.runtime.bundle import GraphSpec
from specedge.runtime.cache import Cache
from specedge.runtime.contracts import EMPTY_DRAFT, Draft, Floats, GraphNames, Rows
from specedge.runtime.errors import BundleError, UsageError
from specedge.runtime.providers import open_session
from specedge.runtime.tree import positions, visibility

if TYPE_CHECKING:
    import onnxruntime as ort

__all__ = ["PREFILL_CHUNK", "Decoder", "cache_rows", "cache_shape", "check_room"]

PREFILL_CHUNK = 256
# Wider passes get a binding for the one run: padding a prompt would cost more than binding it.
_WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64)


class Decoder:
    """One session of the speculative graph, its cache, and a binding per width.

    Args:
        path: The .onnx file.
        spec: Its entry in the manifest.
        capacity: Rows of cache to allocate; None takes the exported capacity.
        device: Which execution provider to run on.
        threads: Threads to compute with; None takes all.
        host: A decoder whose cache this one works in; None allocates one of its own.
        paired: A lone row runs with a row of padding beside it, for which one row of the cache is kept.
            GroupQueryAttention computes a lone row by another kernel than it computes several
            (the same bits from two rows on, up to 2e-6 away for one). Where activations are rounded that
            can move one by a whole step; paired, a row's logits are the same bits in every pass.

    Raises:
        BundleError: The graph does not have the inputs and outputs of its entry, or the host's
            cache does not fit it.
        UsageError: `capacity` is larger than the exported one.
    """

    def __init__(
        self,
        path: Path,
        spec: GraphSpec,
        *,
        capacity: int | None = None,
        device: str = "cpu",
        threads: int | None = None,
        host: Decoder | None = None,
        paired: bool = False,
    ) -> None:
        if spec.flavour != "gqa":
            raise BundleError(
                f"{path}: a {spec.flavour} graph where a speculative one belongs; export the bundle again"
            )
        if host is not None and not _fits_cache(spec, host):
            raise BundleError(f"{path}: its cache does not fit into that of {host.spec.file}; export the bundle again")
        rows = host.rows if host is not None else cache_rows(spec, capacity)
        self.spec: GraphSpec = spec
        self.path = path
        self._session = open_session(path, device=device, threads=threads)
        _check_interface(self._session, spec, path)
        self._cache = Cache(spec if host is None else host.spec, rows, None if host is None else host.pool)
        self._slots = spec.cache_layers if host is not None and spec.cache_layers else tuple(range(spec.layers))
        self._bindings: dict[tuple[int, int], _Binding] = {}
        self._last: _Binding | None = None
        self._nodes = 0
        self._narrowest = 2 if paired else 1

    @property
    def length(self) -> int:
        return self._cache.length

    @property
    def capacity(self) -> int:
        return self._cache.capacity + 1 - self._narrowest

    @property
    def rows(self) -> int:
        """Rows of the cache's array, that of padding included."""
        return self._cache.capacity

    @property
    def pool(self) -> NDArray[Any]:
        """The cache's array, [2 * layers, 1, kv_heads, capacity, head_dim]; a host's has all of the host's layers."""
        return self._cache.pool

    def forward(self, pending: Sequence[int], draft: Draft = EMPTY_DRAFT) -> Rows:
        check_room(self, pending, draft)
        cut = max(len(pending) - 1, 0) // PREFILL_CHUNK * PREFILL_CHUNK
        for start in range(0, cut, PREFILL_CHUNK):
            self._pass(pending[start : start + PREFILL_CHUNK], EMPTY_DRAFT)
        return self._pass(pending[cut:], draft)

    def forward_apart(
        self, tokens: Sequence[int], positions: Sequence[int], sees: NDArray[np.bool_], wanted: Sequence[int]
    ) -> Floats:
        """Runs rows of several sequences that stand in one cache, and commits them all.

        Args:
            tokens, positions: [rows], the positions each in its own sequence.
            sees: [rows, length + rows], the cache's rows that a row may look at; never those behind it.
            wanted: Rows to give logits of.

        Returns:
            [wanted, vocab], of its own memory.
        """
        start, width = self.length, len(tokens)
        if not 0 < width < self.capacity or start + width > self.capacity:
            raise ValueError(f"{start} rows and {width} more do not fit apart into a cache of {self.capacity}")
        if min(tokens) < 0 or max(tokens) >= self.spec.vocab_size:
            raise ValueError(f"a token id is outside the vocabulary of {self.spec.vocab_size}")
        binding = _Binding(self._session, self.spec, self._cache, self._slots, width, len(wanted))
        binding.fill_apart(tokens, positions, sees, wanted)
        binding.run()
        self._cache.append(width)
        self._nodes = 0
        logits: Floats = binding.logits[0]
        return logits

    def commit(self, path: Sequence[int]) -> None:
        if any(not 0 <= node < self._nodes for node in path):
            raise ValueError(f"path {tuple(path)} is not within the {self._nodes} nodes of the last pass")
        self._cache.commit(path)
        self._nodes = 0

    def rewind(self, length: int) -> None:
        self._cache.rewind(length)
        self._nodes = 0

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps these rows of the cache, in ascending order, and forgets all others."""
        self._cache.rewind(0)
        self._cache.commit(rows)
        self._nodes = 0

    def follow(self, length: int) -> None:
        """Takes the first `length` rows of a host's cache for its own."""
        self._cache.length = length
        self._nodes = 0

    def repeat(self) -> None:
        """Runs the last pass again, over the same buffers and cache rows: a bare pass, for measurements."""
        if self._last is None:
            raise ValueError("there is no pass to repeat")
        self._last.run()

    def close(self) -> None:
        """Frees the session and the cache."""
        self._bindings.clear()
        self._last = None
        del self._session, self._cache

    def _pass(self, pending: Sequence[int], draft: Draft) -> Rows:
        start, committed, nodes = self._cache.length, len(pending), len(draft.tokens)
        used = committed + nodes
        # A pass as wide as the cache is a first prompt to GroupQueryAttention, which then reads one position only.
        room = min(self.rows - start, self.rows - 1)
        width = next((w for w in _WIDTHS if max(used, self._narrowest) <= w <= room), used)
        binding = self._last = self._binding(width, 1 + nodes)
        binding.fill_tokens(pending, draft, start)
        binding.fill_mask(start, committed, draft)
        binding.run()
        self._cache.append(committed)
        self._nodes = nodes
        kept = slice(committed - 1, used)
        inner = None if binding.inner is None else binding.inner[0, kept]
        return Rows(binding.logits[0], binding.hidden[0, kept], inner)

    def _binding(self, width: int, logit_rows: int) -> _Binding:
        key = (width, logit_rows)
        if key not in self._bindings:
            binding = _Binding(self._session, self.spec, self._cache, self._slots, width, logit_rows)
            if width not in _WIDTHS:
                return binding
            self._bindings[key] = binding
        return self._bindings[key]


def cache_rows(spec: GraphSpec, capacity: int | None) -> int:
    """Rows of cache to allocate: `capacity`, or where it is None what the graph was exported for.

    Raises:
        UsageError: It is no whole number, or more than the graph was exported for.
    """
    if capacity is None:
        return spec.capacity
    if isinstance(capacity, bool) or not isinstance(capacity, int) or not 2 <= capacity <= spec.capacity:
        raise UsageError(f"capacity is {capacity!r}: the graph was exported for 2 to {spec.capacity} rows")
    return capacity


def cache_shape(spec: GraphSpec) -> tuple[int, int, int, str]:
    """What two graphs must have in common to work in one cache."""
    return spec.layers, spec.kv_heads, spec.head_dim, spec.cache_dtype


def _fits_cache(spec: GraphSpec, host: Decoder) -> bool:
    """Whether a graph's layers are some of a host's, over positions as many as its cache has."""
    layers, *shape = cache_shape(spec)
    host_layers, *host_shape = cache_shape(host.spec)
    kept = spec.cache_layers or tuple(range(layers))
    whole = bool(spec.cache_layers) or layers == host_layers
    return whole and shape == host_shape and max(kept) < host_layers and spec.capacity >= host.rows


class _Binding:
    """Buffers and IOBinding of one width; refilled in place, so a pass binds nothing."""

    def __init__(
        self,
        session: ort.InferenceSession,
        spec: GraphSpec,
        cache: Cache,
        slots: Sequence[int],
        width: int,
        logit_rows: int,
    ) -> None:
        capacity = cache.capacity
        self._session = session
        self._io = session.io_binding()
        self._inputs: dict[str, NDArray[Any]] = {
            GraphNames.INPUT_IDS: np.zeros((1, width), np.int64),
            GraphNames.POSITION_IDS: np.zeros((1, width), np.int64),
            GraphNames.ATTENTION_BIAS: np.zeros((1, 1, width, capacity), cache.pool.dtype),
            GraphNames.LAST_INDEX: np.zeros(1, np.int32),
            GraphNames.TOTAL: np.full(1, capacity, np.int32),
            GraphNames.LOGIT_ROWS: np.zeros(logit_rows, np.int64),
        }
        self.logits = np.zeros((1, logit_rows, spec.vocab_size), np.float32)
        self.hidden = np.zeros((1, width, spec.hidden_size), np.float32)
        self.inner: Floats | None = None
        for name, array in self._inputs.items():
            self._bind(self._io.bind_input, name, array)
        self._bind(self._io.bind_output, GraphNames.LOGITS, self.logits)
        self._bind(self._io.bind_output, GraphNames.HIDDEN, self.hidden)
        if spec.taps:
            self.inner = np.zeros((1, width, len(spec.taps) * spec.hidden_size), np.float32)
            self._bind(self._io.bind_output, GraphNames.INNER, self.inner)
        self._bind_cache(slots, cache)
        self._ids = self._inputs[GraphNames.INPUT_IDS][0]
        self._positions = self._inputs[GraphNames.POSITION_IDS][0]
        self._bias = self._inputs[GraphNames.ATTENTION_BIAS][0, 0]
        self._last = self._inputs[GraphNames.LAST_INDEX]
        self._logit_rows = self._inputs[GraphNames.LOGIT_ROWS]
        self._masked = slice(0, 0)  # columns where the last pass left -inf
        self._width = width

    def fill_tokens(self, pending: Sequence[int], draft: Draft, start: int) -> None:
        committed, used = len(pending), len(pending) + len(draft.tokens)
        self._ids[:committed] = pending
        self._ids[committed:used] = draft.tokens
        if draft.is_chain:
            self._positions[:used] = np.arange(start, start + used)
        else:
            self._positions[:used] = positions(start, committed, draft.parents)
        self._ids[used:] = 0
        self._positions[used:] = start
        self._last[0] = start + self._width - 1
        self._logit_rows[:] = np.arange(committed - 1, used)

    def fill_mask(self, start: int, committed: int, draft: Draft) -> None:
        """Attention is causal by itself, so a chain needs no mask: only a tree's non-ancestors are cut."""
        self._bias[:, self._masked] = 0
        self._masked = slice(0, 0)
        if not draft.is_chain:
            used = committed + len(draft.tokens)
            self._masked = slice(start, start + used)
            self._bias[:used, self._masked] = np.where(visibility(committed, draft.parents), 0, -np.inf)

    def fill_apart(
        self, tokens: Sequence[int], positions: Sequence[int], sees: NDArray[np.bool_], wanted: Sequence[int]
    ) -> None:
        self._ids[:], self._positions[:], self._logit_rows[:] = tokens, positions, wanted
        total = sees.shape[1]
        self._bias[:, :total][~sees] = -np.inf
        self._last[0] = total - 1

    def run(self) -> None:
        self._session.run_with_iobinding(self._io)

    def _bind_cache(self, slots: Sequence[int], cache: Cache) -> None:
        """Layer l of the graph works in layer slots[l] of the cache."""
        for layer, slot in enumerate(slots):
            for offset, kind in enumerate(("key", "value")):
                tensor = cache.pool[2 * slot + offset]
                self._bind(self._io.bind_input, GraphNames.past(layer, kind), tensor)
                self._bind(self._io.bind_output, GraphNames.present(layer, kind), tensor)

    @staticmethod
    def _bind(bind: Any, name: str, array: NDArray[Any]) -> None:
        bind(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


def check_room(target: Any, pending: Sequence[int], draft: Draft) -> None:
    """A pass must have something to run and must fit into the cache: ONNX Runtime would write past its end."""
    if not pending:
        raise ValueError("a pass needs at least one pending token")
    rows = len(pending) + len(draft.tokens)
    if target.length + rows > target.capacity:
        raise ValueError(f"{target.length} rows and {rows} more do not fit into a cache of {target.capacity}")
    if rows == target.capacity and not draft.is_chain:
        # GroupQueryAttention takes a pass as wide as the cache for a first prompt and reads one position only.
        raise ValueError("a token tree cannot fill an empty cache in one pass")
    vocab = target.spec.vocab_size
    if min(pending) < 0 or max(pending) >= vocab or any(not 0 <= token < vocab for token in draft.tokens):
        raise ValueError(f"a token id is outside the vocabulary of {vocab}")


def _check_interface(session: ort.InferenceSession, spec: GraphSpec, path: Path) -> None:
    """Names, ranks, types and fixed dimensions of a graph agree with its manifest entry."""
    cache = "tensor(float)" if spec.cache_dtype == "float32" else "tensor(float16)"
    inputs: dict[str, tuple[str, list[int | None]]] = {
        GraphNames.INPUT_IDS: ("tensor(int64)", [1, None]),
        GraphNames.POSITION_IDS: ("tensor(int64)", [1, None]),
        GraphNames.ATTENTION_BIAS: (cache, [1, 1, None, None]),
        GraphNames.LAST_INDEX: ("tensor(int32)", [1]),
        GraphNames.TOTAL: ("tensor(int32)", [1]),
        GraphNames.LOGIT_ROWS: ("tensor(int64)", [None]),
    }
    outputs: dict[str, tuple[str, list[int | None]]] = {
        GraphNames.LOGITS: ("tensor(float)", [1, None, spec.vocab_size]),
        GraphNames.HIDDEN: ("tensor(float)", [1, None, spec.hidden_size]),
    }
    if spec.taps:
        outputs[GraphNames.INNER] = ("tensor(float)", [1, None, len(spec.taps) * spec.hidden_size])
    for layer in range(spec.layers):
        for kind in ("key", "value"):
            inputs[GraphNames.past(layer, kind)] = (cache, [1, spec.kv_heads, None, spec.head_dim])
            outputs[GraphNames.present(layer, kind)] = (cache, [1, spec.kv_heads, None, spec.head_dim])
    for wanted, given in ((inputs, session.get_inputs()), (outputs, session.get_outputs())):
        found = {item.name: (item.type, item.shape) for item in given}
        if set(found) != set(wanted):
            names = ", ".join(sorted(set(found) ^ set(wanted))[:4])
            raise BundleError(f"{path}: inputs or outputs differ from {spec.file}'s manifest entry ({names})")
        for name, (kind, shape) in wanted.items():
            if found[name][0] != kind or not _fits(found[name][1], shape):
                raise BundleError(f"{path}: {name!r} is {found[name]} where the manifest says {(kind, shape)}")


def _fits(found: Sequence[Any], wanted: Sequence[int | None]) -> bool:
    return len(found) == len(wanted) and all(
        want is None or have == want for have, want in zip(found, wanted, strict=True)
    )
