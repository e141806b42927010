"""Runs a reply's drafters by a policy: who drafts, how much, within what time, and who has to rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from specedge.runtime.contracts import EMPTY_DRAFT, Context, Draft, Round, Sampler, Verdict
from specedge.runtime.costs import Costs
from specedge.runtime.deadline import Deadline
from specedge.runtime.drafters.guard import GuardedDrafter
from specedge.runtime.options import PLAIN
from specedge.runtime.policy import LONGEST, Plan, Policy, View
from specedge.runtime.watch import Watch, likely_cause

__all__ = ["Director", "Forecast"]

_BASELINE_EVERY = 12
_REST = 32


@dataclass
class Forecast:
    """What a policy expected of the rounds that it planned.

    Attributes:
        tokens, ms: Sums over them.
        plain_ms: What so many passes of plain decoding were expected to take.
        rounds: How many they are.
    """

    tokens: float = 0.0
    ms: float = 0.0
    plain_ms: float = 0.0
    rounds: int = 0

    @property
    def speedup(self) -> float | None:
        """Expected speed-up over plain decoding; None where nothing was expected."""
        if not self.rounds or not self.ms:
            return None
        return (self.plain_ms / self.rounds) * self.tokens / self.ms


class Director:
    """See `contracts.Director`.

    Args:
        drafters: The drafters that the policy may choose, by method.
        policy: Chooses.
        costs: Told what rounds take.
        deadline: Caps drafts so that rounds end in time.
        samplers: Of sampled drafts, by method, where they are not the reply's own.
        baseline: Whether a round in twelve decodes plainly, to measure what that takes.
        temperature: Of the reply, for the likely cause of a fall.

    Attributes:
        notices: What happened to drafters since they were last taken, one line each.
        baseline_ms: What those plain rounds took.
        forecast: What the policy expected.
    """

    def __init__(
        self,
        drafters: Mapping[str, GuardedDrafter],
        policy: Policy,
        costs: Costs,
        *,
        deadline: Deadline | None = None,
        samplers: Mapping[str, Sampler] | None = None,
        baseline: bool = False,
        temperature: float = 0.0,
    ) -> None:
        self._drafters, self._policy, self._costs = dict(drafters), policy, costs
        self._deadline, self._samplers, self._baseline = deadline, samplers or {}, baseline
        self._temperature = temperature
        self._watches = {method: Watch() for method in drafters}
        self._plan, self._rounds = Plan(PLAIN, 0), 0
        self._tokens: Sequence[int] = ()
        self._measures = False
        self.notices: list[str] = []
        self.baseline_ms: list[float] = []
        self.forecast = Forecast()
        policy.begin()

    def propose(self, context: Context, most: int) -> Draft:
        """See `contracts.Director`."""
        self._rounds += 1
        self._plan = Plan(PLAIN, 0)
        self._measures = self._baseline and self._rounds % _BASELINE_EVERY == 0
        if self._measures:
            return EMPTY_DRAFT
        offers = {name: self._drafters[name].propose(context, min(most, LONGEST)) for name in self._policy.peeks}
        matched = max((self._drafters[name].matched for name, offer in offers.items() if offer.tokens), default=0)
        ready = [name for name, drafter in self._drafters.items() if drafter.ready]
        fits = (lambda method, nodes: nodes) if self._deadline is None else self._deadline.affordable
        plan = self._policy.plan(View(most, ready, offers, matched, fits))
        budget = fits(plan.method, min(plan.budget, most))
        if plan.method == PLAIN:
            self._plan = plan
        if plan.method not in self._drafters or budget < 1:
            return EMPTY_DRAFT
        self._plan = plan
        if plan.method in offers:
            draft = Draft.chain(offers[plan.method].tokens[:budget])
        else:
            sampler = self._samplers.get(plan.method, context.sampler)
            seen = replace(context, least=plan.least, sampler=sampler)
            draft = self._drafters[plan.method].propose(seen, budget)
        return replace(draft, by=plan.method) if draft.tokens else draft

    def observe(self, context: Context, verdict: Verdict) -> None:
        """See `contracts.Director`."""
        self._tokens = context.tokens
        for drafter in self._drafters.values():
            drafter.observe(context, verdict)

    def rewind(self, length: int) -> None:
        """See `contracts.Director`."""
        for drafter in self._drafters.values():
            drafter.rewind(length)

    def record(self, outcome: Round) -> None:
        """See `contracts.Director`."""
        for drafter in self._drafters.values():
            self.notices += drafter.notices
            drafter.notices.clear()
        if outcome.prefill:
            return
        if self._measures:
            self.baseline_ms.append(outcome.verify_ms + outcome.host_ms)
        plain_ms = self._costs.round_ms(PLAIN, 0) if self._costs.known else 0.0
        if self._plan.ms and plain_ms:
            self.forecast.tokens += self._plan.tokens
            self.forecast.ms += self._plan.ms
            self.forecast.plain_ms += plain_ms
            self.forecast.rounds += 1
        self._costs.record(outcome)
        self._policy.record(self._plan, outcome)
        self._watch(outcome)

    def _watch(self, outcome: Round) -> None:
        """Lets a drafter rest whose acceptance has fallen suddenly: its drafts would cost more than they bring."""
        method = outcome.draft.by
        fall = self._watches[method].record(outcome) if method in self._watches else None
        if fall is None:
            return
        self._drafters[method].rest(_REST)
        cause = likely_cause(self._tokens, self._temperature)
        self.notices.append(
            f"drafter {method} rests for {_REST} rounds: acceptance fell from {fall[0]:.2f} to {fall[1]:.2f}; {cause}"
        )
