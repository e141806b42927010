"""Searched ranges: never a larger weighted error than the range that is spanned, and a brute search finds no better."""

from __future__ import annotations

import numpy as np
import pytest

from specedge.quant.grid import Group, dequantise, round_nearest
from specedge.quant.ranges import fit_range, round_searched
from specedge.tests.activations import GRIDS, activations


def error_of(weights, grid, group, importance):
    return (importance * np.square(weights - grid.values(grid.codes(weights, group), group))).sum(-1)


@pytest.mark.parametrize("name", GRIDS)
def test_no_group_is_worse_than_with_the_range_it_spans(rng, name):
    grid, size = GRIDS[name], GRIDS[name].group or 128
    weights = rng.standard_t(4, (300, size)).astype(np.float32)
    weights[0], weights[1] = 0, 3
    importance = rng.uniform(0, 1, size).astype(np.float32) ** 4
    searched, spanned = fit_range(weights, grid, importance), grid.fit(weights)
    errors = [error_of(weights, grid, group, importance) for group in (searched, spanned)]
    assert (errors[0] <= errors[1] * (1 + 1e-6)).all()
    assert errors[0].sum() < 0.93 * errors[1].sum()


def test_it_comes_near_the_best_scale_there_is(rng):
    grid = GRIDS["int4-sym-b32"]
    weights = rng.standard_normal((20, 32)).astype(np.float32)
    importance = rng.uniform(0.1, 1, 32).astype(np.float32)
    found = error_of(weights, grid, fit_range(weights, grid, importance), importance)
    spanned = grid.fit(weights)
    scales = np.concatenate([np.linspace(-1.6, -0.4, 1500), np.linspace(0.4, 1.6, 1500)])
    errors = [
        error_of(weights, grid, Group(spanned.scale * np.float32(share), None, None), importance) for share in scales
    ]
    assert found.sum() < 1.12 * np.min(errors, 0).sum()


def test_scales_are_such_as_can_be_stored(rng):
    for name, grid in GRIDS.items():
        group = fit_range(rng.standard_normal((50, 32)).astype(np.float32), grid, np.ones(32, np.float32))
        assert (group.scale == group.scale.astype(grid.scale_dtype).astype(np.float32)).all(), name
        if grid.kind == "integer" and not grid.symmetric:
            assert (group.zero == np.rint(group.zero)).all()


@pytest.mark.parametrize("name", GRIDS)
def test_the_error_falls_on_rows_it_never_saw(rng, name):
    seen, unseen = activations(rng, 192)
    weight = rng.standard_t(5, (64, 192)).astype(np.float32)
    searched = round_searched(weight, GRIDS[name], np.square(seen).mean(0))
    nearest = round_nearest(weight, GRIDS[name])
    errors = [np.square(unseen @ (weight - dequantise(way)).T).sum() for way in (searched, nearest)]
    assert errors[0] < 0.9 * errors[1]


def test_a_part_of_a_group(rng):
    weight = rng.standard_normal((5, 50)).astype(np.float32)
    searched = round_searched(weight, GRIDS["int4-sym-b32"], np.ones(50, np.float32))
    assert searched.codes.shape == (5, 64)
    assert (
        np.square(weight - dequantise(searched)).sum()
        <= np.square(weight - dequantise(round_nearest(weight, searched.grid))).sum()
    )
