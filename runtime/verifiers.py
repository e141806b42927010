"""Which drafted nodes stand. Each verifier walks from the root down, testing siblings in the order they were drawn.

Only rows on the accepted path are turned into laws. The arithmetic works on any number type:
float64 at run time, Fractions where the tests enumerate every outcome.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specedge.runtime.contracts import Context, Draft, Floats, Law, Verdict, Verifier
from specedge.runtime.options import Options

__all__ = ["Exact", "Greedy", "Rejection", "verifier_for"]

_REJECTION_STREAM = 2


class Exact:
    """Sample-match: the target draws its own token at every row; a node stands where it is that token.

    The text is what plain decoding gives for the same seed, whatever drafted it.
    """

    name = "exact"
    lossless = True

    def judge(self, draft: Draft, logits: Floats, context: Context) -> Verdict:
        """See `contracts.Verifier`."""
        prefix = list(context.tokens)
        path: list[int] = []
        node, evaluated = -1, 0
        while True:
            token = context.sampler.token(logits[node + 1], prefix)
            children = draft.children(node)
            match = next((i for i, child in enumerate(children) if draft.tokens[child] == token), None)
            if match is None:
                return Verdict(tuple(path), token, evaluated + len(children))
            evaluated += match + 1
            node = children[match]
            path.append(node)
            prefix.append(token)


class Greedy(Exact):
    """Sample-match at temperature 0, where the target's own token is its likeliest."""

    name = "greedy"


class Rejection:
    """Accepts a node with probability min(1, p / q), and draws from what q left over where all are rejected.

    Speculative sampling (arXiv 2211.17192) over trees (multi-step, arXiv 2305.09781): after a
    rejected sibling the target's law becomes norm(max(0, p - q)). A deterministic node has a
    one-hot q: it stands with probability p(x), and p(x) becomes 0 where it is rejected.
    """

    name = "rejection"
    lossless = True

    def judge(self, draft: Draft, logits: Floats, context: Context) -> Verdict:
        """See `contracts.Verifier`."""
        sampler = context.sampler
        prefix = list(context.tokens)
        path: list[int] = []
        node, evaluated = -1, 0
        while True:
            law = sampler.law(logits[node + 1], prefix)
            accepted = None
            for trial, child in enumerate(draft.children(node)):
                evaluated += 1
                q = _draft_law(draft, child, law)
                if sampler.accept(_ratio(law, q, draft.tokens[child]), len(prefix), trial):
                    accepted = child
                    break
                law = _residual(law, q)
            if accepted is None:
                return Verdict(tuple(path), sampler.draw(law, len(prefix), _REJECTION_STREAM), evaluated)
            node = accepted
            path.append(node)
            prefix.append(draft.tokens[node])


def verifier_for(options: Options) -> Verifier:
    """The verifier that a reply's options ask for."""
    if options.greedy:
        return Greedy()
    return Rejection() if options.accept == "rejection" else Exact()


def _draft_law(draft: Draft, node: int, law: Law) -> Law:
    """The law a node was drawn from, over the target's vocabulary; one-hot for a deterministic node."""
    token = draft.tokens[node]
    if draft.probs is not None:
        row = np.asarray(draft.probs[node])[: len(law)]
        if token < len(row) and row[token] > 0:  # else the row does not say where the token came from
            q = np.zeros_like(law)  # a draft's vocabulary may be narrower: 0 beyond it
            q[: len(row)] = row
            return q
    q = np.zeros_like(law)
    q[token] = 1
    return q


def _ratio(law: Law, q: Law, token: int) -> Any:
    """min(1, p / q) of a token."""
    return min(1, law[token] / q[token])


def _residual(law: Law, q: Law) -> Law:
    """norm(max(0, p - q)); p itself where rounding leaves nothing of it."""
    rest = np.maximum(law - q, 0)
    total = rest.sum()
    return rest / total if total > 0 else law
