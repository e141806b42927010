"""Keeps a reply safe from its drafter: whatever goes wrong, decoding goes on plainly."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from specedge.runtime.contracts import EMPTY_DRAFT, Context, Draft, Drafter, Verdict

__all__ = ["GuardedDrafter"]

_LOG = logging.getLogger(__name__)
_SUM_TOLERANCE = 1e-3


class GuardedDrafter:
    """A drafter that cannot fail: after its first error it proposes nothing more.

    Args:
        drafter: Any drafter. It is not asked again once it failed; make a new guard to try again.

    Attributes:
        failure: What went wrong, in one line; None while all is well.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.name = drafter.name
        self.failure: str | None = None

    def propose(self, context: Context, budget: int) -> Draft:
        """See `contracts.Drafter`; never raises, and what it returns is sound."""
        draft = self._try(lambda: _checked(self._drafter.propose(context, budget), context, budget))
        return EMPTY_DRAFT if draft is None else draft

    def observe(self, context: Context, verdict: Verdict) -> None:
        """See `contracts.Drafter`; never raises."""
        self._try(lambda: self._drafter.observe(context, verdict))

    def rewind(self, length: int) -> None:
        """See `contracts.Drafter`; never raises."""
        self._try(lambda: self._drafter.rewind(length))

    def _try(self, action: Callable[[], Any]) -> Any:
        if self.failure is not None:
            return None
        try:
            return action()
        except Exception as error:  # noqa: BLE001  a drafter may fail in any way; the reply must not
            reason = " ".join(str(error).split()) or "no message"
            self.failure = f"drafter {self.name} failed, decoding plainly: {type(error).__name__}: {reason}"
            _LOG.warning(self.failure)
            return None


def _checked(draft: Draft, context: Context, budget: int) -> Draft:
    """The draft, if a verifier can be given it; raises ValueError where not."""
    nodes = len(draft.tokens)
    if nodes > budget:
        raise ValueError(f"{nodes} nodes drafted, at most {budget} were asked for")
    vocabulary = None if context.rows is None else context.rows.logits.shape[1]
    for token in draft.tokens:
        if not isinstance(token, (int, np.integer)) or token < 0 or (vocabulary is not None and token >= vocabulary):
            raise ValueError(f"token {token!r} is outside the target's vocabulary")
    if draft.probs is not None:
        _check_probs(draft, nodes)
    return draft


def _check_probs(draft: Draft, nodes: int) -> None:
    probs = np.asarray(draft.probs)
    if probs.ndim != 2 or len(probs) != nodes:
        raise ValueError(f"probabilities of shape {probs.shape} for {nodes} nodes")
    lowest, sums = probs.min(initial=0), probs.sum(axis=1)
    # A NaN or an infinity anywhere shows in its row's sum.
    if not (lowest >= 0 and np.all(np.abs(sums - 1) <= _SUM_TOLERANCE)):
        raise ValueError("probabilities that are not finite, below 0, or do not sum to 1")
    if any(token >= probs.shape[1] or not probs[node, token] > 0 for node, token in enumerate(draft.tokens)):
        raise ValueError("a token that its own law says cannot be drawn")
