"""What calibration keeps of a linear layer's input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["KEPT_ROWS", "Calibration", "Moments", "MomentsSum", "damped_second", "divided"]

Matrix = NDArray[np.float32]

_PEAKS, _DRAWN = 32, 480  # rows kept for their peak, and drawn from all
KEPT_ROWS = _PEAKS + _DRAWN
"""Most rows that moments keep."""

_QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)


@dataclass(frozen=True)
class Moments:
    """Statistics of the rows x, [in], that a linear layer was given.

    Attributes:
        count: Rows.
        largest: [in], the largest |x| of each channel.
        mean: [in].
        magnitude: [in], the mean of |x|.
        second: [in, in], the mean of x x^T.
        row_peak: The largest |x| of a row: its quantiles .5, .9, .99, .999 and 1, [5].
        rows: [n, in], some of the rows: those with the highest peaks, and others drawn from the rest.
            What rounding does to activations is measured on them.
        stands_for: [n], how many of all rows each of them stands for.
    """

    count: int
    largest: Matrix
    mean: Matrix
    magnitude: Matrix
    second: Matrix
    row_peak: Matrix
    rows: Matrix
    stands_for: Matrix


class Calibration(Protocol):
    """Moments by the name of the linear layer ("model.layers.0.mlp.down_proj", "lm_head"), read when asked for."""

    def __getitem__(self, name: str) -> Moments: ...

    def __contains__(self, name: object) -> bool: ...


def damped_second(moments: Moments) -> Matrix:
    """The mean of x x^T as far as rows that were not seen can be expected to share it, [in, in].

    Few rows correlate by chance, and what is fitted to that does harm on others: on SmolLM2-135M, GPTQ
    left 1.16 times the error of nearest rounding where 1536 inputs were seen in 1000 rows, and .53
    times with the diagonal doubled; .75 and .49 with 3000 rows. The diagonal grows by 3 in / rows,
    within .1 and 1. Unlike a share of its mean (the GPTQ paper's damping), this
    does not depend on how inputs are scaled.
    """
    share = float(np.clip(3 * len(moments.mean) / moments.count, 0.1, 1))
    second = moments.second.copy()
    second[np.diag_indices_from(second)] *= np.float32(1 + share)
    return second


def divided(moments: Moments, scale: Matrix) -> Moments:
    """The moments of x / scale, for a layer whose weight is multiplied by `scale`, [in].

    The quantiles of the peaks are those of the rows that were kept.
    """
    if (scale <= 0).any():
        raise ValueError("activations are divided by a scale that is not positive")
    rows = moments.rows / scale
    return Moments(
        moments.count,
        moments.largest / scale,
        moments.mean / scale,
        moments.magnitude / scale,
        moments.second / np.outer(scale, scale),
        _weighted_quantiles(np.abs(rows).max(1), moments.stands_for),
        rows,
        moments.stands_for,
    )


class MomentsSum:
    """Adds up rows, a batch at a time, in memory that does not grow with them (but for a peak a row)."""

    def __init__(self, width: int) -> None:
        self._count = 0
        self._largest = np.zeros(width, np.float32)
        self._sum = np.zeros(width, np.float64)
        self._magnitude = np.zeros(width, np.float64)
        self._second = np.zeros((width, width), np.float32)
        self._peaks: list[Matrix] = []
        self._highest, self._drawn = _Kept(_PEAKS, width), _Kept(_DRAWN, width)
        self._rng = np.random.default_rng(0)  # the same rows, however they are cut into batches

    def add(self, rows: Matrix) -> None:
        """Adds rows, [n, in].

        Raises:
            ValueError: There is a NaN or an infinity among them.
        """
        if not np.isfinite(rows).all():
            raise ValueError("activations that are not finite")
        if not len(rows):
            return
        magnitudes = np.abs(rows)
        peaks = magnitudes.max(1)
        self._highest.add(rows, peaks, self._count)
        self._drawn.add(rows, self._rng.random(len(rows)), self._count)
        self._count += len(rows)
        np.maximum(self._largest, magnitudes.max(0), out=self._largest)
        self._sum += rows.sum(0, dtype=np.float64)
        self._magnitude += magnitudes.sum(0, dtype=np.float64)
        self._second += rows.T @ rows
        self._peaks.append(peaks)

    def result(self) -> Moments:
        """The moments of all rows so far.

        Raises:
            ValueError: There were none.
        """
        if not self._count:
            raise ValueError("no rows to take moments of")
        rest = ~np.isin(self._drawn.numbers, self._highest.numbers)
        rows = np.concatenate([self._highest.rows, self._drawn.rows[rest]])
        stands_for = np.ones(len(rows), np.float32)
        stands_for[len(self._highest.rows) :] = (self._count - len(self._highest.rows)) / max(1, rest.sum())
        return Moments(
            self._count,
            self._largest,
            (self._sum / self._count).astype(np.float32),
            (self._magnitude / self._count).astype(np.float32),
            self._second / np.float32(self._count),
            np.quantile(np.concatenate(self._peaks), _QUANTILES).astype(np.float32),
            rows,
            stands_for,
        )


class _Kept:
    """The rows with the highest keys, of those seen."""

    def __init__(self, size: int, width: int) -> None:
        self._size = size
        self._keys = np.empty(0)
        self.numbers = np.empty(0, np.int64)
        self.rows = np.empty((0, width), np.float32)

    def add(self, rows: Matrix, keys: NDArray[np.floating], first: int) -> None:
        """Considers rows; `first` is the number of the first of them."""
        all_keys = np.concatenate([self._keys, keys])
        best = np.sort(np.argsort(-all_keys, kind="stable")[: self._size])
        old, new = best[best < len(self._keys)], best[best >= len(self._keys)] - len(self._keys)
        self.rows = np.concatenate([self.rows[old], rows[new]]).astype(np.float32, copy=False)
        self.numbers = np.concatenate([self.numbers[old], first + new])
        self._keys = all_keys[best]


def _weighted_quantiles(values: Matrix, weights: Matrix) -> Matrix:
    order = np.argsort(values)
    shares = np.cumsum(weights[order])
    shares = (shares - weights[order] / 2) / shares[-1]
    quantiles: Matrix = np.interp(_QUANTILES, shares, values[order]).astype(np.float32)
    return quantiles
