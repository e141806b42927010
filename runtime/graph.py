"""A decoder graph with its cache: the speculative graph as a `Target`.

Shapes of the graph depend on the number of rows only (the cache's are the capacity's), so every
width keeps one persistent IOBinding whose buffers are refilled in place; on CUDA a captured graph too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specedge.runtime.binding import Binding
from specedge.runtime.bundle import GraphSpec
from specedge.runtime.cache import Cache
from specedge.runtime.compaction import Compactor
from specedge.runtime.contracts import EMPTY_DRAFT, Draft, Floats, Rows
from specedge.runtime.errors import BundleError, UsageError
from specedge.runtime.interface import check_interface
from specedge.runtime.memory import Memory
from specedge.runtime.providers import memory_of, open_session, run_options

__all__ = ["PREFILL_CHUNK", "Decoder", "cache_rows", "cache_shape", "check_room"]

PREFILL_CHUNK = 256
# Wider passes get a binding for the one run: padding a prompt would cost more than binding it.
_WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64)
# On a device every width has its buffers, and those of rounds a captured graph; padding is nearly free there.
_DEVICE_WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, PREFILL_CHUNK)
_WIDEST_ROUND = 64


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
        masked: False takes the twin without a mask, where there is one: faster on CUDA, and for chains only.
        captured: Whether rounds are captured once and replayed, on CUDA.
        hidden: Whether hidden rows are wanted; without heads to read them they may stay on the device.
        memory: Where tensors live; None: where the device computes.

    Attributes:
        looked_at: How many of a row's likeliest tokens anyone looks at; None: all. Where the graph finds these by
            itself, logits stay on the device, and a row is -inf but for them.

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
        masked: bool = True,
        captured: bool = True,
        hidden: bool = True,
        memory: Memory | None = None,
    ) -> None:
        if not spec.tree:
            raise BundleError(
                f"{path}: a {spec.flavour} graph where a speculative one belongs; export the bundle again"
            )
        if host is not None and not _fits_cache(spec, host):
            raise BundleError(f"{path}: its cache does not fit into that of {host.spec.file}; export the bundle again")
        rows = host.rows if host is not None else cache_rows(spec, capacity)
        self.spec: GraphSpec = spec
        self.path = path
        self.looked_at: int | None = None
        self._masked = masked or not spec.chains
        self._hidden = hidden
        self._memory: Memory = memory if memory is not None else memory_of(device)
        file = path if self._masked else path.with_name(PurePosixPath(spec.chains).name)
        self._session = open_session(file, device=device, threads=threads, spec=spec, captured=captured)
        check_interface(self._session, spec, file, masked=self._masked)
        self._cache = self._make_cache(rows, host, device, threads)
        self._slots = spec.cache_layers if host is not None and spec.cache_layers else tuple(range(spec.layers))
        self._widths = _WIDTHS if self._memory.local else _DEVICE_WIDTHS
        self._bindings: dict[tuple[int, int], Binding] = {}
        self._last: Binding | None = None
        self._nodes = 0
        self._narrowest = 2 if paired else 1

    def _make_cache(self, rows: int, host: Decoder | None, device: str, threads: int | None) -> Cache:
        spec = self.spec
        if host is not None:
            return Cache(host.spec, rows, host._cache, memory=self._memory)
        mover = None
        if not self._memory.local and spec.compact:
            file = self.path.with_name(PurePosixPath(spec.compact).name)
            # An engine would be compiled for nothing: the CUDA provider copies as fast.
            copier = "cuda" if device == "tensorrt" else device
            mover = Compactor(file, spec, rows, self._memory, device=copier, threads=threads)
        return Cache(spec, rows, memory=self._memory, mover=mover)

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

    def padded(self, rows: int) -> int:
        """How many rows a pass of so many runs, where there is room: the next width that has a binding."""
        wanted = max(rows, self._narrowest)
        return next((width for width in self._widths if wanted <= width), wanted)

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
        binding = self._new_binding(width, len(wanted))
        binding.fill_apart(tokens, positions, sees, wanted)
        binding.run()
        self._cache.append(width)
        self._nodes = 0
        return binding.logits()

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
        width = next((w for w in self._widths if max(used, self._narrowest) <= w <= room), used)
        binding = self._last = self._binding(width, self._logit_rows(width, committed, nodes))
        binding.fill(pending, draft, start)
        binding.run()
        self._cache.append(committed)
        self._nodes = nodes
        kept = slice(committed - 1, used)
        logits = binding.logits(self.looked_at)[: 1 + nodes]
        if not self._hidden and not self._memory.local:
            return Rows(logits)
        hidden, inner = binding.hidden()
        return Rows(logits, hidden[kept], None if inner is None else inner[kept])

    def _logit_rows(self, width: int, committed: int, nodes: int) -> int:
        """As many as are wanted; on a device that has a graph for each width as many as there are rows."""
        prompt = nodes == 0 and committed > 1
        return 1 + nodes if self._memory.local or prompt or width > _WIDEST_ROUND else width

    def _binding(self, width: int, logit_rows: int) -> Binding:
        key = (width, logit_rows)
        if key not in self._bindings:
            binding = self._new_binding(width, logit_rows)
            if width not in self._widths:
                return binding
            self._bindings[key] = binding
        return self._bindings[key]

    def _new_binding(self, width: int, logit_rows: int) -> Binding:
        # Only rounds are captured: what they run is the same again and again.
        captured = width in self._widths and logit_rows == width <= _WIDEST_ROUND
        options = run_options(len(self._bindings) + 1 if captured else None) if not self._memory.local else None
        return Binding(
            self._session,
            self.spec,
            self._cache,
            self._slots,
            width,
            logit_rows,
            self._memory,
            masked=self._masked,
            run_options=options,
        )


def cache_rows(spec: GraphSpec, capacity: int | None) -> int:
    """Rows of cache to allocate: `capacity`, or where it is None what the graph was exported for.

    Raises:
        UsageError: It is no whole number, or more than the graph was exported for.
    """
    if capacity is None:
        return spec.capacity
    if spec.fixed and capacity != spec.capacity:
        raise UsageError(f"capacity is {capacity!r}: the graph was compiled for {spec.capacity} rows; export it anew")
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
