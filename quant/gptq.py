"""Rounding that makes up for itself: each weight's error is passed on to those rounded after it.

GPTQ (Frantar and others, arXiv 2210.17323) minimises tr(E H E^T), with E = W - What and H the mean
of x x^T: the mean square error of the layer's output. Weights of an output are rounded in order of
the inputs, and after weight i those that follow move to where the error is smallest again,

    w_k <- w_k - (w_i - What_i) / U_ii * U_ik   for k > i,   H^-1 = U^T U, U upper triangular.

H = R R^T with R = U^-1, also upper triangular, gives the same without H's inverse: the error is
the sum of the squares of E R, and what errors before a block G ask of its weights is

    W_G <- W_G + E_before R_before,G R_GG^-1,

so that the groups are passed through once, with one product each for all errors before it (the
paper's lazy updates), and only the blocks R_GG on the diagonal are inverted, for the updates
within. The scale of a group is fitted to its weights when its turn comes. H is damped by a share of
its mean diagonal; an input that was never seen moves no other weight and is rounded to nearest.

Invariants: no output's error, tr(e H e^T), is above that of nearest rounding, because each output
is rounded in both ways and keeps the better; outputs do not depend on each other; W and c W with c a
power of two get the same codes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specedge.quant.descent import descend, keep_better
from specedge.quant.grid import Grid, Group, Rounded, join, round_nearest
from specedge.quant.ranges import fit_range

__all__ = ["DAMPING", "ROUNDS", "round_second_order"]

Matrix = NDArray[np.float32]

DAMPING = 0.01
"""Share of H's mean diagonal that is added to it (the paper's)."""

ROUNDS = 2
"""Rounds of descent that follow (quant/descent.py)."""

_ROWS = 4096  # outputs rounded at a time, which bounds the temporary arrays
_BLOCK = 32  # inputs passed through together where all of them share a scale


def round_second_order(
    matrix: Matrix,
    grid: Grid,
    second: Matrix,
    *,
    search_range: bool = False,
    damping: float = DAMPING,
    rounds: int = ROUNDS,
) -> Rounded:
    """Rounds a weight [out, in] to a grid so that the error of the layer's output is small.

    Args:
        matrix: The weight.
        grid: The grid.
        second: H, [in, in], the mean of x x^T.
        search_range: Whether the range of each group is searched (quant/ranges.py) rather than spanned.
        damping: Share of H's mean diagonal that is added to it.
        rounds: Of descent that follow.

    Raises:
        ValueError: H has another size than `in`, or is no second moment.
    """
    width = matrix.shape[1]
    if second.shape != (width, width):
        raise ValueError(f"second moments of {second.shape[0]} inputs for a weight of {width}")
    root = _root(second, damping)
    parts = []
    for start in range(0, len(matrix), _ROWS):
        part = matrix[start : start + _ROWS]
        rounded = round_nearest(part, grid)
        if root is not None:
            rounded = keep_better(part, second, rounded, _pass_on(part, grid, root, search_range))
        parts.append(descend(part, rounded, second, rounds))
    return Rounded(grid, np.concatenate([part.codes for part in parts]), join([part.group for part in parts]), width)


def _root(second: Matrix, damping: float) -> Matrix | None:
    """R, upper triangular, with R R^T = H + damping * mean diagonal; None if nothing was ever seen."""
    damped = second.astype(np.float64)
    mean = float(np.diagonal(damped).mean())
    if not np.isfinite(damped).all() or mean < 0:
        raise ValueError("second moments that are not finite")
    if mean == 0:
        return None
    for _ in range(3):
        damped[np.diag_indices_from(damped)] += damping * mean
        try:
            # Cholesky's factor is lower triangular; of the matrix turned around, it is upper once turned back.
            return np.ascontiguousarray(np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1].astype(np.float32))
        except np.linalg.LinAlgError:  # float32 sums are positive definite only about
            damping = max(10 * damping, 1e-4)
    raise ValueError("second moments that are not positive")


def _pass_on(matrix: Matrix, grid: Grid, root: Matrix, search_range: bool) -> Rounded:
    """One way through the inputs. Arrays are [in, out] here: what is done at once lies side by side."""
    weights = np.ascontiguousarray(matrix.T)
    width, outputs = weights.shape
    size = grid.group or width
    variance = np.square(np.diagonal(root))  # what an input keeps, given those after it: its weight in the error

    def fit(block: Matrix, start: int) -> Group:
        across = np.ascontiguousarray(block.T)[:, None]
        return fit_range(across, grid, variance[start : start + len(block)]) if search_range else grid.fit(across)

    whole = None if grid.group else fit(weights, 0)
    missed, codes, groups = np.zeros_like(weights), [], []
    step = grid.group or _BLOCK
    for start in range(0, width, step):
        stop = min(start + step, width)
        inverse = np.linalg.inv(root[start:stop, start:stop].astype(np.float64)).astype(np.float32)
        current = weights[start:stop] + inverse.T @ (root[:start, start:stop].T @ missed[:start])
        group = whole or fit(current, start)
        for place in range(stop - start):
            code = grid.codes(current[place][:, None, None], group)
            value = grid.values(code, group)[:, 0, 0]
            share = inverse[place, place + 1 :] / inverse[place, place]
            current[place + 1 :] -= share[:, None] * (current[place] - value)
            missed[start + place] = weights[start + place] - value
            codes.append(code[:, 0, 0])
        groups.append(group)
    padding = -len(codes) % size
    if padding:
        codes += [grid.codes(np.zeros((outputs, 1, 1), np.float32), groups[-1])[:, 0, 0]] * padding
    return Rounded(grid, np.stack(codes, 1), whole or join(groups, 1), width)
