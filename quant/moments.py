"""What calibration keeps of a linear layer's input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Calibration", "Moments", "MomentsSum"]

Matrix = NDArray[np.float32]


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
    """

    count: int
    largest: Matrix
    mean: Matrix
    magnitude: Matrix
    second: Matrix
    row_peak: Matrix


class Calibration(Protocol):
    """Moments by the name of the linear layer ("model.layers.0.mlp.down_proj", "lm_head"), read when asked for."""

    def __getitem__(self, name: str) -> Moments: ...

    def __contains__(self, name: object) -> bool: ...


class MomentsSum:
    """Adds up rows, a batch at a time, in memory that does not grow with them (but for a peak a row)."""

    def __init__(self, width: int) -> None:
        self._count = 0
        self._largest = np.zeros(width, np.float32)
        self._sum = np.zeros(width, np.float64)
        self._magnitude = np.zeros(width, np.float64)
        self._second = np.zeros((width, width), np.float32)
        self._peaks: list[Matrix] = []

    def add(self, rows: Matrix) -> None:
        """Adds rows, [n, in].

        Raises:
            ValueError: There is a NaN or an infinity among them.
        """
        if not np.isfinite(rows).all():
            raise ValueError("activations that are not finite")
        magnitudes = np.abs(rows)
        self._count += len(rows)
        np.maximum(self._largest, magnitudes.max(0), out=self._largest)
        self._sum += rows.sum(0, dtype=np.float64)
        self._magnitude += magnitudes.sum(0, dtype=np.float64)
        self._second += rows.T @ rows
        self._peaks.append(magnitudes.max(1))

    def result(self) -> Moments:
        """The moments of all rows so far.

        Raises:
            ValueError: There were none.
        """
        if not self._count:
            raise ValueError("no rows to take moments of")
        peaks = np.quantile(np.concatenate(self._peaks), [0.5, 0.9, 0.99, 0.999, 1.0])
        return Moments(
            self._count,
            self._largest,
            (self._sum / self._count).astype(np.float32),
            (self._magnitude / self._count).astype(np.float32),
            self._second / np.float32(self._count),
            peaks.astype(np.float32),
        )
