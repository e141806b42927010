"""The balance: where it stands the objective's derivative is zero, within bounds."""

from __future__ import annotations

import numpy as np
import pytest

from specedge.quant.balance import balanced_scale
from specedge.tests.activations import activations, moments_of


def objective(moments, scale, sizes, power, shared):
    powers = np.power(np.abs(moments.rows.astype(np.float64)) / scale, power).sum(1)
    peak = (moments.stands_for @ powers) ** (2 / power) if shared else moments.stands_for @ powers ** (2 / power)
    return peak * (sizes * scale * scale).sum()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("power", [2, 4])
def test_no_small_change_lowers_the_objective(rng, power, shared):
    (rows,) = activations(rng, 24, parts=1)
    moments, sizes = moments_of(rows), rng.uniform(0.2, 3, 24).astype(np.float32)
    scale = balanced_scale(moments, sizes, power, shared=shared)
    least = objective(moments, scale, sizes, power, shared)
    assert least < 0.9 * objective(moments, np.ones(24), sizes, power, shared)
    for _ in range(50):
        other = scale * np.exp(rng.standard_normal(24) * 0.1)
        assert objective(moments, other, sizes, power, shared) > least * 0.998


def test_two_is_the_root_of_sizes(rng):
    (rows,) = activations(rng, 24, parts=1)
    moments, sizes = moments_of(rows[:400]), rng.uniform(0.2, 3, 24).astype(np.float32)
    expected = (np.square(rows[:400]).mean(0) / sizes) ** 0.25
    expected /= np.exp(np.log(expected).mean())
    assert np.allclose(balanced_scale(moments, sizes, 2, shared=False), expected, rtol=0.02)


def test_inputs_never_seen_stay_within_bounds(rng):
    (rows,) = activations(rng, 24, parts=1)
    rows[:, 5] = 0
    scale = balanced_scale(moments_of(rows), np.ones(24, np.float32), 4, shared=False)
    assert np.exp(np.log(scale).mean()) == pytest.approx(1, rel=1e-4)
    assert scale.min() > 1e-3
