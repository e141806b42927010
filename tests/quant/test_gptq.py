"""GPTQ: the paper's update, never worse than nearest rounding, better on rows that it never saw."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specedge.quant.descent import output_error
from specedge.quant.gptq import DAMPING, round_second_order
from specedge.quant.grid import Grid, dequantise, round_nearest
from specedge.tests.activations import GRIDS, activations


def as_the_paper_has_it(weight, grid, second, damping):
    """Column by column with the inverse of what is left, in float64: no factorisation, no blocks of updates."""
    weight, width = weight.astype(np.float64), weight.shape[1]
    inverse = np.linalg.inv(second + damping * np.diagonal(second).mean() * np.eye(width))
    size = grid.group or width
    codes, group = [], None
    for column in range(width):
        if column % size == 0:
            group = grid.fit(weight[:, column : column + size].astype(np.float32))
        code = grid.codes(weight[:, column, None].astype(np.float32), group)
        missed = weight[:, column] - grid.values(code, group)[:, 0]
        weight -= np.outer(missed / inverse[column, column], inverse[column])
        # What is left: the inverse without this column, by one step of Gaussian elimination.
        inverse -= np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
        inverse[column] = inverse[:, column] = 0
        inverse[column, column] = 1
        codes.append(code[:, 0])
    return np.stack(codes, 1)


@pytest.mark.parametrize("name", GRIDS)
def test_it_is_the_papers_update(rng, name):
    (rows,) = activations(rng, 128, parts=1)
    second = rows.T @ rows / len(rows)
    weight = rng.standard_normal((24, 128)).astype(np.float32)
    found = round_second_order(weight, GRIDS[name], second, rounds=0)
    expected = as_the_paper_has_it(weight, GRIDS[name], second.astype(np.float64), DAMPING)
    # Rounding of sums may tip a weight between two values, and then those after it.
    same = [(a == b).all() for a, b in zip(found.codes, expected, strict=True)]
    assert np.mean(same) > 0.6


def test_two_weights_by_hand():
    # Inputs that are always equal: what the first weight loses, the others share.
    grid = Grid("integer", 4, narrow=True)
    weight = np.array([[0.4, 7.0]], np.float32)
    codes = round_second_order(weight, grid, np.ones((2, 2), np.float32), damping=1e-6).codes
    assert codes.tolist() == [[0, 7]]
    weight = np.array([[0.4, 6.4, 7.0]], np.float32)
    codes = round_second_order(weight, grid, np.ones((3, 3), np.float32), damping=1e-6).codes
    assert codes.tolist() == [[0, 7, 7]]
    assert round_nearest(weight, grid).codes.tolist() == [[0, 6, 7]]


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("name", GRIDS)
def test_the_error_falls_on_rows_it_never_saw(rng, name, search):
    seen, unseen = activations(rng, 192)
    weight = rng.standard_normal((64, 192)).astype(np.float32)
    rounded = round_second_order(weight, GRIDS[name], seen.T @ seen / len(seen), search_range=search)
    nearest = round_nearest(weight, GRIDS[name])
    errors = [np.square(unseen @ (weight - dequantise(way)).T).sum() for way in (rounded, nearest)]
    assert errors[0] < 0.75 * errors[1]


@settings(max_examples=30)
@given(
    st.sampled_from(sorted(GRIDS)), st.integers(1, 70), st.integers(1, 9), st.integers(1, 80), st.integers(0, 2**32 - 1)
)
def test_no_output_is_worse_than_with_nearest_rounding(name, width, outputs, count, seed):
    rng = np.random.default_rng(seed)
    rows = (rng.standard_normal((count, width)) * rng.uniform(0, 9, width)).astype(np.float32)
    rows[:, rng.random(width) < 0.2] = 0
    second = rows.T @ rows / np.float32(count)
    weight = rng.standard_normal((outputs, width)).astype(np.float32)
    nearest = round_nearest(weight, GRIDS[name])
    bound = output_error(weight - dequantise(nearest), second)
    for search in (False, True):
        rounded = round_second_order(weight, GRIDS[name], second, search_range=search)
        assert rounded.codes.shape == nearest.codes.shape
        assert rounded.codes.dtype == nearest.codes.dtype
        assert rounded.group.scale.shape == nearest.group.scale.shape
        assert (output_error(weight - dequantise(rounded), second) <= bound).all()


@pytest.mark.parametrize("name", GRIDS)
def test_outputs_are_rounded_each_for_itself(rng, name, monkeypatch):
    (rows,) = activations(rng, 96, parts=1)
    second = rows.T @ rows / len(rows)
    weight = rng.standard_normal((40, 96)).astype(np.float32)
    whole = round_second_order(weight, GRIDS[name], second, search_range=True)
    order = rng.permutation(40)
    assert (round_second_order(weight[order], GRIDS[name], second, search_range=True).codes == whole.codes[order]).all()
    monkeypatch.setattr("specedge.quant.gptq._ROWS", 7)
    parts = round_second_order(weight, GRIDS[name], second, search_range=True)
    assert (parts.codes == whole.codes).mean() > 0.99  # a library may add in another order
    assert np.allclose(parts.group.scale, whole.group.scale, rtol=0.05)


def test_twice_the_weight_gets_the_same_codes(rng):
    (rows,) = activations(rng, 96, parts=1)
    second = rows.T @ rows / len(rows)
    weight = rng.standard_normal((16, 96)).astype(np.float32)
    once = round_second_order(weight, GRIDS["int3-sym-b32"], second, search_range=True)
    twice = round_second_order(2 * weight, GRIDS["int3-sym-b32"], 4 * second, search_range=True)
    assert (once.codes == twice.codes).all()
    assert (2 * once.group.scale == twice.group.scale).all()


def test_inputs_that_do_not_correlate_are_rounded_to_nearest(rng):
    weight = rng.standard_normal((16, 64)).astype(np.float32)
    for second in (np.zeros((64, 64), np.float32), np.diag(rng.uniform(0, 2, 64)).astype(np.float32)):
        rounded = round_second_order(weight, GRIDS["int4-sym-b32"], second, rounds=0)
        assert (rounded.codes == round_nearest(weight, GRIDS["int4-sym-b32"]).codes).all()


def test_an_input_that_was_never_seen_is_rounded_to_nearest(rng):
    (rows,) = activations(rng, 64, parts=1)
    rows[:, 10] = 0
    weight = rng.standard_normal((16, 64)).astype(np.float32)
    rounded = round_second_order(weight, GRIDS["int8-rows"], rows.T @ rows / len(rows))
    assert (rounded.codes[:, 10] == round_nearest(weight, GRIDS["int8-rows"]).codes[:, 10]).all()


def test_few_rows_of_many_inputs(rng):
    rows = rng.standard_normal((5, 64)).astype(np.float32)
    weight = rng.standard_normal((16, 64)).astype(np.float32)
    rounded = round_second_order(weight, GRIDS["int4-sym-b32"], rows.T @ rows / 5)
    error = np.square(rows @ (weight - dequantise(rounded)).T).sum()
    assert error < 0.2 * np.square(rows @ (weight - dequantise(round_nearest(weight, rounded.grid))).T).sum()


def test_moments_of_another_layer_and_bad_moments(rng):
    weight = rng.standard_normal((4, 32)).astype(np.float32)
    with pytest.raises(ValueError, match="second moments of 16 inputs for a weight of 32"):
        round_second_order(weight, GRIDS["int4-sym-b32"], np.eye(16, dtype=np.float32))
    with pytest.raises(ValueError, match="not finite"):
        round_second_order(weight, GRIDS["int4-sym-b32"], np.full((32, 32), np.nan, np.float32))
    with pytest.raises(ValueError, match="not positive"):
        round_second_order(
            weight, GRIDS["int4-sym-b32"], np.ones((32, 32), np.float32) * 9 - 8 * np.eye(32, dtype=np.float32)
        )
