"""Bias correction: no mean error on the rows it was calibrated on, and less error on others."""

from __future__ import annotations

import numpy as np
import pytest

from specedge.quant.bias import corrected_bias
from specedge.quant.grid import dequantise, round_nearest
from specedge.tests.activations import GRIDS, activations, moments_of


@pytest.mark.parametrize("name", GRIDS)
def test_the_mean_is_what_it_was(rng, name):
    seen, unseen = activations(rng, 96)
    weight, bias = rng.standard_normal((32, 96)).astype(np.float32), rng.standard_normal(32).astype(np.float32)
    missed = weight - dequantise(round_nearest(weight, GRIDS[name]))
    shift = corrected_bias(bias, missed, moments_of(seen).mean) - bias
    before, after = seen @ missed.T, seen @ missed.T - shift
    assert np.abs(after.mean(0)).max() < 1e-4 * np.abs(before).max()
    # The mean square falls by the square of the mean.
    assert np.square(after).mean() == pytest.approx(np.square(before).mean() - np.square(shift).mean(), rel=1e-3)
    assert np.square(unseen @ missed.T - shift).mean() < np.square(unseen @ missed.T).mean()


def test_a_layer_without_a_bias_gets_one():
    missed, mean = np.array([[1, 2], [0, -1]], np.float32), np.array([3, 0.5], np.float32)
    assert corrected_bias(None, missed, mean).tolist() == [4, -0.5]
    assert corrected_bias(np.array([1, 1], np.float32), missed, mean).tolist() == [5, 0.5]
