"""The KV pool: one allocation, a slice per tensor; committing moves rows, rewinding moves an offset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specedge.runtime.bundle import GraphSpec

__all__ = ["Cache"]


class Cache:
    """Keys and values of all layers in one array.

    Attributes:
        pool: [2 * layers, 1, kv_heads, capacity, head_dim]; layer l's keys at 2 l, its values at 2 l + 1.
        length: Committed rows.
    """

    def __init__(self, spec: GraphSpec, capacity: int, pool: NDArray[Any] | None = None) -> None:
        """Makes a cache.

        Args:
            spec: The graph whose keys and values it holds.
            capacity: Most rows.
            pool: The array of another cache to work in; None allocates one.
        """
        shape = (2 * spec.layers, 1, spec.kv_heads, capacity, spec.head_dim)
        # Zeros, not empty: masked rows are multiplied by zero, and 0 * NaN is NaN.
        self.pool: NDArray[Any] = np.zeros(shape, np.dtype(spec.cache_dtype)) if pool is None else pool
        assert self.pool.shape == shape
        assert self.pool.dtype == spec.cache_dtype
        self.capacity = capacity
        self.length = 0

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
            source = base + np.asarray(rows[moved:])
            self.pool[:, :, :, base + moved : base + count] = self.pool[:, :, :, source]
        self.length += count

    def rewind(self, length: int) -> None:
        """Forgets all rows from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot rewind a cache of {self.length} rows to {length}")
        self.length = length
