"""A calibration of heads as it might have been measured; needs the runtime alone."""

from __future__ import annotations

from specedge.runtime.calibration import HeadCalibration

__all__ = ["calibration"]


def calibration(heads: int, guesses: int) -> HeadCalibration:
    """One that might have been measured: the first guesses are the best."""
    top = tuple(tuple((rank + 1) / (guesses + 1 + head) for rank in range(guesses)) for head in range(heads))
    paths = [(0,), (1,), *([(0, 0), (0, 1), (1, 0)] if heads > 1 else []), *([(0, 0, 0)] if heads > 2 else [])]
    return HeadCalibration("a test", 100, top, tuple(paths), tuple(0.5 / (place + 1) for place in range(len(paths))))
