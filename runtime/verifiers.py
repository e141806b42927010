"""Which drafted nodes stand. Each verifier walks from the root down, testing siblings in the order they were drawn.

Only rows on the accepted path are turned into laws. The arithmetic works on any number type:
float64 at run time, Fractions where the tests enumerate every outcome.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from specedge.runtime.contracts import Context, Draft, Floats, Law, Verdict, Verifier
from specedge.runtime.options import Options

__all__ = ["Exact", "Greedy", "Rejection", "Typical", "verifier_for"]

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


class Typical:
    """Takes what the target finds likely enough: p(x) > min(epsilon, delta * exp(-H(p))). Not lossless.

    Typical acceptance (Medusa, arXiv 2401.10774, section 2.3.1). The longest accepted path wins, of
    equally long ones the likeliest. The paper always takes the first token, which the target draws
    itself: that is the token at the end of the round before, so that here every node is tested.

    Args:
        epsilon: A token this likely always stands.
        delta: The flatter the law, the less is asked.
    """

    name = "typical"
    lossless = False

    def __init__(self, epsilon: float, delta: float) -> None:
        self._epsilon, self._delta = epsilon, delta

    def judge(self, draft: Draft, logits: Floats, context: Context) -> Verdict:
        """See `contracts.Verifier`."""
        sampler, tested = context.sampler, 0
        best: tuple[int, float, tuple[int, ...]] = (0, 0.0, ())
        waiting: list[tuple[int, float, tuple[int, ...]]] = [(-1, 0.0, ())]
        while waiting:
            node, score, path = waiting.pop()
            children = draft.children(node)
            if not children:
                continue
            law = sampler.law(logits[node + 1], [*context.tokens, *(draft.tokens[each] for each in path)])
            bound = min(self._epsilon, self._delta * math.exp(-entropy(law)))
            for child in children:
                tested += 1
                probability = float(law[draft.tokens[child]])
                if probability > bound:
                    found = (child, score + math.log(probability), (*path, child))
                    waiting.append(found)
                    best = max(best, (len(found[2]), found[1], found[2]), key=lambda each: each[:2])
        path = best[2]
        last = path[-1] if path else -1
        prefix = [*context.tokens, *(draft.tokens[node] for node in path)]
        return Verdict(path, sampler.token(logits[last + 1], prefix), tested)


def entropy(law: Law) -> float:
    """Entropy of a law, in nats."""
    positive = law[law > 0].astype(float)
    return float(-(positive * np.log(positive)).sum())


def verifier_for(options: Options) -> Verifier:
    """The verifier that a reply's options ask for; at temperature 0 every one is greedy, and lossless."""
    if options.greedy:
        return Greedy()
    if options.accept == "typical":
        return Typical(options.typical_epsilon, options.typical_delta)
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
