"""Grids: the values a weight may take. A weight on a grid is codes, and a scale for each group of them.

    w = scale * (code - zero) + shift

with `zero` (an integer) and `shift` (a real) only where the grid has them. A group is a run of
`group` weights of one output, or all of them. How the codes are packed for an operator is for
the files beside this one to say; compensation only moves weights between the grid's values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from specedge.runtime.errors import NumericError

__all__ = ["Grid", "Group", "Rounded", "choose", "dequantise", "join", "round_nearest"]

Matrix = NDArray[np.float32]
Kind = Literal["integer", "affine", "float8"]

_CHUNK = 1 << 20  # weights rounded at a time, which bounds the temporary arrays
_LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


@dataclass(frozen=True)
class Grid:
    """The values that the weights of a group may take.

    Attributes:
        kind: "integer": steps around zero, or around an integer zero point; "affine": steps from a
            real minimum; "float8": an 8-bit float times the scale.
        bits: 3, 4 or 8.
        group: Weights of one output that share a scale; 0: all of them.
        symmetric: "integer" grids only: zero is the middle of the range.
        narrow: Symmetric grids only: the range ends at +-(2^(bits - 1) - 1); else the largest
            magnitude lies at the end that is one step longer.
        scale_dtype: numpy name of the type that scales are stored in.
        float_dtype: ml_dtypes name of a "float8" grid's codes.
    """

    kind: Kind
    bits: int
    group: int = 0
    symmetric: bool = True
    narrow: bool = False
    scale_dtype: str = "float32"
    float_dtype: str = ""

    @property
    def rounds_rows(self) -> bool:
        """Whether a weight on this grid is multiplied with activations that are rounded to int8, a whole row alike."""
        return self.kind == "integer" and self.bits == 8 and not self.group

    def fit(self, weights: Matrix) -> Group:
        """The scale (and zero, or shift) that makes the grid span each group.

        Args:
            weights: [..., size], each last axis a group or the part of one that is there.
        """
        if self.kind == "affine":
            low = weights.min(-1)
            scale = self._storable((weights.max(-1) - low) / ((1 << self.bits) - 1))
            return Group(scale, None, low - self.bottom * scale)
        if self.kind == "integer" and not self.symmetric:
            low, high = np.minimum(weights.min(-1), 0), np.maximum(weights.max(-1), 0)
            scale = self._storable((high - low) / self.top)
            zero = np.divide(-low, scale, out=np.zeros_like(low), where=scale != 0)
            return Group(scale, np.clip(np.rint(zero), 0, self.top), None)
        if self.kind == "float8" or self.narrow:
            largest = np.abs(weights).max(-1)
            return Group(self._storable(largest / self.top), None, None)
        # The sign puts the largest magnitude on the longer end.
        largest = np.take_along_axis(weights, np.abs(weights).argmax(-1, keepdims=True), -1)[..., 0]
        return Group(self._storable(largest / self.bottom), None, None)

    def codes(self, weights: Matrix, group: Group) -> NDArray[Any]:
        """Codes of the nearest values; `weights` is [..., size], the group's arrays [...]."""
        scale = group.scale[..., None]
        shifted = weights if group.shift is None else weights - group.shift[..., None]
        units = np.divide(shifted, scale, out=np.zeros_like(shifted), where=scale != 0)
        if self.kind == "float8":
            import ml_dtypes

            return np.clip(units, -self.top, self.top).astype(getattr(ml_dtypes, self.float_dtype))
        zero = 0.0 if group.zero is None else group.zero[..., None]
        low = -self.top if self.symmetric and self.narrow else self.bottom
        return np.clip(np.rint(units) + zero, low, self.top).astype(np.int16 if self.top > 127 else np.int8)

    def values(self, codes: NDArray[Any], group: Group) -> Matrix:
        """The weights that codes stand for."""
        whole = codes.astype(np.float32)
        if group.zero is not None:
            whole -= group.zero[..., None]
        whole *= group.scale[..., None]
        if group.shift is not None:
            whole += group.shift[..., None]
        return whole

    @property
    def top(self) -> float:
        """The largest code: 2^(bits - 1) - 1 around zero, 2^bits - 1 from a zero point, or the float's largest."""
        if self.kind == "float8":
            return _LARGEST[self.float_dtype]
        return (1 << self.bits) - 1 if self.kind == "integer" and not self.symmetric else (1 << (self.bits - 1)) - 1

    @property
    def bottom(self) -> float:
        """The smallest code."""
        if self.kind == "float8":
            return -self.top
        return 0 if self.kind == "integer" and not self.symmetric else -(1 << (self.bits - 1))

    def _storable(self, scale: NDArray[Any]) -> Matrix:
        """The scale as it will be stored, so that weights are rounded with what they are multiplied with."""
        with np.errstate(over="ignore"):
            stored: Matrix = scale.astype(self.scale_dtype).astype(np.float32)
        if not np.isfinite(stored).all():
            raise NumericError("weights so large that their scales do not fit into 16 bits; choose int8 or fp32")
        return stored


