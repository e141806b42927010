"""Committing moves rows as a fresh cache would hold them; rewinding moves an offset."""

from __future__ import annotations

import numpy as np
import pytest

from specedge.runtime.bundle import GraphSpec
from specedge.runtime.cache import Cache


def make(dtype="float32", capacity=16):
    spec = GraphSpec("t.onnx", "gqa", "fp32", 2, 3, 4, 12, 50, 64, dtype, 0)
    cache = Cache(spec, capacity)
    rows = np.arange(capacity, dtype=np.float32)[None, None, None, :, None]
    cache.pool[...] = rows + 100 * np.arange(4, dtype=np.float32).reshape(4, 1, 1, 1, 1)
    return cache


@pytest.mark.parametrize("path", [(), (0,), (0, 1, 2), (0, 2, 5), (1,), (3, 4), (0, 1, 4, 6)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_commit_keeps_the_path_in_order(path, dtype):
    cache = make(dtype)
    cache.append(5)
    before = cache.pool.copy()
    cache.commit(path)
    assert cache.length == 5 + len(path)
    assert (cache.pool[:, :, :, :5] == before[:, :, :, :5]).all()
    expected = before[:, :, :, [5 + row for row in path]]
    assert (cache.pool[:, :, :, 5 : 5 + len(path)] == expected).all()


def test_a_chain_is_committed_without_moving_anything():
    cache = make()
    cache.append(3)
    before = cache.pool.copy()
    cache.commit((0, 1, 2))
    assert (cache.pool == before).all()


def test_rewind_goes_back_only():
    cache = make()
    cache.append(6)
    cache.rewind(2)
    assert cache.length == 2
    with pytest.raises(ValueError, match="cannot rewind a cache of 2 rows to 3"):
        cache.rewind(3)


def test_a_new_cache_holds_no_nan():
    spec = GraphSpec("t.onnx", "gqa", "fp32", 2, 3, 4, 12, 50, 64, "float32", 0)
    assert np.isfinite(Cache(spec, 64).pool).all()
