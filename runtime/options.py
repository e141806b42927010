"""What a caller may ask of one reply, checked when it is made."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from specedge.runtime.errors import UsageError

__all__ = [
    "ACCEPT_MODES",
    "AUTO",
    "DEFAULT_DRAFT_LENGTH",
    "MAX_DRAFT_LENGTH",
    "PLAIN",
    "POLICIES",
    "Options",
    "override",
]

ACCEPT_MODES = ("exact", "rejection", "typical")
POLICIES = ("fixed", "speed", "thresholds", "steps")
PLAIN = "none"
"""The method that drafts nothing."""

AUTO = "auto"
"""The method that chooses among all others, round by round."""

DEFAULT_DRAFT_LENGTH = 4
MAX_DRAFT_LENGTH = 63


@dataclass(frozen=True)
class Options:
    """Options of one reply.

    Attributes:
        method: "auto", "none", "draft", "draft:NAME", "medusa", "medusa:2x3" (a dense tree), "medusa+ngram"
            or "ngram"; None takes the bundle's default.
        policy: How long drafts are: "fixed" (always `draft_length`), "speed" (what promises the most committed
            tokens a millisecond, by what was measured so far; the only one for method auto), "thresholds" (5, 3
            or 1 by recent acceptance, above .7, above .5, below), "steps" (2 more after a draft that stood
            whole, else 1 less); None: speed for method auto, else fixed.
        accept: "exact" (a seed gives the same text under every method) or "rejection"
            (the same law, more accepted tokens when sampling), both lossless; or "typical" (what the
            target finds likely enough stands, which changes the law when sampling).
        draft_length: Most tokens drafted a round, 1 to 63; nodes, where a tree is drafted. None: 4 where it is
            fixed, up to 16 else.
        draft_temperature: Of sampled drafts under "rejection", whose output law it leaves alone; None: what a
            tuning found best, else the reply's.
        max_tokens: Most tokens in the reply; None: until the context is full.
        temperature: 0 is greedy.
        top_k: Keep the k likeliest tokens; 0 keeps all.
        top_p: Keep the likeliest tokens that hold this much probability.
        min_p: Keep tokens at least this likely, relative to the likeliest.
        repetition_penalty: Divides (multiplies) positive (negative) logits of tokens seen (CTRL, arXiv 1909.05858).
        presence_penalty: Subtracted from logits of tokens seen in the reply.
        frequency_penalty: Subtracted from logits, times how often the token stands in the reply.
        no_repeat_ngram: No n-gram of this length may occur twice; 0 is off.
        typical_epsilon, typical_delta: "typical" takes a drafted token whose probability is more than
            min(epsilon, delta * exp(-entropy)).
        seed: Seed of the draws; None takes a fresh one.
        stop: Texts that end the reply; they are not part of it.
        deadline_ms: Most milliseconds of the whole reply, prompt included; it then ends with what there is
            (`finish_reason` "deadline"), late by one pass at most.
        max_step_ms: Most milliseconds between visible tokens, as far as passes allow: drafts are cut to it.
        measure_baseline: Decode plainly in one round of twelve, to measure what speculation brings.
    """

    method: str | None = None
    accept: str = "exact"
    policy: str | None = None
    draft_length: int | None = None
    draft_temperature: float | None = None
    max_tokens: int | None = 512
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram: int = 0
    typical_epsilon: float = 0.09
    typical_delta: float = 0.3
    seed: int | None = None
    stop: tuple[str, ...] = ()
    deadline_ms: float | None = None
    max_step_ms: float | None = None
    measure_baseline: bool = False

    def __post_init__(self) -> None:
        for name in ("draft_length", "max_tokens", "top_k", "no_repeat_ngram", "seed"):
            object.__setattr__(self, name, _whole(name, getattr(self, name)))
        _choice("accept", self.accept, ACCEPT_MODES)
        self._check_drafting()
        if self.max_tokens is not None:
            _range("max_tokens", self.max_tokens, 1, 1 << 31)
        _range("temperature", self.temperature, 0.0, 100.0)
        _range("top_k", self.top_k, 0, 1 << 31)
        _range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _range("min_p", self.min_p, 0.0, 1.0)
        _range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _range("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _range("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        _range("no_repeat_ngram", self.no_repeat_ngram, 0, 1 << 20)
        _range("typical_epsilon", self.typical_epsilon, 0.0, 1.0, open_low=True)
        _range("typical_delta", self.typical_delta, 0.0, 1.0, open_low=True)
        if self.seed is not None:
            _range("seed", self.seed, 0, (1 << 64) - 1)
        texts = self.stop if isinstance(self.stop, (tuple, list)) else (None,)
        if not all(isinstance(text, str) and text for text in texts):
            raise UsageError(f"stop is {self.stop!r}: give a tuple of texts, none of them empty")

    def _check_drafting(self) -> None:
        if self.draft_length is not None:
            _range("draft_length", self.draft_length, 1, MAX_DRAFT_LENGTH, hint="; to decode plainly use method none")
        if self.draft_temperature is not None:
            _range("draft_temperature", self.draft_temperature, 0.0, 100.0, open_low=True)
        if not isinstance(self.method, (str, type(None))):
            raise UsageError(f"method is {self.method!r}: give a name, or None")
        if self.policy is not None:
            _choice("policy", self.policy, POLICIES)
        if self.method == AUTO and self.policy not in (None, "speed"):
            raise UsageError(f"policy {self.policy!r} is for one method; method auto goes with policy speed")
        for name in ("deadline_ms", "max_step_ms"):
            if getattr(self, name) is not None:
                _range(name, getattr(self, name), 0.0, 1e9, open_low=True)
        if not isinstance(self.measure_baseline, bool):
            raise UsageError(f"measure_baseline is {self.measure_baseline!r}: give True or False")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def looked_at(self) -> int | None:
        """How many of a row's likeliest tokens can matter; None: all. Penalties may raise any, typicality sums all."""
        penalised = (self.presence_penalty, self.frequency_penalty, self.no_repeat_ngram) != (0, 0, 0)
        if penalised or self.repetition_penalty != 1.0 or (self.accept == "typical" and not self.greedy):
            return None
        return 1 if self.greedy else self.top_k or None


def override(options: Options, overrides: Mapping[str, Any]) -> Options:
    """Options with single ones replaced by name.

    Raises:
        UsageError: There is no such option, or it is out of range.
    """
    known = options.__dataclass_fields__
    unknown = sorted(set(overrides) - set(known))
    if unknown:
        raise UsageError(f"unknown option {', '.join(unknown)}; the options are {', '.join(known)}")
    return replace(options, **overrides)


def _whole(name: str, value: object) -> object:
    """The value as a plain int, if it is a whole number of any library; None stays None."""
    if value is None:
        return None
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{name} is {value!r}: give a whole number") from None


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{name} is {value!r}: choose one of {', '.join(allowed)}")


def _range(name: str, value: float, low: float, high: float, *, open_low: bool = False, hint: str = "") -> None:
    try:
        inside = isinstance(value, Real) and math.isfinite(value) and low <= value <= high
    except OverflowError:  # a whole number that no float holds
        inside = False
    if not inside or isinstance(value, bool) or (open_low and value == low):
        above = "more than " if open_low else ""
        raise UsageError(f"{name} is {value!r}: give a number from {above}{low} to {high}{hint}")
