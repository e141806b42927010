"""4-bit blocks with a real minimum, in a form that symmetric MatMulNBits computes.

A block spans from its smallest weight m to its largest in 15 steps of d (GGUF's Q4_1), so

    w = d k + m = d (k - 8) + o   with k = 0 ... 15 and o = m + 8 d.

An integer zero point rounds m to a multiple of d: all weights of the block are then off by the
same amount, and errors of one sign add up. MatMulNBits takes real zero points too, but computes
with them 40 times slower on a CPU. Here the shift stays exact enough at a tenth of a pass's time
(7.4 against 6.8 ms on SmolLM2-135M, two threads): since

    sum_i o x_i = o * (sum_i x_i)   over a block,

the sums of x over its blocks are appended to x as further inputs, and the o's to the weight as
further columns: once rounded to 4-bit blocks themselves, and once more for what that left.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specedge.quant.blocks import Blocks, dequantise_blocks, pack_values, quantise_blocks

__all__ = ["ROUNDS", "dequantise_affine", "quantise_affine", "summing_matrix"]

Matrix = NDArray[np.float32]

_BITS = 4
_STEPS = (1 << _BITS) - 1
_MIDDLE = 1 << (_BITS - 1)
ROUNDS = 2
"""How often the shifts are rounded, and the sums stand among the inputs: 4 bits, and 4 bits of the rest."""


def quantise_affine(matrix: Matrix, *, block_size: int, scale_dtype: str = "float32") -> Blocks:
    """Rounds a weight [out, in] to blocks with a real minimum.

    Args:
        matrix: The weight.
        block_size: Weights that share a scale and a minimum.
        scale_dtype: numpy name of the scales' type.

    Returns:
        Symmetric blocks [out, in + ROUNDS * sums]: multiply them with x, followed `ROUNDS` times by
        x @ summing_matrix(in, block_size).

    Raises:
        ValueError: `in` is no multiple of the block size.
    """
    outputs, width = matrix.shape
    count = _blocks(width, block_size)
    blocks = matrix.reshape(outputs, count, block_size)
    low = blocks.min(-1)
    scale = ((blocks.max(-1) - low) / _STEPS).astype(scale_dtype).astype(np.float32)
    units = np.divide(blocks - low[..., None], scale[..., None], out=np.zeros_like(blocks), where=scale[..., None] != 0)
    steps = np.clip(np.rint(units), 0, _STEPS).astype(np.uint8)
    rest = np.zeros((outputs, _padded(count, block_size)), np.float32)
    rest[:, :count] = low + _MIDDLE * scale
    values, scales = [pack_values(steps, _BITS)], [scale.astype(scale_dtype)]
    for _ in range(ROUNDS):
        shift = quantise_blocks(rest, bits=_BITS, block_size=block_size, symmetric=True, scale_dtype=scale_dtype)
        rest = rest - dequantise_blocks(shift)
        values.append(shift.values)
        scales.append(shift.scales)
    total = width + ROUNDS * rest.shape[1]
    return Blocks(np.concatenate(values, 1), np.concatenate(scales, 1), None, _BITS, block_size, total)


def dequantise_affine(blocks: Blocks, width: int) -> Matrix:
    """The weight [out, width] that multiplying `quantise_affine`'s blocks amounts to."""
    wide = dequantise_blocks(blocks)
    shifts = wide[:, width:].reshape(len(wide), ROUNDS, -1).sum(1)
    result: Matrix = wide[:, :width] + shifts @ summing_matrix(width, blocks.block_size).T
    return result


def summing_matrix(width: int, block_size: int) -> Matrix:
    """[width, sums] of ones and zeros: x times it is the sum over each block of x, padded to whole blocks."""
    count = _blocks(width, block_size)
    sums = np.zeros((width, _padded(count, block_size)), np.float32)
    sums[np.arange(width), np.arange(width) // block_size] = 1
    return sums


def _blocks(width: int, block_size: int) -> int:
    if width % block_size:
        raise ValueError(f"{width} weights are no multiple of a block of {block_size}")
    return width // block_size


def _padded(count: int, block_size: int) -> int:
    return -(-count // block_size) * block_size
