"""Descent on a rounded weight: scales are fitted to the codes, then codes to the scales, each with all of H.

GPTQ visits a weight once, before it knows what those after it will lose. Going round again, weight i
of an output moves to the grid's value nearest to where its error is smallest with all others held,

    What_i <- nearest(What_i + (e H)_i / H_ii),   e = w - what,

the coordinate descent of QuantEase (Behdin and others, arXiv 2309.01885) and CDQuant (Nair and
Suggala, arXiv 2406.17542). Between the rounds, the scales s_g of an output's groups are the solution of

    sum_h (c_g H_gh c_h^T) s_h = (c_g H_g,: (w - shift)^T),   c = code - zero,

the least squares fit of c_g s_g to the weight under H (the groups of an output correlate, too).

Invariants: no output's error e H e^T rises, because a step that raises it (a scale that is rounded to
be stored can) is not taken; outputs do not depend on each other; an input never seen stays as it is.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specedge.quant.grid import Group, Rounded, choose, dequantise

__all__ = ["descend", "keep_better", "output_error"]

Matrix = NDArray[np.float32]

_BLOCK = 32  # inputs visited together where all of them share a scale
_SEEN = 1e-9  # share of the mean diagonal below which an input was never seen
_RIDGE = 1e-6  # pulls scales of groups that were never seen to where they are


def descend(matrix: Matrix, rounded: Rounded, second: Matrix, rounds: int) -> Rounded:
    """Lowers the error of the layer's output.

    Args:
        matrix: The weight, [out, in].
        rounded: What it was rounded to.
        second: H, [in, in], the mean of x x^T.
        rounds: Times that the scales and then all codes are visited.
    """
    if not np.diagonal(second).any():
        return rounded
    for _ in range(rounds):
        rounded = keep_better(matrix, second, rounded, _fit_scales(matrix, rounded, second))
        rounded = keep_better(matrix, second, rounded, _visit(matrix, rounded, second))
    return rounded


def output_error(missed: Matrix, second: Matrix) -> Matrix:
    """e H e^T of each row e of E = W - What, [out]: the mean square error of each output."""
    error: Matrix = np.einsum("oi,oi->o", missed @ second, missed)
    return error


def keep_better(matrix: Matrix, second: Matrix, one: Rounded, other: Rounded) -> Rounded:
    """Of two ways to round, the one with less error for each output."""
    errors = [output_error(matrix - dequantise(way), second) for way in (one, other)]
    first = (errors[0] <= errors[1])[:, None]
    return Rounded(one.grid, np.where(first, one.codes, other.codes), choose(first, one.group, other.group), one.width)


def _fit_scales(matrix: Matrix, rounded: Rounded, second: Matrix) -> Rounded:
    group, grid, width = rounded.group, rounded.grid, rounded.width
    outputs, count = group.scale.shape
    size = grid.group or width

    def grouped(rows: Matrix) -> Matrix:
        """[out, in] -> [out, groups, size]; padding is zero."""
        padded = np.zeros((outputs, count * size), np.float32)
        padded[:, :width] = rows
        return padded.reshape(outputs, count, size)

    units = grid.values(rounded.codes.reshape(outputs, count, size), Group(np.ones_like(group.scale), group.zero, None))
    units = grouped(units.reshape(outputs, -1)[:, :width])
    wanted: Matrix = matrix if group.shift is None else matrix - np.repeat(group.shift, size, axis=1)[:, :width]
    right = (units * grouped(wanted @ second)).sum(-1).astype(np.float64)
    left = np.empty((outputs, count, count), np.float64)
    for place in range(count):
        part = slice(place * size, min((place + 1) * size, width))
        reached: Matrix = units[:, place, : part.stop - part.start] @ second[part]
        left[:, :, place] = (units * grouped(reached)).sum(-1)
    ridge = _RIDGE * np.einsum("ogg->o", left)[:, None] / count + np.finfo(np.float32).tiny
    left[:, range(count), range(count)] += ridge
    scale = np.linalg.solve(left, (right + ridge * group.scale)[..., None])[..., 0]
    stored = scale.astype(grid.scale_dtype).astype(np.float32)
    return Rounded(grid, rounded.codes, Group(stored, group.zero, group.shift), width)


def _visit(matrix: Matrix, rounded: Rounded, second: Matrix) -> Rounded:
    """All codes once. Arrays are [in, out] here: what is done at once lies side by side."""
    grid, width, codes = rounded.grid, rounded.width, rounded.codes.T.copy()
    values = np.ascontiguousarray(dequantise(rounded).T)
    missed = np.ascontiguousarray(matrix.T) - values
    seen = np.diagonal(second) > _SEEN * np.diagonal(second).mean()
    step = grid.group or _BLOCK
    for start in range(0, width, step):
        stop = min(start + step, width)
        group = _group(rounded.group, start // step if grid.group else 0)
        pulls = second[start:stop] @ missed
        for place in range(stop - start):
            column = start + place
            if not seen[column]:
                continue
            wanted = values[column] + pulls[place] / second[column, column]
            code = grid.codes(wanted[:, None, None], group)
            moved = grid.values(code, group)[:, 0, 0] - values[column]
            codes[column] = code[:, 0, 0]
            missed[column] -= moved
            pulls[place + 1 :] -= second[column + 1 : stop, column, None] * moved
    return Rounded(grid, np.ascontiguousarray(codes.T), rounded.group, width)


def _group(group: Group, place: int) -> Group:
    """What one group of each output has, [out, 1]."""
    part = slice(place, place + 1)
    zero, shift = (array if array is None else array[:, part] for array in (group.zero, group.shift))
    return Group(group.scale[:, part], zero, shift)
