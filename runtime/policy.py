"""Who drafts the next round, and how much: policies by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from specedge.runtime.contracts import Draft, Round
from specedge.runtime.costs import Costs
from specedge.runtime.gains import Gain, TreeGain
from specedge.runtime.options import PLAIN

__all__ = ["LONGEST", "Candidate", "Fixed", "Plan", "Policy", "Speed", "Steps", "Thresholds", "View"]

LONGEST = 16
"""Most nodes that a policy asks for."""
_QUICK = 0.25
_HYSTERESIS = 1.01
_HOPE = 0.5
_PROBE_EVERY = 24
_PROBE_IDLE = 48
_PROBE_WORTH = 0.85
_PLAIN_IDLE = 96
_LONG_IDLE = 192
_TRIALS, _TRIAL_LENGTH = 3, 4
_FADE_IDLE = 0.002
_FADE_REPLY = 0.2
_PROMISE_KEPT = 0.95
_PROMISE_REPLY = 0.3
_PROMISE_TRUST = 8.0
_LOOKUPS = 4
_MORE = 1
_NEARLY = 0.96


@dataclass(frozen=True)
class Plan:
    """What a round shall do.

    Attributes:
        method: Whose draft; "none": nobody's.
        budget: Most nodes.
        tokens, ms: What the policy expects of the round: committed tokens, and milliseconds; 0: it does not say.
        least: A node less likely to stand is not worth its time.
    """

    method: str
    budget: int
    tokens: float = 0.0
    ms: float = 0.0
    least: float = 0.0


@dataclass(frozen=True)
class View:
    """What a policy may look at.

    Attributes:
        most: Most nodes that there is room for.
        ready: Methods whose drafters are well.
        offers: Drafts that cost nothing, made already, by method.
        matched: Tokens before the newest that prompt lookup found again; 0: none.
        fits: How many of so many nodes of a method a deadline leaves time for.
    """

    most: int
    ready: Sequence[str]
    offers: Mapping[str, Draft] = field(default_factory=dict)
    matched: int = 0
    fits: Callable[[str, int], int] = lambda method, nodes: nodes


class Policy(Protocol):
    """Plans rounds, and is told what became of them.

    Attributes:
        peeks: Methods that draft for nothing: asked before each plan, so that it can see their drafts.
    """

    peeks: Sequence[str]

    def begin(self) -> None:
        """A reply begins."""
        ...

    def plan(self, view: View) -> Plan:
        """Plans the next round."""
        ...

    def record(self, plan: Plan, outcome: Round) -> None:
        """Told of a round that it planned."""
        ...


class Fixed:
    """One method, one draft length."""

    peeks: Sequence[str] = ()

    def __init__(self, method: str, length: int) -> None:
        self.method, self.length = method, length

    def begin(self) -> None:
        """See `Policy`."""

    def plan(self, view: View) -> Plan:
        """See `Policy`."""
        return Plan(self.method, self.length)

    def record(self, plan: Plan, outcome: Round) -> None:
        """See `Policy`."""


class Thresholds(Fixed):
    """5 tokens while more than .7 of the tested ones stand, 3 above .5, else 1."""

    def __init__(self, method: str, most: int = LONGEST) -> None:
        super().__init__(method, min(3, most))
        self._most, self._alpha = most, 0.6

    def record(self, plan: Plan, outcome: Round) -> None:
        """See `Policy`."""
        if outcome.evaluated:
            self._alpha += _QUICK * (outcome.accepted / outcome.evaluated - self._alpha)
        self.length = min(5 if self._alpha > 0.7 else 3 if self._alpha > 0.5 else 1, self._most)


class Steps(Fixed):
    """Two more after a draft that stood whole, one less after any other (transformers' heuristic).

    The first length is log2(1 / c): what c, the time of a drafted token over that of a pass, allows
    at an acceptance of about a half.
    """

    def __init__(self, method: str, cost: float, most: int = LONGEST) -> None:
        first = round(math.log2(1 / cost)) if 0 < cost < 1 else 1
        super().__init__(method, max(1, min(first, most)))
        self._most = most

    def record(self, plan: Plan, outcome: Round) -> None:
        """See `Policy`."""
        if outcome.draft.tokens:
            change = 2 if outcome.accepted == len(outcome.draft.tokens) else -1
            self.length = max(1, min(self.length + change, self._most))


@dataclass(frozen=True)
class Candidate:
    """A method that `Speed` may choose.

    Attributes:
        method: Its name.
        gain: Makes an estimate of how many of its tokens stand, given how many tokens lookup found again.
        copies: It copies where lookup has found so many tokens again, or more, and what stands then depends on how
            many; 0: it never copies.
        free: Its drafts cost nothing, so that it is asked for one before each plan.
        tells: Whether its drafter tells how likely each node is, and leaves out those that are not worth it: it
            may then draft more than is best on average.
    """

    method: str
    gain: Callable[[int], Gain]
    copies: int = 0
    free: bool = False
    tells: bool = False


class Speed:
    """The most committed tokens a millisecond, of all candidates and lengths, plain decoding among them.

    What a plan promised is compared with what became of it, for every method and number of found tokens:
    later promises are taken for as much as earlier ones were worth. It stays with the method it has unless
    another promises 1 % more, by half a standard error above what was seen of it: what little is known of is
    given the benefit of the doubt. Now and then it tries one that it has not used for long, seldom if that one
    is far behind. What it learnt stays over replies.

    Args:
        candidates: The methods; plain decoding needs no entry.
        costs: What rounds take.
        most: Longest draft.
        tried: Whether the candidates' gains were measured before; else each is tried a few times first.
    """

    def __init__(
        self, candidates: Sequence[Candidate], costs: Costs, most: int = LONGEST, *, tried: bool = False
    ) -> None:
        self._candidates, self._costs, self._most = list(candidates), costs, most
        self._gains: dict[tuple[str, int], Gain] = {}
        self._promises: dict[tuple[str, int], tuple[float, float]] = {}
        self._current = PLAIN
        self._idle = dict.fromkeys((PLAIN, *(each.method for each in candidates)), 0)
        self._rounds = self._matched = 0
        self._trials = dict.fromkeys((each.method for each in candidates), 0 if tried else _TRIALS)
        self.peeks: Sequence[str] = [each.method for each in candidates if each.free]

    def begin(self) -> None:
        """See `Policy`."""
        for gain in self._gains.values():
            gain.fade(_FADE_REPLY)
        # What copying is worth is a matter of the text: a reply may be of another kind than the one before.
        for key, (promised, came) in self._promises.items():
            self._promises[key] = (_PROMISE_REPLY * promised, _PROMISE_REPLY * came)

    def plan(self, view: View) -> Plan:
        """See `Policy`."""
        if not self._costs.known:
            return Plan(PLAIN, 0)  # what plain decoding takes is what everything else is weighed against
        self._matched = min(view.matched, _LOOKUPS)
        plans = {PLAIN: Plan(PLAIN, 0, 1.0, self._costs.round_ms(PLAIN, 0))}
        passes = [self._costs.pass_ms(1 + n) for n in range(1 + min(view.most, self._most))]
        for candidate in self._candidates:
            if candidate.method in view.ready and (best := self._best(candidate, view, passes)) is not None:
                plans[candidate.method] = best
        for method, plan in plans.items():
            if self._trials.get(method):
                return replace(plan, budget=max(plan.budget, min(_TRIAL_LENGTH, view.most, self._most)))
        return self._choose(plans)

    def record(self, plan: Plan, outcome: Round) -> None:
        """See `Policy`."""
        self._rounds += 1
        for method in self._idle:
            self._idle[method] = 0 if method == plan.method else self._idle[method] + 1
        if self._trials.get(plan.method):
            self._trials[plan.method] -= 1
        used = next((each for each in self._candidates if each.method == plan.method), None)
        # What stood behind the end of a reply is not known, so its last round says nothing.
        if used is not None and outcome.finish is None:
            if outcome.draft.tokens:
                self._gain(used).record(outcome)
            self._settle(used, plan, outcome)
        for (method, _), gain in self._gains.items():
            if method != plan.method:
                gain.fade(_FADE_IDLE)

    def _best(self, candidate: Candidate, view: View, passes: Sequence[float]) -> Plan | None:
        """The length at which a method promises most, or nearly; None where it would draft nothing.

        Promises are flat about the best length: of those within 4 % of it the one with the shortest step is taken,
        and of steps that take the same, as rows up to the next width do, the longest draft.
        """
        method, most = candidate.method, len(passes) - 1
        if method in self.peeks:
            most = min(most, len(view.offers[method].tokens) if method in view.offers else 0)
        hope = 0.0 if method == self._current else _HOPE
        gains = self._gain(candidate).expected(view.fits(method, most), hope)
        plans: list[Plan] = []
        worth = self._worth(candidate)
        whole, one = self._costs.draft_ms(method, 1), self._costs.draft_ms(method, 2)
        each = one - whole
        for n in range(1, len(gains)):
            tokens, ms = 1 + worth * gains[n], whole + each * (n - 1) + passes[n] + self._costs.host_ms
            plans.append(Plan(method, n, tokens, ms))
        if not plans:
            return None
        enough = _NEARLY * max(map(_rate, plans))
        best = min((plan for plan in plans if _rate(plan) >= enough), key=lambda plan: (plan.ms, -plan.budget))
        if not candidate.tells or self._copying(candidate):
            return best
        n = min(best.budget, len(passes) - 2)
        least = _rate(best) * max(passes[n + 1] - passes[n], 0.0)
        return replace(best, budget=min(best.budget + _MORE, most), least=least)

    def _choose(self, plans: Mapping[str, Plan]) -> Plan:
        best = max(plans.values(), key=_rate)
        if (due := self._due(plans, best)) is not None:
            return due
        current = plans.get(self._current)
        if current is not None and _rate(best) < _HYSTERESIS * _rate(current):
            return current
        self._current = best.method
        return best

    def _due(self, plans: Mapping[str, Plan], best: Plan) -> Plan | None:
        """A plan that is tried to see how it fares: one that was not for long, and is not far behind."""
        if self._rounds % _PROBE_EVERY != _PROBE_EVERY - 1:
            return None
        waiting = [
            plan
            for method, plan in plans.items()
            if method != best.method
            and self._idle[method] >= (_PLAIN_IDLE if method == PLAIN else _PROBE_IDLE)
            and (_rate(plan) >= _PROBE_WORTH * _rate(best) or method == PLAIN or self._idle[method] >= _LONG_IDLE)
        ]
        return max(waiting, key=lambda plan: self._idle[plan.method], default=None)

    def _gain(self, candidate: Candidate) -> Gain:
        key = self._key(candidate)
        if key not in self._gains:
            self._gains[key] = candidate.gain(key[1])
        return self._gains[key]

    def _key(self, candidate: Candidate) -> tuple[str, int]:
        return candidate.method, self._matched if self._copying(candidate) else 0

    def _copying(self, candidate: Candidate) -> bool:
        return 0 < candidate.copies <= self._matched

    def _settle(self, used: Candidate, plan: Plan, outcome: Round) -> None:
        """Compares a plan's promise, before it was taken for what it is worth, with what came."""
        key = self._key(used)
        promised, came = self._promises.get(key, (0.0, 0.0))
        promised = _PROMISE_KEPT * promised + (plan.tokens - 1) / self._worth(used)
        came = _PROMISE_KEPT * came + outcome.accepted
        self._promises[key] = (promised, came)

    def _worth(self, candidate: Candidate) -> float:
        """What a promise has been worth lately.

        Copies, and chains of which only likely nodes are drafted, promise more than they keep. All else is
        promised as it was measured, and would be weighed twice.
        """
        key = self._key(candidate)
        if not key[1] and (not candidate.tells or isinstance(self._gain(candidate), TreeGain)):
            return 1.0
        promised, came = self._promises.get(key, (0.0, 0.0))
        return (came + _PROMISE_TRUST) / (promised + _PROMISE_TRUST)


def _rate(plan: Plan) -> float:
    """Expected tokens a millisecond."""
    return plan.tokens / plan.ms if plan.ms else 0.0
