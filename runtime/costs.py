"""What passes and drafts cost on this device, learnt while replies run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise

from specedge.runtime.contracts import Round

__all__ = ["Costs", "shape_of"]

_GROWTH: Mapping[str, float] = {"fp32": 0.04, "fp16": 0.04, "bf16": 0.04, "int8": 0.06, "int8-static": 0.06}
"""What one more row adds to a pass of one row, by precision, until something was measured (this project's CPU)."""

_OTHER_GROWTH = 0.13
_RATE = 0.1
_FIRST_RATIO, _LAST_RATIO = 0.5, 0.02
_CLIP = 1.6
_SPREADS = 3.0
_LEAST_SPREAD = 0.03
_SETTLED = 5
_DOUBT = 0.05


def shape_of(precision: str) -> dict[int, float]:
    """Relative times of passes by width, before anything was measured."""
    growth = _GROWTH.get(precision, _OTHER_GROWTH)
    return {1: 1.0, 65: 1 + 64 * growth}


class Costs:
    """Milliseconds of a pass by its width, and of a draft by its length.

    pass_ms(w) = pace * shape(w) * ratio(w). The shape was measured by a tuning, or is a guess; a
    width's ratio says how far off it was, and settles with the number of such passes; the pace is the machine's and the
    context's of the moment, and changes fast. Both are moving averages of what rounds took, in
    logarithms, in which a single outlier counts for at most a factor of 1.6.

    Args:
        shape: Times of passes by width, at least of one width.
        drafts: For each method what a draft takes, and what each of its tokens takes.
        measured: Whether both are milliseconds of this device; else they are shares of a pass of one row.
        padded: How many rows a pass of so many really runs.
    """

    def __init__(
        self,
        shape: Mapping[int, float],
        drafts: Mapping[str, tuple[float, float]],
        *,
        measured: bool = False,
        padded: Callable[[int], int] = lambda rows: rows,
    ) -> None:
        self._shape = _rising(shape)
        self._padded = padded
        self._drafts = dict(drafts)
        self._measured = measured
        self._log_pace = 0.0
        self._log_ratio: dict[int, float] = {}
        self._timed: dict[int, int] = {}
        self._drafted: dict[str, int] = {}
        self._last = ""
        self._log_draft: dict[str, float] = dict.fromkeys(drafts, 0.0) if measured else {}
        self._spread = _LEAST_SPREAD
        self.host_ms = 0.15

    @property
    def known(self) -> bool:
        """Whether anything is known of this device in milliseconds."""
        return self._measured

    def pass_ms(self, width: int) -> float:
        """Predicted milliseconds of a pass."""
        width = self._padded(width)
        return self._base(width) * math.exp(self._log_pace + self._ratio(width))

    def draft_ms(self, method: str, tokens: int) -> float:
        """Predicted milliseconds of a draft of so many tokens."""
        if tokens < 1:
            return 0.0
        whole, each = self._drafts.get(method, (0.0, 0.0))
        ms = (whole + each * tokens) * math.exp(self._log_draft.get(method, 0.0))
        return ms if method in self._log_draft else ms * self.pass_ms(1)

    def round_ms(self, method: str, tokens: int) -> float:
        """Predicted milliseconds of a whole round."""
        return self.draft_ms(method, tokens) + self.pass_ms(1 + tokens) + self.host_ms

    def high(self, ms: float) -> float:
        """What a predicted time is rarely above."""
        return ms * (1 + _SPREADS * self._spread)

    def record(self, outcome: Round) -> None:
        """Learns from a round; not from a reply's first, which runs the prompt."""
        if outcome.prefill:
            return
        nodes = len(outcome.draft.tokens)
        self._record_pass(1 + nodes, outcome.verify_ms)
        self.host_ms += _RATE * (min(outcome.host_ms, 4 * self.host_ms) - self.host_ms)
        by = outcome.draft.by
        # The first draft after another's may have run what its cache lacked, a prompt even.
        if nodes and by in self._drafts and by == self._last:
            self._record_draft(by, nodes, outcome.draft_ms)
        self._last = by or self._last

    def doubt(self) -> None:
        """Takes passes to be a little faster than they seemed: what keeps them from being run must not stay so."""
        self._log_pace -= _DOUBT

    def _record_pass(self, width: int, ms: float) -> None:
        if ms <= 0:
            return
        width = self._padded(width)
        if not self._measured:  # the first of all passes sets the scale
            self._log_pace, self._measured = math.log(ms / self._base(width)), True
            self._log_ratio[width], self._timed[width] = 0.0, 1
            return
        off = math.log(ms / self.pass_ms(width))
        if width in self._log_ratio:
            self._spread += _RATE * (max(abs(off), _LEAST_SPREAD) - self._spread)
        off = _clipped(off)
        count = self._timed[width] = self._timed.get(width, 0) + 1
        rate = max(_FIRST_RATIO / count, _LAST_RATIO)
        self._log_ratio[width] = self._ratio(width) + rate * off
        self._log_pace += _RATE * off

    def _record_draft(self, method: str, tokens: int, ms: float) -> None:
        if ms <= 0 or not any(self._drafts[method]):
            return
        if method not in self._log_draft:
            whole, each = self._drafts[method]
            self._log_draft[method], self._drafted[method] = math.log(ms / (whole + each * tokens)), 1
            return
        count = self._drafted[method] = self._drafted.get(method, _SETTLED) + 1
        off = math.log(ms / self.draft_ms(method, tokens))
        # The first few correct each other freely.
        self._log_draft[method] += off / count if count < _SETTLED else _RATE * _clipped(off)

    def _ratio(self, width: int) -> float:
        """A width's own, or that of the nearest width that was timed."""
        if width in self._log_ratio or not self._log_ratio:
            return self._log_ratio.get(width, 0.0)
        return self._log_ratio[min(self._log_ratio, key=lambda seen: (abs(seen - width), seen))]

    def _base(self, width: int) -> float:
        """The shape at a width: between two known ones a straight line, beyond the last one its slope."""
        points = self._shape
        if width <= points[0][0] or len(points) == 1:
            return points[0][1]
        for (low, below), (high, above) in pairwise(points):
            if width <= high or high == points[-1][0]:
                return below + (above - below) * (width - low) / (high - low)
        return points[-1][1]


def _rising(shape: Mapping[int, float]) -> list[tuple[int, float]]:
    """Times by width, where a wider pass never takes less."""
    most, rising = 0.0, []
    for width, time in sorted(shape.items()):
        most = max(most, time)
        rising.append((width, most))
    return rising


def _clipped(off: float) -> float:
    most = math.log(_CLIP)
    return max(-most, min(most, off))
