"""Notices when a drafter that was right stops being right, and says what it is likely due to."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specedge.runtime.contracts import Round

__all__ = ["Watch", "likely_cause"]

_LONG, _SHORT = 0.02, 0.12
_FEWEST = 60
_SIGMAS = 4.0
_WARM = 0.9
_WINDOW, _GRAM, _REPEATED = 96, 4, 0.5


class Watch:
    """Compares a drafter's acceptance of late with its acceptance of long.

    Two moving averages over tested nodes; the short one is low by chance less often than once in some
    ten thousand nodes where it lies four standard errors of its own below the long one.
    """

    def __init__(self) -> None:
        self._long = self._short = 0.0
        self._nodes = 0

    def record(self, outcome: Round) -> tuple[float, float] | None:
        """Learns from a round of this drafter.

        Returns:
            Acceptance before and after a sudden fall, once for each fall; None where there is none.
        """
        for stood in [1.0] * outcome.accepted + [0.0] * (outcome.evaluated > outcome.accepted):
            self._nodes += 1
            # Plain means at first, so that no first value weighs too much.
            self._long += max(_LONG, 1 / self._nodes) * (stood - self._long)
            self._short += max(_SHORT, 1 / self._nodes) * (stood - self._short)
        if self._nodes < _FEWEST:
            return None
        error = math.sqrt(max(self._long * (1 - self._long), 0.01) * _SHORT / (2 - _SHORT))
        if self._short >= self._long - _SIGMAS * error:
            return None
        fall = (self._long, self._short)
        self._long = self._short = 0.0
        self._nodes = 0  # what comes now is another text
        return fall


def likely_cause(tokens: Sequence[int], temperature: float) -> str:
    """Why acceptance may have fallen.

    Args:
        tokens: What is committed.
        temperature: At which it was drawn.
    """
    late = list(tokens[-_WINDOW:])
    grams = [tuple(late[start : start + _GRAM]) for start in range(len(late) - _GRAM + 1)]
    if grams and 1 - len(set(grams)) / len(grams) > _REPEATED:
        return "the reply repeats itself"
    if temperature >= _WARM:
        return f"draws at temperature {temperature:g} are hard to foresee"
    return "the text has changed to a kind that the drafter knows less (distribution shift)"
