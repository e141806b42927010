"""Drafts a token tree with heads that read the target's last row (Medusa, arXiv 2401.10774)."""

from __future__ import annotations

import numpy as np

from specedge.runtime.contracts import EMPTY_DRAFT, Context, Draft, Law, Verdict
from specedge.runtime.drafters.tree import Tree, grow
from specedge.runtime.heads import HeadsGraph

__all__ = ["MedusaDrafter"]


class MedusaDrafter:
    """Drafts with heads.

    Args:
        name: "medusa", or "medusa:2x3".
        heads: Their graph.
        tree: Which of their guesses are drafted; None: those that are likeliest to stand, row by row.
        chain: In that case, only the likeliest guess of each head.
        sample: Draw a chain from the heads' own laws and say so, for a verifier that weighs them;
            may be set between replies.
    """

    def __init__(
        self, name: str, heads: HeadsGraph, tree: Tree | None = None, sample: bool = False, *, chain: bool = False
    ) -> None:
        self.name, self.sample = name, sample
        self.model = heads
        self._tree, self._chain = tree, chain

    def propose(self, context: Context, budget: int) -> Draft:
        """See `contracts.Drafter`. Without the target's rows (a reply's first round) there is no draft."""
        if context.rows is None or budget < 1:
            return EMPTY_DRAFT
        if self.sample:
            return self._sampled(context, budget)
        guesses = self.model.run(context.rows, context.tokens[-1]).tolist()
        if self._tree is not None:
            return self._tree.draft(guesses, budget)
        return grow(guesses, self.model.chances.tolist(), budget, context.least, chain=self._chain)

    def observe(self, context: Context, verdict: Verdict) -> None:
        """See `contracts.Drafter`; there is nothing to keep."""

    def rewind(self, length: int) -> None:
        """See `contracts.Drafter`; there is nothing to rewind."""

    def close(self) -> None:
        """Frees the graph."""
        self.model.close()

    def _sampled(self, context: Context, budget: int) -> Draft:
        """A chain drawn from the heads' laws, each at the reply's temperature and truncation."""
        assert context.rows is not None
        prefix = list(context.tokens)
        laws: list[Law] = []
        for logits in self.model.logits(context.rows, prefix[-1])[:budget]:
            laws.append(context.sampler.law(logits, prefix))
            prefix.append(context.sampler.draw(laws[-1], len(prefix), stream=1))
        return Draft.chain(prefix[len(context.tokens) :], np.stack(laws))
