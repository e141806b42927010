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
_RESTS = (16, 64)


class GuardedDrafter:
    """A drafter that cannot fail. After an error it proposes nothing for a while, and after its third nothing more.

    Args:
        drafter: Any drafter.

    Attributes:
        failure: What went wrong first, in one line; None while all is well.
        notices: What went wrong since they were last taken.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.name = drafter.name
        self.failure: str | None = None
        self.notices: list[str] = []
        self._failures = 0
        self._rest = 0

    @property
    def ready(self) -> bool:
        """Whether it would be asked for a draft now."""
        return self._rest == 0 and self._failures <= len(_RESTS)

    @property
    def matched(self) -> int:
        """For a drafter that copies: how many tokens before the newest it found again; else 0."""
        return getattr(self._drafter, "matched", 0)

    def propose(self, context: Context, budget: int) -> Draft:
        """See `contracts.Drafter`; never raises, and what it returns is sound."""
        if not self.ready:
            return EMPTY_DRAFT
        draft = self._try(lambda: _checked(self._drafter.propose(context, budget), context, budget))
        return EMPTY_DRAFT if draft is None else draft

    def observe(self, context: Context, verdict: Verdict) -> None:
        """See `contracts.Drafter`; never raises. A drafter that rests is a round nearer to its next try."""
        self._rest = max(self._rest - 1, 0)
        if self.ready:
            self._try(lambda: self._drafter.observe(context, verdict))

    def rewind(self, length: int) -> None:
        """See `contracts.Drafter`; never raises. One that rests is told as well: it will be asked again."""
        if self._failures <= len(_RESTS):
            self._try(lambda: self._drafter.rewind(length))

    def rest(self, rounds: int) -> None:
        """Asks nothing of the drafter for so many rounds."""
        self._rest = max(self._rest, rounds)

    def _try(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:  # noqa: BLE001  a drafter may fail in any way; the reply must not
            self._failed(error)
            return None

    def _failed(self, error: Exception) -> None:
        reason = " ".join(str(error).split()) or "no message"
        text = f"drafter {self.name} failed, decoding plainly: {type(error).__name__}: {reason}"
        if self._rest == 0:
            final = getattr(self._drafter, "final", False)
            self._failures += 1 + final * len(_RESTS)
            again = self._failures <= len(_RESTS)
            self._rest = _RESTS[self._failures - 1] if again else 0
            self.notices.append(f"{text}; {f'next try in {self._rest} rounds' if again else 'left out for this reply'}")
        if self.failure is None:
            self.failure = text
            _LOG.warning(text)


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
