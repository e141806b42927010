"""int8 activations: the error on the rows that were kept is that of all rows, and the static step is the best one."""

from __future__ import annotations

import numpy as np
import pytest

from specedge.quant.activations import TOP, rounding_error, search_step
from specedge.tests.activations import activations, moments_of


def by_rows(rows):
    steps = np.abs(rows).max(1, keepdims=True) / TOP
    return np.rint(rows / steps) * steps


def by_step(rows, step):
    return np.clip(np.rint(rows / step), -TOP, TOP) * step


def heavy_tailed(rng):
    rows = rng.standard_t(3, (2000, 48)).astype(np.float32)
    rows[::500] *= 30
    return rows


def test_the_error_of_rows_with_steps_of_their_own(rng):
    rows, scale = heavy_tailed(rng), rng.uniform(0.3, 3, 48).astype(np.float32)
    expected = np.square((by_rows(rows / scale) - rows / scale) * scale).mean(0)
    assert rounding_error(moments_of(rows), scale).sum() == pytest.approx(expected.sum(), rel=0.25)


def test_the_error_of_a_shared_step(rng):
    rows = heavy_tailed(rng)
    moments, ones = moments_of(rows), np.ones(48, np.float32)
    for step in (0.02, 0.1, 0.5, 3.0):
        expected = np.square(by_step(rows, step) - rows).mean()
        assert rounding_error(moments, ones, step).mean() == pytest.approx(expected, rel=0.25), step


@pytest.mark.parametrize("law", ["heavy", "correlated"])
def test_the_step_lowers_the_error_on_rows_it_never_saw(rng, law):
    seen, unseen = (heavy_tailed(rng), heavy_tailed(rng)) if law == "heavy" else activations(rng, 48)
    weight = rng.standard_normal((32, 48)).astype(np.float32)
    moments, ones = moments_of(seen), np.ones(48, np.float32)
    step = search_step(moments, ones, np.square(weight).sum(0))

    def error(step, rows):
        return np.square((by_step(rows, step) - rows) @ weight.T).sum()

    largest = float(moments.largest.max()) / TOP
    assert 0 < step <= largest * (1 + 1e-6)
    assert error(step, unseen) <= error(largest, unseen) * 1.01
    assert error(step, seen) < 1.2 * min(error(largest * share, seen) for share in 2.0 ** -np.arange(0, 10, 0.1))


def test_rows_of_zeros():
    moments, ones = moments_of(np.zeros((9, 4), np.float32)), np.ones(4, np.float32)
    assert (rounding_error(moments, ones) == 0).all()
    assert search_step(moments, ones, ones) > 0
