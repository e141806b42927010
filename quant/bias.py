"""Bias correction: rounding must not shift the mean of an output.

    b <- b + (W - What) E[x]

(Banner and others, arXiv 1810.05723; Nagel and others, arXiv 1906.04721.) With it the mean of
y - yhat over the rows that were calibrated on is zero, and its mean square falls by exactly the
square of the mean it had.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["corrected_bias"]

Matrix = NDArray[np.float32]


def corrected_bias(bias: Matrix | None, missed: Matrix, mean: Matrix) -> Matrix:
    """The bias [out] that makes the mean output what it was.

    Args:
        bias: The bias so far, [out].
        missed: W - What, [out, in], a low-rank correction taken off.
        mean: E[x], [in].
    """
    shift: Matrix = (missed.astype(np.float64) @ mean.astype(np.float64)).astype(np.float32)
    return shift if bias is None else bias + shift
