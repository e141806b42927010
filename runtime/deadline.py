"""How much time a reply has, and its next round."""

from __future__ import annotations

import math
from time import perf_counter

from specedge.runtime.costs import Costs

__all__ = ["TIMED_PIECE", "Deadline"]

TIMED_PIECE = 32
"""Most tokens of a prompt in one pass of a reply that has a deadline: what it can be late by."""


class Deadline:
    """The end of a reply's time, and of its next step's.

    Args:
        started: When the reply was asked for, in `perf_counter` seconds.
        whole_ms: Most milliseconds of the whole reply; None: no limit.
        step_ms: Most milliseconds between visible tokens; None: no limit.
        costs: What passes take.
    """

    def __init__(self, started: float, whole_ms: float | None, step_ms: float | None, costs: Costs) -> None:
        self._end = math.inf if whole_ms is None else started + whole_ms / 1e3
        self._step_ms = math.inf if step_ms is None else step_ms
        self._costs = costs
        self._asked = 0

    def over(self) -> bool:
        """Whether another pass, however short, would end too late by what passes took so far.

        A reply's first pass is made while any time is left: a wrong idea of what passes take must not
        keep all replies from finding out.
        """
        if self._end == math.inf:
            return False
        self._asked += 1
        left = 1e3 * (self._end - perf_counter())
        if left <= 0 or self._asked == 1 or not self._costs.known:
            return left <= 0
        if self._costs.pass_ms(1) <= left:
            return False
        self._costs.doubt()
        return True

    def affordable(self, method: str, nodes: int) -> int:
        """How many of so many drafted nodes leave the round within both limits, with a margin.

        Where not even a plain round fits, it is 0: a step cannot take less than a pass.
        """
        left = min(1e3 * (self._end - perf_counter()), self._step_ms)
        if left == math.inf:
            return nodes
        if not self._costs.known:
            return 0
        while nodes and self._costs.high(self._costs.round_ms(method, nodes)) > left:
            nodes -= 1
        return nodes
