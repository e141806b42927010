"""Scales that balance activations for int8: each input is as large as what its weights can bear.

A row rounded in steps of its own peak errs by about (max_j |x_j| / s_j)^2 / (12 * 127^2) at every
input, which counts |W_:j|^2 s_j^2 in the output. With a p-norm for the maximum, the s that minimises

    E[ (sum_j |x_j / s_j|^p)^(2/p) ] * sum_j s_j^2 |W_:j|^2

has, for every input, the share f_j of the peaks that it causes equal to its share e_j of the error,

    f_j = E[P^2 |x_j / s_j|^p / sum_k |x_k / s_k|^p],  P the row's norm,   e_j = s_j^2 |W_:j|^2,

both made to sum to one (set the derivative by log s_j to zero), and s_j <- s_j (f_j / e_j)^(1/8)
leads there. p = 2 gives SmoothQuant's square root (arXiv 2211.10438) with the roots of mean squares
for its maxima; a larger p knows that inputs which are large in the same rows share a peak, and
needs more rows to know it from. With a step that all rows share, the peak is that of all of them:
E[.] is within the power then, and P^2 in f_j becomes P^p.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specedge.quant.moments import Moments

__all__ = ["balanced_scale"]

Matrix = NDArray[np.float32]

_STEPS = 40
_RATE = 0.125
_LEAST = 1e-3  # of an even share: what was never seen is not scaled away


def balanced_scale(moments: Moments, sizes: Matrix, power: int, *, shared: bool) -> Matrix:
    """s, [in], with geometric mean 1.

    Args:
        moments: Of the rows x.
        sizes: |W_:j|^2, the weight of each input in the output, [in].
        power: p, a power of two.
        shared: All rows share a step.
    """
    rows = np.abs(moments.rows)
    counts = moments.stands_for.astype(np.float64)
    logs = np.zeros(rows.shape[1])
    for _ in range(_STEPS):
        powers = rows * np.exp(-logs).astype(np.float32)
        powers /= np.maximum(powers.max(), np.finfo(np.float32).tiny)
        for _ in range(power.bit_length() - 1):  # squared: `**` takes ten times as long
            np.square(powers, out=powers)
        sums = np.maximum(powers.sum(1), np.finfo(np.float32).tiny).astype(np.float64)
        peaks = counts if shared else counts * sums ** (2 / power - 1)
        causes = _shares(peaks @ powers)
        bears = _shares(np.exp(2 * logs) * sizes)
        logs += _RATE * np.log(causes / bears)
        logs -= logs.mean()
    scale: Matrix = np.exp(logs).astype(np.float32)
    return scale


def _shares(values: NDArray[np.floating]) -> NDArray[np.float64]:
    """The share of each input."""
    return values.astype(np.float64) / max(float(values.sum()), 1e-300) + _LEAST / len(values)
