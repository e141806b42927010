"""Moves rows of a cache on its device, by a graph whose input and output are the cache itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specedge.runtime.bundle import GraphSpec
from specedge.runtime.contracts import GraphNames
from specedge.runtime.errors import BundleError
from specedge.runtime.memory import Buffer, Memory
from specedge.runtime.providers import open_session

__all__ = ["Compactor"]


class Compactor:
    """One session; a run copies as many rows as are moved, whatever the capacity.

    Args:
        path: The .onnx file.
        spec: The graph whose cache it is.
        rows: Rows of the cache.
        memory: Where the cache is.
        device: Which execution provider to run on.
        threads: Threads to compute with; None takes all.

    Raises:
        BundleError: It is another graph.
    """

    def __init__(
        self, path: Path, spec: GraphSpec, rows: int, memory: Memory, *, device: str, threads: int | None = None
    ) -> None:
        self._session = open_session(path, device=device, threads=threads)
        names = {item.name for item in (*self._session.get_inputs(), *self._session.get_outputs())}
        if names != {GraphNames.POOL, GraphNames.SOURCE, GraphNames.PLACE, GraphNames.MOVED}:
            raise BundleError(f"{path}: no graph that moves rows of a cache; export the bundle again")
        self._memory = memory
        self._shape = (1, 2 * spec.layers * spec.kv_heads, rows, spec.head_dim)
        self._kind = spec.cache_element

    def __call__(self, pool: Buffer, source: Sequence[int], place: int) -> None:
        """Moves rows `source` of the pool to the places from `place` on."""
        binding, device = self._session.io_binding(), self._memory.device
        binding.bind_cpu_input(GraphNames.SOURCE, np.asarray(source, np.int64))
        binding.bind_cpu_input(GraphNames.PLACE, np.array([place], np.int64))
        binding.bind_input(GraphNames.POOL, device, 0, self._kind, self._shape, pool.pointer)
        binding.bind_output(GraphNames.MOVED, device, 0, self._kind, self._shape, pool.pointer)
        self._session.run_with_iobinding(binding)
