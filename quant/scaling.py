"""Scaling: inputs that matter get more of the grid, at no cost when the model runs.

    W x = (W diag(s)) (x / s),

and 1 / s is folded into what makes x: a norm's gain, the rows of another weight. Families of s are
searched, and the best one kept:

    s = size(x)^a                              AWQ (Lin and others, arXiv 2306.00978)
    s = size(x)^a / max|W_:j|^b, b = 1 - a     SmoothQuant (Xiao and others, arXiv 2211.10438)

with size(x) the mean |x_j|, and where activations are rounded also the largest |x_j|, and the
balance of quant/balance.py. The measure is the error of the output: tr(E H E^T) of the rounded
W diag(s), H the mean of x x^T, and where activations are rounded to int8 what that costs
(quant/activations.py). It is taken on outputs at even distances, which suffices to choose among some
dozens of s. The balance is fitted to half of the rows that were kept, and all s are compared on the
other half. GPTQ (quant/gptq.py) does by itself what scaling does for weights: measured on
SmolLM2-135M, scaling for 4-bit blocks before it made its error 7 to 10 % larger. So where it
follows, s = 1 unless activations are rounded, and the weight's error counts for what it leaves of it.

Invariants: s > 0 with geometric mean 1; s = 1 where nothing lowers the measured error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from specedge.quant.activations import rounding_error, search_step
from specedge.quant.balance import balanced_scale
from specedge.quant.descent import output_error
from specedge.quant.grid import Grid, dequantise, round_nearest
from specedge.quant.moments import Moments

__all__ = ["search_scale"]

Matrix = NDArray[np.float32]

_EXPONENTS = np.arange(0.1, 1.01, 0.1)
_OUTPUTS = 128  # of all weights together, that the error is measured on
_WIDEST = 32.0  # s lies between its inverse and it
_POWERS = (2, 4)  # of the balance's norm
_LEFT = 0.3  # of a weight's error, by GPTQ
_GAIN = 0.995  # s = 1 unless the error falls below this share


def search_scale(
    weights: Sequence[Matrix],
    grid: Grid,
    moments: Moments,
    *,
    rounds_rows: bool,
    static: bool = False,
    second_order: bool = False,
) -> Matrix:
    """What to multiply the inputs of weights with, and divide their activations by; [in].

    Args:
        weights: Weights with the same input, each [out, in].
        grid: Their grid.
        moments: Of their input.
        rounds_rows: Activations are rounded to int8.
        static: All rows share a step.
        second_order: GPTQ follows.
    """
    if second_order and not rounds_rows:
        return np.ones_like(moments.largest)
    sizes = sum((np.square(weight).sum(0) for weight in weights), np.zeros_like(moments.largest))
    fitted, held = (replace(moments, rows=moments.rows[i::2], stands_for=moments.stands_for[i::2]) for i in (0, 1))
    some = _some([np.asarray(weight) for weight in weights])
    # What was measured on some outputs is scaled to all of them, as the activations' error is.
    share = sum(len(weight) for weight in weights) / sum(len(weight) for weight in some)
    share *= _LEFT if second_order else 1

    def cost(scale: Matrix) -> float:
        error = 0.0
        for weight in some:
            scaled = weight * scale
            missed = (scaled - dequantise(round_nearest(scaled, grid))) / scale
            error += share * float(output_error(missed, moments.second).sum())
        if rounds_rows:
            step = search_step(held, scale, sizes * scale * scale) if static else None
            error += float(rounding_error(held, scale, step) @ sizes)
        return error

    best = np.ones_like(moments.largest)
    least = cost(best) * _GAIN
    largest = np.max([np.abs(weight).max(0) for weight in weights], 0)
    candidates = list(_candidates(moments, largest, rounds_rows))
    if rounds_rows:
        candidates += [balanced_scale(fitted, sizes, power, shared=static) for power in _POWERS]
    for scale in candidates:
        found = cost(scale)
        if found < least:
            best, least = scale, found
    return best


def _candidates(moments: Moments, largest: Matrix, rounds_rows: bool) -> Iterator[Matrix]:
    weight = _positive(largest)
    for size in (moments.magnitude, moments.largest) if rounds_rows else (moments.magnitude,):
        seen = _positive(size)
        for exponent in _EXPONENTS[rounds_rows :: 1 + rounds_rows]:
            for other in (0.0, 1.0 - exponent):
                scale = exponent * np.log(seen) - other * np.log(weight)
                scale -= scale.mean()
                widest = np.log(_WIDEST)
                scale = np.clip(scale, -widest, widest)
                yield np.exp(scale - scale.mean()).astype(np.float32)


def _positive(values: Matrix) -> NDArray[np.float64]:
    """What was never seen, or weighs nothing, is not scaled away."""
    least = 1e-5 * float(values.max()) + 1e-30
    return np.maximum(values.astype(np.float64), least)


def _some(weights: list[Matrix]) -> list[Matrix]:
    """Outputs of each weight at even distances, `_OUTPUTS` of them together."""
    every = max(1, sum(len(weight) for weight in weights) // _OUTPUTS)
    return [weight[::every] for weight in weights]
