"""Block-wise integers in the layout of onnxruntime's MatMulNBits: a scale (and zero point) for each block of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Blocks", "dequantise_blocks", "pack_values", "quantise_blocks", "unpack_values"]

Matrix = NDArray[np.float32]

_CHUNK = 1 << 22  # weights quantised at a time, which bounds the temporary arrays


@dataclass(frozen=True)
class Blocks:
    """A weight [out, in] in blocks along `in`; w = (value - zero point) * scale.

    Attributes:
        values: uint8 [out, blocks, block_size * bits / 8]; with 4 bits the even weight is in the low half.
        scales: [out, blocks], float32 or float16.
        zero_points: uint8 [out, ceil(blocks * bits / 8)], packed as the values are; None: all 2^(bits - 1).
        bits: 4 or 8.
        block_size: Weights in a block.
        width: Size of `in`; the last block is padded.
    """

    values: NDArray[np.uint8]
    scales: NDArray[np.floating[Any]]
    zero_points: NDArray[np.uint8] | None
    bits: int
    block_size: int
    width: int


def quantise_blocks(
    matrix: Matrix, *, bits: int, block_size: int, symmetric: bool, scale_dtype: str = "float32"
) -> Blocks:
    """Rounds a weight [out, in] to blocks.

    Symmetric blocks have their largest magnitude at the end of the range that is one longer;
    asymmetric ones span from their smallest to their largest weight, zero included.

    Args:
        matrix: The weight.
        bits: 4 or 8.
        block_size: Weights that share a scale.
        symmetric: Whether zero is always the middle of the range.
        scale_dtype: numpy name of the scales' type.
    """
    if bits not in (4, 8):
        raise ValueError(f"blocks of {bits} bits: there are 4 and 8")
    rows, width = matrix.shape
    count = -(-width // block_size)
    values = np.empty((rows, count, block_size * bits // 8), np.uint8)
    scales = np.empty((rows, count), scale_dtype)
    zeros = None if symmetric else np.empty((rows, -(-count * bits // 8)), np.uint8)
    step = max(1, _CHUNK // (count * block_size))
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        blocks = np.zeros((part.stop - start, count * block_size), np.float32)
        blocks[:, :width] = matrix[part]
        blocks = blocks.reshape(-1, count, block_size)
        scale, zero = (_symmetric if symmetric else _asymmetric)(blocks, bits, scale_dtype)
        whole = _round(blocks, scale, zero, bits)
        values[part], scales[part] = pack_values(whole, bits), scale
        if zeros is not None:
            zeros[part] = pack_values(zero.astype(np.uint8), bits)
    return Blocks(values, scales, zeros, bits, block_size, width)


def dequantise_blocks(blocks: Blocks) -> Matrix:
    """The weight [out, in] that MatMulNBits computes with."""
    rows, count = blocks.scales.shape
    values = unpack_values(blocks.values, blocks.bits).astype(np.float32)
    if blocks.zero_points is None:
        values -= 1 << (blocks.bits - 1)
    else:
        values -= unpack_values(blocks.zero_points, blocks.bits)[:, :count, None]
    values *= blocks.scales.astype(np.float32)[:, :, None]
    return values.reshape(rows, -1)[:, : blocks.width]


def _symmetric(blocks: Matrix, bits: int, dtype: str) -> tuple[Matrix, Matrix]:
    """Scale and middle of each block, [out, blocks]; the scale's sign puts the largest magnitude on -2^(bits - 1)."""
    half = 1 << (bits - 1)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1, keepdims=True), -1)[..., 0]
    return _storable(largest / -half, dtype), np.full(largest.shape, half, np.float32)


def _asymmetric(blocks: Matrix, bits: int, dtype: str) -> tuple[Matrix, Matrix]:
    """Scale and zero point of each block, [out, blocks]."""
    top = (1 << bits) - 1
    low: Matrix = np.minimum(blocks.min(-1), 0)
    high: Matrix = np.maximum(blocks.max(-1), 0)
    scale = _storable((high - low) / np.float32(top), dtype)
    zero = np.divide(-low, scale, out=np.zeros_like(low), where=scale != 0)
    return scale, np.clip(np.rint(zero), 0, top)


def _storable(scale: NDArray[np.floating[Any]], dtype: str) -> Matrix:
    """The scale as it will be stored, so that weights are rounded with what they are multiplied with."""
    return scale.astype(dtype).astype(np.float32)


def _round(blocks: Matrix, scale: Matrix, zero: Matrix, bits: int) -> NDArray[np.uint8]:
    wide = scale[..., None]
    units = np.divide(blocks, wide, out=np.zeros_like(blocks), where=wide != 0)
    return np.clip(np.rint(units) + zero[..., None], 0, (1 << bits) - 1).astype(np.uint8)


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
