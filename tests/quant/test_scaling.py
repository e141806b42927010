"""Scaling: exact in exact numbers, better on rows that it never saw, one where nothing helps, the same in a group."""

from __future__ import annotations

import numpy as np
import pytest

from specedge.quant.grid import dequantise, round_nearest
from specedge.quant.scaling import search_scale
from specedge.tests.activations import GRIDS, activations, moments_of


def error(weights, grid, scale, rows, *, rounds_rows):
    x = rows / scale
    if rounds_rows:
        steps = np.abs(x).max(1, keepdims=True) / 127
        x = np.rint(x / steps) * steps
    return sum(
        np.square(rows @ weight.T - x @ dequantise(round_nearest(weight * scale, grid)).T).sum() for weight in weights
    )


@pytest.mark.parametrize("name", ["int4-sym-b32", "int4-sym-b64", "int4-asym-b64", "int4-affine-b32", "int3-sym-b32"])
def test_the_error_falls_on_rows_it_never_saw(rng, name):
    seen, unseen = activations(rng, 192)
    weights = [rng.standard_normal((outputs, 192)).astype(np.float32) for outputs in (40, 80)]
    scale = search_scale(weights, GRIDS[name], moments_of(seen), rounds_rows=False)
    ones = np.ones_like(scale)
    after, before = (error(weights, GRIDS[name], s, unseen, rounds_rows=False) for s in (scale, ones))
    assert after < 0.8 * before


def test_large_channels_stop_ruling_the_rounding_of_rows(rng):
    seen, unseen = activations(rng, 192)
    weights, grid = [rng.standard_normal((300, 192)).astype(np.float32)], GRIDS["int8-rows"]
    scale = search_scale(weights, grid, moments_of(seen), rounds_rows=True)
    ones = np.ones_like(scale)
    after, before = (error(weights, grid, s, unseen, rounds_rows=True) for s in (scale, ones))
    assert after < 0.6 * before
    static = search_scale(weights, grid, moments_of(seen), rounds_rows=True, static=True)
    assert static.max() > 2


def test_scales_are_normalised_and_positive(rng):
    (seen,) = activations(rng, 96, parts=1)
    seen[:, 7] = 0
    weight = rng.standard_normal((30, 96)).astype(np.float32)
    weight[:, 9] = 0
    scale = search_scale([weight], GRIDS["int4-sym-b32"], moments_of(seen), rounds_rows=False)
    assert scale.shape == (96,)
    assert (scale > 0).all()
    assert np.exp(np.log(scale).mean()) == pytest.approx(1, rel=1e-4)


def test_one_where_nothing_helps(rng):
    on_grid = rng.integers(-8, 8, (20, 64)).astype(np.float32)
    on_grid[:, ::32] = -8
    (seen,) = activations(rng, 64, parts=1)
    assert (search_scale([on_grid], GRIDS["int4-sym-b32"], moments_of(seen), rounds_rows=False) == 1).all()


def test_outputs_in_another_order_and_another_size_do_not_matter(rng):
    (seen,) = activations(rng, 64, parts=1)
    weight, moments = rng.standard_normal((50, 64)).astype(np.float32), moments_of(seen)
    scale = search_scale([weight], GRIDS["int8-rows"], moments, rounds_rows=True)
    assert np.allclose(scale, search_scale([weight[::-1]], GRIDS["int8-rows"], moments, rounds_rows=True), rtol=1e-5)
    assert np.allclose(scale, search_scale([4 * weight], GRIDS["int8-rows"], moments, rounds_rows=True), rtol=1e-5)


def test_gptq_makes_scaling_of_weights_alone_needless(rng):
    (seen,) = activations(rng, 64, parts=1)
    weights, moments = [rng.standard_normal((50, 64)).astype(np.float32)], moments_of(seen)
    scale = search_scale(weights, GRIDS["int4-sym-b32"], moments, rounds_rows=False, second_order=True)
    assert (scale == 1).all()
    assert search_scale(weights, GRIDS["int8-rows"], moments, rounds_rows=True, second_order=True).max() > 1.5