@dataclass(frozen=True)
class Group:
    """What a grid's groups have of their own, each [...] over the groups: float32."""

    scale: Matrix
    zero: Matrix | None
    shift: Matrix | None


@dataclass(frozen=True)
class Rounded:
    """A weight [out, in] on a grid.

    Attributes:
        grid: The grid.
        codes: [out, groups * size], int8 (int16 where codes go to 255) or float8; the last group is padded.
        group: Each array [out, groups].
        width: Size of `in`.
    """

    grid: Grid
    codes: NDArray[Any]
    group: Group
    width: int


def round_nearest(matrix: Matrix, grid: Grid, fit: Callable[[Matrix], Group] | None = None) -> Rounded:
    """Rounds a weight [out, in] to the nearest values of a grid fitted to each group.

    Args:
        matrix: The weight.
        grid: The grid.
        fit: Fits the grid to groups, [n, groups, size]; None: `grid.fit`.
    """
    fit = fit or grid.fit
    rows, width = matrix.shape
    size = grid.group or width
    count = -(-width // size)
    step = max(1, _CHUNK // (count * size))
    codes, groups = [], []
    for start in range(0, rows, step):
        part = matrix[start : start + step]
        blocks = np.zeros((len(part), count * size), np.float32)
        blocks[:, :width] = part
        blocks = blocks.reshape(-1, count, size)
        groups.append(fit(blocks))
        codes.append(grid.codes(blocks, groups[-1]).reshape(len(part), -1))
    return Rounded(grid, np.concatenate(codes), join(groups), width)


def choose(first: NDArray[np.bool_], one: Group, other: Group) -> Group:
    """Groups of `one` where `first`, which broadcasts to [...], else of `other`."""

    def pick(a: Matrix | None, b: Matrix | None) -> Matrix | None:
        return None if a is None or b is None else np.where(first, a, b)

    return Group(np.where(first, one.scale, other.scale), pick(one.zero, other.zero), pick(one.shift, other.shift))


def dequantise(rounded: Rounded) -> Matrix:
    """The weight [out, in] that the codes stand for."""
    rows, count = rounded.group.scale.shape
    values = rounded.grid.values(rounded.codes.reshape(rows, count, -1), rounded.group)
    return values.reshape(rows, -1)[:, : rounded.width]


def join(groups: Sequence[Group], axis: int = 0) -> Group:
    """Groups one after another along an axis."""

    def parts(arrays: Sequence[Matrix | None]) -> Matrix | None:
        present = [array for array in arrays if array is not None]
        return np.concatenate(present, axis) if present else None

    return Group(
        np.concatenate([group.scale for group in groups], axis),
        parts([group.zero for group in groups]),
        parts([group.shift for group in groups]),
    )
