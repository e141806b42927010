"""int8 activations: what rounding costs, and the step that costs least where all rows share one.

A row x is rounded to multiples of its own step, max |x| / 127, or of a step that is the same for
all rows (and clipped to 127 of them). The output's error is about

    sum_j E[(x_j - xhat_j)^2] |W_:j|^2,

because the errors of different inputs hardly correlate. It is taken on the rows that calibration
kept: all those with high peaks, which a static step clips, and some that stand for the rest.
A large step rounds coarsely and a small one clips: the best lies between (SmoothQuant's static
form, arXiv 2211.10438, takes the largest |x|, which no step of the search exceeds).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specedge.quant.moments import Moments

__all__ = ["TOP", "rounding_error", "search_step"]

Matrix = NDArray[np.float32]

TOP = 127
_TINIEST = 1e-10  # a row of zeros is not divided by zero
_SHARES = 2.0 ** -np.arange(0, 10, 0.25)  # of the step that clips nothing


def rounding_error(moments: Moments, scale: Matrix, step: float | None = None) -> Matrix:
    """E[(x_j - xhat_j)^2] of each input, [in], where x / scale is rounded rather than x.

    Args:
        moments: Of the rows x.
        scale: What each input is divided by, [in].
        step: The step all rows share, of x / scale; None: each row has its own.
    """
    rows = moments.rows / scale
    steps: Matrix | np.float32 = np.float32(step or 0)
    if step is None:
        steps = np.maximum(np.abs(rows).max(1, keepdims=True), _TINIEST) / np.float32(TOP)
    missed = (np.clip(np.rint(rows / steps), -TOP, TOP) * steps - rows) * scale
    error: Matrix = moments.stands_for @ np.square(missed) / moments.stands_for.sum()
    return error


def search_step(moments: Moments, scale: Matrix, sizes: Matrix) -> float:
    """The shared step of x / scale with the least error.

    Args:
        moments: Of the rows x.
        scale: What each input is divided by, [in].
        sizes: |W_:j|^2, the weight of each input in the output, [in].
    """
    largest = max(float((moments.largest / scale).max()), _TINIEST)
    steps = [largest / TOP * float(share) for share in _SHARES]
    errors = [float(rounding_error(moments, scale, step) @ sizes) for step in steps]
    return steps[int(np.argmin(errors))]
