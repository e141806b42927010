"""A draft model: a smaller or coarser model that decodes a few tokens ahead."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specedge.runtime.contracts import EMPTY_DRAFT, Context, Draft, Floats, Law, Rows, Target, Verdict
from specedge.runtime.errors import NumericError

__all__ = ["ModelDrafter", "draft_chain"]


class ModelDrafter:
    """Drafts a chain with a model of its own.

    Its cache holds every committed token but the newest, or fewer: what it lacks (a prompt, a
    reply drafted by another) is run in one pass before the first drafted token.

    Two ways to draft:

    - `sample` False, for the greedy and exact verifiers: the token that the reply's sampler would
      put there if the draft model were the target. It shares the penalties and, at a temperature,
      the random numbers of the target's own draw, so the two mostly agree (see `sampler.py`).
    - `sample` True, for the rejection verifier: a draw of its own, and the law it came from.

    Args:
        name: "draft:NAME".
        target: The draft model, its graph and cache.
        sample: How to draft; may be set between replies.
    """

    def __init__(self, name: str, target: Target, sample: bool = False) -> None:
        self.name = name
        self.sample = sample
        self.model = target
        self._base = 0  # rows before it hold tokens that were committed when they were run
        self._drafted: list[int] = []  # tokens of the rows from there on

    def propose(self, context: Context, budget: int) -> Draft:
        """See `contracts.Drafter`. Near the end of the draft model's cache there are fewer nodes, or none."""
        tokens = list(context.tokens)
        budget = min(budget, self.model.capacity - len(tokens) + 1)
        if budget < 1:
            return EMPTY_DRAFT
        self._keep_valid(tokens)
        self._base, self._drafted = len(tokens), []
        return draft_chain(self.model, context, budget, self.sample, self._drafted)

    def observe(self, context: Context, verdict: Verdict) -> None:
        """See `contracts.Drafter`. Rows of rejected tokens are forgotten; accepted ones stay."""
        self._keep_valid(context.tokens)

    def rewind(self, length: int) -> None:
        """See `contracts.Drafter`."""
        self.model.rewind(min(self.model.length, length))
        del self._drafted[max(length - self._base, 0) :]
        self._base = min(self._base, length)

    def close(self) -> None:
        """Frees the model."""
        close = getattr(self.model, "close", None)
        if close is not None:
            close()

    def _keep_valid(self, tokens: Sequence[int]) -> None:
        """Rewinds to the rows that hold committed tokens, without the newest."""
        valid = min(self.model.length, self._base)
        while valid < min(self.model.length, len(tokens)) and self._drafted[valid - self._base] == tokens[valid]:
            valid += 1
        self._base, self._drafted = valid, []
        self.model.rewind(min(valid, len(tokens) - 1))


def draft_chain(model: Target, context: Context, budget: int, sample: bool, drafted: list[int]) -> Draft:
    """Decodes ahead with a draft model, first running the tokens that its cache lacks.

    A vocabulary padded wider than the target's is cut. One padded narrower never proposes what it
    lacks, and runs the first token in its place: the guess after it is worse, the reply the same.

    Args:
        model: The draft model.
        context: What is committed.
        budget: Tokens to draft, at least one.
        sample: Whether to draw from the model's own law and say so (see `ModelDrafter`).
        drafted: Filled with the tokens as they are drafted, so that a failure leaves it known what was run.

    Raises:
        NumericError: The model computed NaN or infinity.
    """
    spec = getattr(model, "spec", None)
    known = None if spec is None or context.rows is None else min(spec.vocab_size, context.rows.logits.shape[1])
    laws: list[Law] = []
    prefix = list(context.tokens)
    pending: Sequence[int] = prefix[model.length :]
    for _ in range(budget):
        if known is not None:
            pending = [token if token < known else 0 for token in pending]
        logits = _sound(model.forward(pending), len(prefix))
        if context.rows is not None:
            logits = logits[: context.rows.logits.shape[1]]
        if sample:
            laws.append(context.sampler.law(logits, prefix))
            token = context.sampler.draw(laws[-1], len(prefix), stream=1)
        else:
            token = context.sampler.token(logits, prefix)
        prefix.append(token)
        drafted.append(token)
        pending = [token]
    return Draft.chain(drafted, np.stack(laws) if laws else None)


def _sound(rows: Rows, position: int) -> Floats:
    """The logits of a pass of one wanted row; a head that rounds its input would turn NaN into some number."""
    if rows.hidden is not None and not np.isfinite(rows.hidden[-1]).all():
        raise NumericError(f"the draft model computed NaN or infinity at position {position}: export it again")
    logits: Floats = rows.logits[0]
    return logits
