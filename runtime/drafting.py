"""An engine's drafters, and what was learnt of them: stays over replies."""

from __future__ import annotations

from dataclasses import replace

from specedge.runtime.calibration import HeadCalibration
from specedge.runtime.candidates import auto_methods, candidates, longest, make_costs
from specedge.runtime.contracts import Drafter, SamplingDrafter
from specedge.runtime.deadline import Deadline
from specedge.runtime.director import Director
from specedge.runtime.drafters.guard import GuardedDrafter
from specedge.runtime.drafters.registry import method_names, open_drafter
from specedge.runtime.graph import Decoder
from specedge.runtime.opening import Opener
from specedge.runtime.options import AUTO, DEFAULT_DRAFT_LENGTH, PLAIN, Options
from specedge.runtime.policy import LONGEST, Fixed, Policy, Speed, Steps, Thresholds
from specedge.runtime.sampler import NumpySampler
from specedge.runtime.session import Session
from specedge.runtime.tuning import Tuning

__all__ = ["Drafting"]


class Drafting:
    """Opens drafters when they are first needed, and makes a director for each reply.

    Args:
        opener: Opens what the bundle holds.
        session: Is told of every drafter that is open.
        tuning: What was measured on this device; None: nothing was.

    Attributes:
        costs: What rounds take.
        tuning: As given.
    """

    def __init__(self, opener: Opener, session: Session, tuning: Tuning | None) -> None:
        self._opener, self._session, self.tuning = opener, session, tuning
        self.costs = make_costs(opener.manifest, tuning, opener.target.padded)
        self._open: dict[str, Drafter] = {}
        self._policies: dict[tuple[str, int], Speed] = {}

    def methods(self, method: str) -> tuple[str, ...]:
        """The methods whose drafters a reply by this one may ask."""
        if method != AUTO:
            return (method,)
        return auto_methods(method_names(self._opener.manifest), self.tuning)

    def drafter(self, method: str) -> Drafter:
        """An open drafter; one that was not used lately catches up by itself."""
        if method not in self._open:
            self._open[method] = open_drafter(method, self._opener)
            self._session.drafters.append(self._open[method])
        return self._open[method]

    def opened(self, method: str) -> Drafter | None:
        """A drafter, if it was opened."""
        return self._open.get(method)

    def calibration(self, heads: str) -> HeadCalibration:
        """What was measured of heads."""
        return self._opener.calibration(heads)

    def longest(self, method: str) -> int:
        """Longest draft that a method can make where it copies nothing."""
        return longest(method, self._opener)

    def director(self, options: Options, prompt_length: int, deadline: Deadline) -> Director:
        """Directs a reply.

        Args:
            options: The reply's, with its method and seed.
            prompt_length: Tokens of its prompt.
            deadline: Its limits.

        Raises:
            UsageError: A method's drafter cannot be had in this bundle.
        """
        self.prepare(options)
        weighs = _weighs(options)
        guards = {method: GuardedDrafter(self.drafter(method)) for method in self.methods(options.method or PLAIN)}
        samplers = {}
        for method in guards:
            temperature = self._draft_temperature(method, options) if weighs else None
            if temperature is not None:
                drawn = replace(options, temperature=temperature)
                samplers[method] = NumpySampler(drawn, prompt_length, options.seed or 0)
        return Director(
            guards,
            self._policy(options, tuple(guards)),
            self.costs,
            deadline=deadline,
            samplers=samplers,
            baseline=options.measure_baseline,
            temperature=options.temperature,
        )

    def prepare(self, options: Options) -> None:
        """Opens a reply's drafters, and tells them whether it weighs their laws."""
        for method in self.methods(options.method or PLAIN):
            drafter = self.drafter(method)
            if isinstance(drafter, SamplingDrafter):
                drafter.sample = _weighs(options)

    def look_at(self, likeliest: int | None) -> None:
        """Tells the target and draft models how many of a row's likeliest tokens the reply looks at; None: all."""
        for model in (self._session.target, *(getattr(drafter, "model", None) for drafter in self._open.values())):
            if isinstance(model, Decoder):
                model.looked_at = likeliest

    def close(self) -> None:
        """Frees the drafters."""
        for drafter in self._open.values():
            if hasattr(drafter, "close"):
                drafter.close()
        self._open.clear()

    def _policy(self, options: Options, methods: tuple[str, ...]) -> Policy:
        method = options.method or PLAIN
        kind = options.policy or ("speed" if method == AUTO else "fixed")
        most = options.draft_length or (DEFAULT_DRAFT_LENGTH if kind == "fixed" else LONGEST)
        if kind == "fixed" or method == PLAIN:
            return Fixed(method, most)
        if kind == "thresholds":
            return Thresholds(method, most)
        if kind == "steps":
            return Steps(method, self._cost_of_a_token(method), most)
        key = (method, most)
        if key not in self._policies:
            known = candidates(methods, self._opener, self.tuning)
            self._policies[key] = Speed(known, self.costs, most, tried=self.tuning is not None)
        return self._policies[key]

    def _cost_of_a_token(self, method: str) -> float:
        """c: what a drafted token takes over what a pass takes."""
        return (self.costs.draft_ms(method, 2) - self.costs.draft_ms(method, 1)) / self.costs.pass_ms(1)

    def _draft_temperature(self, method: str, options: Options) -> float | None:
        """A draft's own temperature: as asked for, or as tuned for the nearest temperature of a reply."""
        tuned = {} if self.tuning is None else self.tuning.temperatures.get(method, {})
        if options.draft_temperature is not None or not tuned:
            return options.draft_temperature
        return tuned[min(tuned, key=lambda each: abs(float(each) - options.temperature))]


def _weighs(options: Options) -> bool:
    """Whether drafts are drawn from a law that the verifier weighs."""
    return options.accept == "rejection" and not options.greedy
