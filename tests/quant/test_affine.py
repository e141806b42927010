"""Affine blocks: exact on their own grid, nearer than integer zero points off it, and what MatMulNBits computes."""

from __future__ import annotations

import numpy as np
import pytest

from specedge.quant.affine import ROUNDS, pack_affine, rounded_shifts, summing_matrix
from specedge.quant.blocks import unpack_values
from specedge.quant.grid import Grid, dequantise, round_nearest

AFFINE = Grid("affine", 4, 32)
ZERO_POINTS = Grid("integer", 4, 32, symmetric=False)


def stored(weight):
    """The weight that the packed blocks amount to."""
    width = weight.shape[1]
    blocks = pack_affine(round_nearest(weight, AFFINE))
    whole = (unpack_values(blocks.values, 4).astype(np.float32) - 8) * blocks.scales[..., None]
    wide = whole.reshape(len(weight), -1)
    assert wide.shape[1] == blocks.width
    shifts = wide[:, width:].reshape(len(weight), ROUNDS, -1).sum(1)
    return wide[:, :width] + shifts @ summing_matrix(width, 32, 32).T


def with_zero_points(weight):
    return dequantise(round_nearest(weight, ZERO_POINTS))


def on_grid(rng, outputs, width, block=32):
    """A weight that a GGUF Q4_1 file could hold: every block spans all 16 steps from a real minimum."""
    steps = rng.integers(0, 16, (outputs, width // block, block)).astype(np.float32)
    steps[..., 0], steps[..., 1] = 0, 15
    scale = rng.uniform(0.01, 0.05, (outputs, width // block, 1)).astype(np.float32)
    low = -scale * rng.uniform(5, 10, scale.shape).astype(np.float32)
    return (steps * scale + low).reshape(outputs, width)


@pytest.mark.parametrize("width", [32, 576, 1536])
def test_a_weight_on_the_grid_comes_back(rng, width):
    weight = on_grid(rng, 24, width)
    affine = stored(weight)
    integer = with_zero_points(weight)
    # What is left is the twice rounded shift: 1/15 of 1/15 of its range.
    assert np.abs(affine - weight).max() < 0.01 * 0.05 * 15
    assert np.abs(affine - weight).mean() < 0.05 * np.abs(integer - weight).mean()


def test_outputs_are_nearer_than_with_integer_zero_points(rng):
    weight = rng.standard_normal((64, 576)).astype(np.float32)
    x = rng.standard_normal((16, 576)).astype(np.float32) + 0.5  # block sums that do not cancel
    exact = x @ weight.T
    affine = x @ stored(weight).T
    integer = x @ with_zero_points(weight).T
    assert np.square(affine - exact).mean() < 0.9 * np.square(integer - exact).mean()


def test_constant_blocks_and_zeros(rng):
    weight = np.zeros((4, 64), np.float32)
    weight[1] = 0.7
    weight[2] = -0.3
    assert np.abs(stored(weight) - weight).max() < 0.7 / 100


def test_the_sums_are_those_of_the_blocks(rng):
    x = rng.standard_normal((3, 96)).astype(np.float32)
    sums = x @ summing_matrix(96, 32, 32)
    assert summing_matrix(100, 32).shape == (100, 4)
    assert sums.shape == (3, 32)
    assert np.allclose(sums[:, :3], x.reshape(3, 3, 32).sum(-1), atol=1e-5)
    assert (sums[:, 3:] == 0).all()


def test_shifts_are_what_is_packed_within_a_fraction_of_a_step(rng):
    rounded = round_nearest(rng.standard_normal((16, 64)).astype(np.float32), AFFINE)
    shifts = sum(dequantise(part) for part in rounded_shifts(rounded))[:, :2]
    assert np.abs(shifts - rounded.group.shift).max() < 0.02 * np.abs(rounded.group.shift).max()


def test_a_width_that_is_no_multiple_of_the_block():
    with pytest.raises(ValueError, match="40 weights are no multiple of a block of 32"):
        pack_affine(round_nearest(np.zeros((2, 40), np.float32), AFFINE))
