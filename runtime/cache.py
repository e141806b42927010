"""The KV pool: one allocation, a slice per tensor; committing moves rows, rewinding moves an offset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specedge.runtime.bundle import GraphSpec
from specedge.runtime.memory import Buffer, HostMemory, Memory

__all__ = ["Cache", "Mover"]

Mover = Callable[[Buffer, Sequence[int], int], None]
"""Moves rows of a pool that the host cannot reach: (pool, rows, the first row's new place)."""


class Cache:
    """Keys and values of all layers in one array.

    Attributes:
        length: Committed rows.
        capacity: Most rows.
    """

    def __init__(
        self,
        spec: GraphSpec,
        capacity: int,
        shared: Cache | None = None,
        *,
        memory: Memory | None = None,
        mover: Mover | None = None,
    ) -> None:
        """Makes a cache.

        Args:
            spec: The graph whose keys and values it holds.
            capacity: Most rows.
            shared: Another cache to work in; None allocates an array.
            memory: Where; None: in the host's memory.
            mover: Moves rows on a device; without one only chains can be committed there.
        """
        self._shape = (2 * spec.layers, 1, spec.kv_heads, capacity, spec.head_dim)
        self._memory = memory if memory is not None else HostMemory()
        # Zeros, not empty: masked rows are multiplied by zero, and 0 * NaN is NaN.
        kind = spec.cache_kind
        self._pool: Buffer = self._memory.buffer(self._shape, kind) if shared is None else shared._pool
        assert self._pool.host.shape == self._shape
        assert self._pool.host.dtype == kind
        self._mover = mover
        self._stride = int(np.prod(self._shape[1:])) * kind.itemsize
        self.capacity = capacity
        self.length = 0

    @property
    def pool(self) -> NDArray[Any]:
        """[2 * layers, 1, kv_heads, capacity, head_dim]; layer l's keys at 2 l, its values at 2 l + 1.

        Of a cache on a device it is a copy.
        """
        if not self._memory.local:
            self._pool.pull()
        return self._pool.host

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one tensor: [1, kv_heads, capacity, head_dim]."""
        return self._shape[1:]

    def pointer(self, tensor: int) -> int:
        """Address of one of the 2 * layers tensors."""
        return self._pool.pointer + tensor * self._stride

    def append(self, rows: int) -> None:
        """Commits the rows that a pass wrote right behind the committed ones."""
        self.length += rows
        assert self.length <= self.capacity

    def commit(self, rows: Sequence[int]) -> None:
        """Keeps some of the rows behind the committed ones, in the given order, and commits them.

        Args:
            rows: Offsets from `length`, e.g. (0, 2, 5): a path through a verified tree.
        """
        base, count = self.length, len(rows)
        moved = next((i for i, row in enumerate(rows) if row != i), count)
        if moved < count:  # rows that stand where they belong are left alone
            self._move([base + row for row in rows[moved:]], base + moved)
        self.length += count

    def rewind(self, length: int) -> None:
        """Forgets all rows from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot rewind a cache of {self.length} rows to {length}")
        self.length = length

    def _move(self, source: Sequence[int], place: int) -> None:
        if self._memory.local:
            pool = self._pool.host
            pool[:, :, :, place : place + len(source)] = pool[:, :, :, source]
        elif self._mover is None:
            raise ValueError("rows of this cache cannot be moved: its graph drafts chains only")
        else:
            self._mover(self._pool, source, place)
