"""Two drafters in one tree: what heads guess, and what stood in the text before.

Heads see one row and cannot copy; a lookup copies and cannot guess. Where the text repeats itself
the copied chain goes into the tree beside the heads' nodes, all the deeper where their first guess
is its first token; elsewhere the tree is the heads' alone.
"""

from __future__ import annotations

from specedge.runtime.contracts import Context, Draft, Drafter, Verdict
from specedge.runtime.drafters.medusa import MedusaDrafter
from specedge.runtime.drafters.ngram import NgramDrafter

__all__ = ["MergedDrafter", "merge"]


class MergedDrafter:
    """Heads and prompt lookup.

    Args:
        name: "medusa+ngram".
        heads: Guesses.
        lookup: Copies.
        trees: Whether both go into a tree; else what is copied goes first, and heads draft where nothing is.
    """

    def __init__(self, name: str, heads: MedusaDrafter, lookup: NgramDrafter, *, trees: bool = True) -> None:
        self.name, self._trees = name, trees
        self.model = heads.model
        self._heads, self._lookup = heads, lookup
        self._both: tuple[Drafter, ...] = (heads, lookup)

    @property
    def sample(self) -> bool:
        """See `contracts.SamplingDrafter`: a draft that comes with its laws is the heads' alone."""
        return self._heads.sample

    @sample.setter
    def sample(self, value: bool) -> None:
        self._heads.sample = value

    def propose(self, context: Context, budget: int) -> Draft:
        """See `contracts.Drafter`."""
        if self.sample or context.rows is None or budget < 1:
            return self._heads.propose(context, budget)
        copied = self._lookup.propose(context, budget)
        if copied.tokens and not self._trees:
            return copied
        guessed = self._heads.propose(context, budget)
        return merge(guessed, copied.tokens, budget) if copied.tokens else guessed

    def observe(self, context: Context, verdict: Verdict) -> None:
        """See `contracts.Drafter`."""
        for drafter in self._both:
            drafter.observe(context, verdict)

    def rewind(self, length: int) -> None:
        """See `contracts.Drafter`."""
        for drafter in self._both:
            drafter.rewind(length)

    def close(self) -> None:
        """Frees the heads."""
        self._heads.close()


def merge(tree: Draft, chain: tuple[int, ...], budget: int) -> Draft:
    """A tree with a chain in it, of at most `budget` nodes.

    The chain takes half of the budget, and all but a node of it where it begins with the tree's first
    node; the tree's nodes follow in their order. What both have is there once.
    """
    share = budget - 1 if chain[:1] == tree.tokens[:1] else (budget + 1) // 2
    chain = chain[: max(share, 1)]
    tokens, parents = list(chain), list(range(-1, len(chain) - 1))
    places = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    found: dict[int, int] = {-1: -1}
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if parent not in found:
            continue
        key = (found[parent], token)
        if key not in places:
            if len(tokens) >= budget:
                continue
            places[key] = len(tokens)
            tokens.append(token)
            parents.append(key[0])
        found[node] = places[key]
    return Draft(tuple(tokens), tuple(parents))
