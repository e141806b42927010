"""The range that a group's codes span, searched: a little clipping for finer steps.

From the smallest to the largest weight is seldom the best range of few steps. For each group the
factor f by which the range shrinks (or grows) is the one of a list that minimises

    sum_i h_i (w_i - What_i(f))^2,

with h_i the mean square of the input that meets weight i: the error of the layer's output, were the
inputs uncorrelated (AWQ's clipping, arXiv 2306.00978, whose search is by the output's error too;
for 8-bit floats the same search of their scale). Where the grid's scale may be any number, a least-
squares fit of the scale to the chosen codes follows,

    scale = sum_i h_i (w_i - shift) c_i / sum_i h_i c_i^2,   c_i = code_i - zero.

Invariants: f = 1 is among the factors and a fit is kept only where it is better, so the weighted
error is at most that of `Grid.fit`; the result depends on nothing but the group.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specedge.quant.grid import Grid, Group, Rounded, choose, round_nearest

__all__ = ["fit_range", "round_searched"]

Matrix = NDArray[np.float32]

_FINE = (0.95, 0.9, 0.84, 0.78, 0.7)
_COARSE = (1.06, 1.0 / 0.875)  # the largest magnitude need not lie at the end


def fit_range(weights: Matrix, grid: Grid, importance: Matrix) -> Group:
    """The scale (and zero, or shift) of the best range of each group.

    Args:
        weights: [..., size], each last axis a group or the part of one that is there.
        grid: The grid.
        importance: h, broadcastable to `weights`.
    """
    best = grid.fit(weights)
    error = _error(weights, grid, best, importance)
    middle = np.zeros_like(weights[..., :1])
    if grid.kind == "affine":
        middle = (weights.max(-1, keepdims=True) + weights.min(-1, keepdims=True)) / 2
    for factor in (*_FINE, *_COARSE):
        shrunk = grid.fit(middle + (weights - middle) * np.float32(factor))
        best, error = _better(weights, grid, importance, best, error, shrunk)
    for _ in range(2):
        best, error = _better(weights, grid, importance, best, error, _least_squares(weights, grid, importance, best))
    return best


def round_searched(matrix: Matrix, grid: Grid, importance: Matrix) -> Rounded:
    """Rounds a weight [out, in] to the nearest values of a grid whose ranges were searched.

    Args:
        matrix: The weight.
        grid: The grid.
        importance: h, [in].
    """
    width = matrix.shape[1]
    size = grid.group or width
    weighting = np.zeros(-(-width // size) * size, np.float32)  # padding weighs nothing
    weighting[:width] = importance
    weighting = weighting.reshape(-1, size)
    return round_nearest(matrix, grid, lambda blocks: fit_range(blocks, grid, weighting))


def _error(weights: Matrix, grid: Grid, group: Group, importance: Matrix) -> Matrix:
    missed = grid.values(grid.codes(weights, group), group)
    missed -= weights
    error: Matrix = np.einsum("...i,...i,...i->...", missed, missed, np.broadcast_to(importance, missed.shape))
    return error


def _better(
    weights: Matrix, grid: Grid, importance: Matrix, best: Group, error: Matrix, other: Group
) -> tuple[Group, Matrix]:
    """The better of two for each group, and its error."""
    found = _error(weights, grid, other, importance)
    wins = found < error
    return choose(wins, other, best), np.where(wins, found, error)


def _least_squares(weights: Matrix, grid: Grid, importance: Matrix, group: Group) -> Group:
    """The scale that suits the codes best, as it will be stored."""
    codes = grid.values(grid.codes(weights, group), Group(np.ones_like(group.scale), group.zero, None))
    wanted = weights if group.shift is None else weights - group.shift[..., None]
    below = (importance * codes * codes).sum(-1)
    scale = np.divide((importance * codes * wanted).sum(-1), below, out=group.scale.copy(), where=below > 0)
    return Group(scale.astype(grid.scale_dtype).astype(np.float32), group.zero, group.shift)
