"""A draft that is the target itself in fewer bits, working in the target's own cache."""

from __future__ import annotations

from specedge.runtime.contracts import EMPTY_DRAFT, Context, Draft, Verdict
from specedge.runtime.drafters.model import draft_chain
from specedge.runtime.graph import Decoder

__all__ = ["SelfDrafter"]


class SelfDrafter:
    """Drafts a chain with a coarser copy of the target.

    It reads the target's keys and values, so it never runs a prompt and never catches up, and
    writes its own behind them, where the target's next pass puts the right ones. QuantSpec and
    QSpec (arXiv 2502.10424, 2410.11305) share weights or caches between draft and target likewise.

    Args:
        name: "draft:NAME".
        model: The coarser copy; its host is the target.
        sample: How to draft (see `ModelDrafter`); may be set between replies.
    """

    def __init__(self, name: str, model: Decoder, sample: bool = False) -> None:
        self.name = name
        self.sample = sample
        self.model = model

    def propose(self, context: Context, budget: int) -> Draft:
        """See `contracts.Drafter`. The target's cache holds all of the context but its newest token."""
        budget = min(budget, self.model.capacity - len(context.tokens) + 1)
        if budget < 1:
            return EMPTY_DRAFT
        self.model.follow(len(context.tokens) - 1)
        return draft_chain(self.model, context, budget, self.sample, [])

    def observe(self, context: Context, verdict: Verdict) -> None:
        """See `contracts.Drafter`; there is nothing to keep."""

    def rewind(self, length: int) -> None:
        """See `contracts.Drafter`; the cache is the target's to rewind."""

    def close(self) -> None:
        """Frees the model."""
        self.model.close()
