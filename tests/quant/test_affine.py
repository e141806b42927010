"""Affine blocks: exact on their own grid, nearer than integer zero points off it, and what MatMulNBits computes."""

from __future__ import annotations

import numpy as np
import pytest

from specedge.quant.affine import dequantise_affine, quantise_affine, summing_matrix
from specedge.quant.blocks import dequantise_blocks, quantise_blocks


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
    affine = dequantise_affine(quantise_affine(weight, block_size=32), width)
    integer = dequantise_blocks(quantise_blocks(weight, bits=4, block_size=32, symmetric=False))
    # What is left is the twice rounded shift: 1/15 of 1/15 of its range.
    assert np.abs(affine - weight).max() < 0.01 * 0.05 * 15
    assert np.abs(affine - weight).mean() < 0.05 * np.abs(integer - weight).mean()


def test_outputs_are_nearer_than_with_integer_zero_points(rng):
    weight = rng.standard_normal((64, 576)).astype(np.float32)
    x = rng.standard_normal((16, 576)).astype(np.float32) + 0.5  # block sums that do not cancel
    exact = x @ weight.T
    affine = x @ dequantise_affine(quantise_affine(weight, block_size=32), 576).T
    integer = x @ dequantise_blocks(quantise_blocks(weight, bits=4, block_size=32, symmetric=False)).T
    assert np.square(affine - exact).mean() < 0.9 * np.square(integer - exact).mean()


def test_constant_blocks_and_zeros(rng):
    weight = np.zeros((4, 64), np.float32)
    weight[1] = 0.7
    weight[2] = -0.3
    assert np.abs(dequantise_affine(quantise_affine(weight, block_size=32), 64) - weight).max() < 0.7 / 100


def test_the_sums_are_those_of_the_blocks(rng):
    x = rng.standard_normal((3, 96)).astype(np.float32)
    sums = x @ summing_matrix(96, 32)
    assert sums.shape == (3, 32)
    assert np.allclose(sums[:, :3], x.reshape(3, 3, 32).sum(-1), atol=1e-5)
    assert (sums[:, 3:] == 0).all()


def test_a_width_that_is_no_multiple_of_the_block():
    with pytest.raises(ValueError, match="40 weights are no multiple of a block of 32"):
        quantise_affine(np.zeros((2, 40), np.float32), block_size=32)
