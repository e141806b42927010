"""Weights on integer grids as onnxruntime's MatMulNBits reads them: a scale (and zero point) a block of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specedge.quant.grid import Rounded

__all__ = ["Blocks", "pack_blocks", "pack_values", "unpack_values"]

Matrix = NDArray[np.float32]


@dataclass(frozen=True)
class Blocks:
    """A weight [out, in] in blocks along `in`; w = (value - zero point) * scale.

    Attributes:
        values: uint8 [out, blocks, block_size * bits / 8]; with 4 bits the even weight is in the low half.
        scales: [out, blocks].
        zero_points: uint8 [out, ceil(blocks * bits / 8)], packed as the values are; None: all 2^(bits - 1).
        bits: 4 or 8.
        block_size: Weights in a block.
        width: Size of `in`; the last block is padded.
    """

    values: NDArray[np.uint8]
    scales: Matrix
    zero_points: NDArray[np.uint8] | None
    bits: int
    block_size: int
    width: int


def pack_blocks(rounded: Rounded) -> Blocks:
    """Packs a weight on an integer or affine grid in groups; a shift is left out.

    Raises:
        ValueError: The grid has other bits than 4 and 8.
    """
    grid, group = rounded.grid, rounded.group
    if grid.bits not in (4, 8):
        raise ValueError(f"blocks of {grid.bits} bits: there are 4 and 8")
    values = _unsigned(rounded.codes, 0 if group.zero is not None else 1 << (grid.bits - 1))
    packed = pack_values(values.reshape(*group.scale.shape, -1), grid.bits)
    zeros = None if group.zero is None else pack_values(group.zero.astype(np.uint8), grid.bits)
    return Blocks(packed, group.scale, zeros, grid.bits, grid.group, rounded.width)


def _unsigned(codes: NDArray[Any], middle: int) -> NDArray[np.uint8]:
    """Codes counted from the bottom of the grid."""
    whole = codes.view(np.uint8) if codes.dtype == np.int8 else codes.astype(np.uint8)
    result: NDArray[np.uint8] = whole + np.uint8(middle)  # modulo 256, as two's complement wants it
    return result


def pack_values(values: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Two 4-bit values a byte along the last axis, the first in the low half."""
    if bits == 8:
        return values
    if values.shape[-1] % 2:
        values = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, 1)])
    packed: NDArray[np.uint8] = np.bitwise_or(values[..., 0::2], np.left_shift(values[..., 1::2], np.uint8(4)))
    return packed


def unpack_values(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Undoes `pack_values`."""
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
