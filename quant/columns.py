"""Symmetric int8 with one scale for each output: the weight of the row-wise int8 product."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Columns", "dequantise_columns", "quantise_columns"]

Matrix = NDArray[np.float32]

_TOP = 127
_CHUNK = 1 << 22  # weights rounded at a time, which bounds the temporary arrays


@dataclass(frozen=True)
class Columns:
    """A weight [out, in]; w = value * scale of its output.

    Attributes:
        values: int8 [out, in], from -127 to 127.
        scales: float32 [out].
    """

    values: NDArray[np.int8]
    scales: NDArray[np.float32]


def quantise_columns(matrix: Matrix) -> Columns:
    """Rounds a weight [out, in]; each output's largest magnitude becomes 127."""
    scales = np.maximum(matrix.max(-1), -matrix.min(-1)).astype(np.float32) / np.float32(_TOP)
    scales[scales == 0] = 1.0
    values = np.empty(matrix.shape, np.int8)
    step = max(1, _CHUNK // matrix.shape[1])
    for start in range(0, len(matrix), step):
        part = slice(start, start + step)
        values[part] = np.clip(np.rint(matrix[part] / scales[part, None]), -_TOP, _TOP)
    return Columns(values, scales)


def dequantise_columns(columns: Columns) -> Matrix:
    """The weight [out, in] that the product computes with."""
    return columns.values.astype(np.float32) * columns.scales[:, None]
