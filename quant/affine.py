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

from specedge.quant.blocks import Blocks, pack_blocks
from specedge.quant.grid import Grid, Rounded, dequantise, round_nearest

__all__ = ["ROUNDS", "pack_affine", "rounded_shifts", "summing_matrix"]

Matrix = NDArray[np.float32]

ROUNDS = 2
"""How often the shifts are rounded, and the sums stand among the inputs: 4 bits, and 4 bits of the rest."""


def pack_affine(rounded: Rounded) -> Blocks:
    """Packs a weight [out, in] on a 4-bit affine grid.

    Returns:
        Symmetric blocks [out, in + ROUNDS * sums]: multiply them with x, followed `ROUNDS` times by
        x @ summing_matrix(in, block_size, block_size).

    Raises:
        ValueError: `in` is no multiple of the block size.
    """
    size = rounded.grid.group
    if rounded.width % size:
        raise ValueError(f"{rounded.width} weights are no multiple of a block of {size}")
    parts = [pack_blocks(rounded), *(pack_blocks(shift) for shift in rounded_shifts(rounded))]
    total = sum(part.width for part in parts)
    values, scales = (np.concatenate([getattr(part, name) for part in parts], 1) for name in ("values", "scales"))
    return Blocks(values, scales, None, rounded.grid.bits, size, total)


def rounded_shifts(rounded: Rounded) -> list[Rounded]:
    """The shifts of an affine grid, [out, sums], as 4-bit blocks: their sum is what `pack_affine` stores."""
    grid, shift = rounded.grid, rounded.group.shift
    assert shift is not None
    rest = np.zeros((len(shift), _padded(shift.shape[1], grid.group)), np.float32)
    rest[:, : shift.shape[1]] = shift
    blocks = Grid("integer", grid.bits, grid.group, scale_dtype=grid.scale_dtype)
    parts = []
    for _ in range(ROUNDS):
        parts.append(round_nearest(rest, blocks))
        rest = rest - dequantise(parts[-1])
    return parts


def summing_matrix(width: int, block_size: int, multiple: int = 1) -> Matrix:
    """[width, sums] of ones and zeros: x times it is the sum over each block of x.

    Args:
        width: Size of x.
        block_size: Inputs that are added up.
        multiple: The number of sums is padded to one of this.
    """
    sums = np.zeros((width, _padded(-(-width // block_size), multiple)), np.float32)
    sums[np.arange(width), np.arange(width) // block_size] = 1
    return sums


def _padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
