"""The temperature at which a drafter's law comes nearest to the target's: the most of sum min(p, q) on average.

A draft drawn at another temperature than the reply's leaves the output law alone, since rejection
weighs the law it was really drawn from. What changes is how much is accepted: sum over tokens of
min(p, q) (Leviathan, Kalman and Matias, arXiv 2211.17192, corollary 3.6).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specedge.runtime.contracts import Context, Draft, Floats, SamplingDrafter, Verdict
from specedge.runtime.engine import Engine
from specedge.runtime.options import Options
from specedge.runtime.survey import survey
from specedge.runtime.verifiers import Rejection

__all__ = ["REPLY_TEMPERATURES", "best_temperature", "best_temperatures"]

REPLY_TEMPERATURES = (0.7, 1.0)
_TRIED = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.3)
_PAIRS = 160
_LENGTH, _TOKENS = 3, 24

Pair = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Logarithms of a target's and a drafter's law of the same token, both at temperature 1."""


def best_temperature(pairs: Sequence[Pair], temperature: float) -> float:
    """The draft's temperature at which most is accepted, for a reply's temperature."""
    targets = [_at(p, temperature) for p, _ in pairs]

    def accepted(tried: float) -> float:
        laws = (_at(q, tried) for _, q in pairs)
        return sum(float(np.minimum(p, q).sum()) for p, q in zip(targets, laws, strict=True))

    # Of two that are equally good the reply's own: there is no reason to change it.
    return max((temperature, *_TRIED), key=accepted)


def best_temperatures(engine: Engine, method: str, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
    """For some temperatures of a reply, as text, the best one of a method's drafts; {} where it draws none."""
    drafter = engine.drafting.drafter(method)
    if not isinstance(drafter, SamplingDrafter):
        return {}
    recorder = _Recorder()
    options = Options(method=method, accept="rejection", temperature=1.0, seed=0)
    drafter.sample = True
    try:
        for ids in prompts:
            if len(recorder.pairs) < _PAIRS:
                survey(engine, method, _LENGTH, [ids], tokens=_TOKENS, options=options, verifier=recorder)
    finally:
        drafter.sample = False
    if not recorder.pairs:
        return {}
    return {f"{each:g}": best_temperature(recorder.pairs, each) for each in REPLY_TEMPERATURES}


@dataclass
class _Recorder(Rejection):
    """Rejection that keeps the laws it compared."""

    pairs: list[Pair] = field(default_factory=list)

    def judge(self, draft: Draft, logits: Floats, context: Context) -> Verdict:
        """See `contracts.Verifier`."""
        verdict = super().judge(draft, logits, context)
        if draft.probs is not None:
            for node in range(min(verdict.evaluated, len(draft.tokens), _PAIRS - len(self.pairs))):
                with np.errstate(divide="ignore"):
                    q = np.log(np.asarray(draft.probs[node], np.float64))
                p = logits[node].astype(np.float64)
                self.pairs.append((p - p.max(), q - q.max()))
        return verdict


def _at(logs: NDArray[np.float64], temperature: float) -> NDArray[np.float64]:
    weights = np.exp(logs / temperature)
    law: NDArray[np.float64] = weights / weights.sum()
    return law
