"""Grids over whole rows of a weight: 8-bit integers or floats with one scale for each output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specedge.quant.grid import Rounded

__all__ = ["Columns", "pack_columns"]


@dataclass(frozen=True)
class Columns:
    """A weight [out, in]; w = value * scale of its output.

    Attributes:
        values: int8, from -127 to 127, or float8; [in, out], as a product takes it.
        scales: float32 [out].
    """

    values: NDArray[Any]
    scales: NDArray[np.float32]


def pack_columns(rounded: Rounded) -> Columns:
    """Packs a weight on a symmetric grid over whole rows."""
    return Columns(rounded.codes.T, rounded.group.scale[:, 0])
