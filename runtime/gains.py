"""How many drafted tokens will stand, by drafter and draft length, learnt while replies run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specedge.runtime.contracts import Round

__all__ = ["GUESSED", "MEASURED", "ChainGain", "Gain", "TreeGain"]

_KEPT = 0.97
_UNTESTED = 0.02
GUESSED, MEASURED = 3.0, 8.0
"""As how many tested nodes it counts what is expected before any was seen."""

_DEEPEST = 64


class ChainGain:
    """A chain's gain: for each depth the share of nodes that stand where all before them stood.

    A moving average, with a memory of about thirty nodes a depth; a depth that was never seen, or not for long, is
    taken to be like the one before it. What was expected before is forgotten like what is seen.

    Args:
        prior: The share at depth 1 before anything was seen, or one for each depth.
        most: Longest draft that the drafter can make.
        trust: As how many tested nodes of each depth the prior counts.
    """

    def __init__(self, prior: float | Sequence[float], most: int = _DEEPEST, trust: float = GUESSED) -> None:
        self._prior = list(prior) if isinstance(prior, Sequence) else [prior]
        assert self._prior
        self.most, self._trust = most, trust
        self._stood: list[float] = []
        self._tested: list[float] = []

    def expected(self, most: int, hope: float = 0.0) -> list[float]:
        """Expected accepted tokens with drafts of 0, 1, … `most` tokens.

        Args:
            most: Longest draft.
            hope: So many standard errors above what was seen.
        """
        sums, survives, before = [0.0], 1.0, 0.0
        for depth in range(min(most, self.most)):
            before = self._share(depth, before)
            error = math.sqrt(
                before * (1 - before) / (self._tested[depth] if depth < len(self._tested) else self._trust)
            )
            survives *= min(before + hope * error, 1.0)
            sums.append(sums[-1] + survives)
        return sums

    def record(self, outcome: Round) -> None:
        """Learns from a round."""
        nodes, accepted, before = len(outcome.draft.tokens), outcome.accepted, 0.0
        for depth in range(min(nodes, accepted + 1, _DEEPEST)):
            if depth == len(self._stood):
                self._stood.append(self._trust * self._share(depth, before))
                self._tested.append(self._trust)
            self._stood[depth] = _KEPT * self._stood[depth] + (depth < accepted)
            self._tested[depth] = _KEPT * self._tested[depth] + 1
            before = self._share(depth, before)
        for depth in range(max(nodes, 1), len(self._stood)):  # drafts are too short to show these by now
            self._forget(depth, _UNTESTED, self._share(depth - 1, 0.0))

    def fade(self, share: float) -> None:
        """Forgets this share of what was seen, for what was expected before."""
        for depth in range(len(self._stood)):
            self._forget(depth, share, self._expected(depth))

    def _forget(self, depth: int, share: float, expected: float) -> None:
        self._stood[depth] += share * (self._trust * expected - self._stood[depth])
        self._tested[depth] += share * (self._trust - self._tested[depth])

    def _share(self, depth: int, before: float) -> float:
        if depth < len(self._stood):
            return self._stood[depth] / self._tested[depth]
        # What this reply shows of the depth before says more of an unseen depth than a prior of another depth does.
        return self._prior[depth] if depth < len(self._prior) else before

    def _expected(self, depth: int) -> float:
        """The share before anything was seen."""
        return self._prior[min(depth, len(self._prior) - 1)]


class TreeGain:
    """A tree's gain: what a calibration expects of so many nodes, times how far it was right lately.

    Args:
        values: How often each node was on the right path, in the order in which a budget takes them.
    """

    def __init__(self, values: Sequence[float]) -> None:
        self._sums = [0.0]
        for value in values:
            self._sums.append(self._sums[-1] + value)
        self.most = len(values)
        self._stood = self._foreseen = MEASURED

    def expected(self, most: int, hope: float = 0.0) -> list[float]:
        """See `ChainGain`."""
        factor = (self._stood + hope * math.sqrt(self._stood)) / self._foreseen
        return [min(factor * each, float(nodes)) for nodes, each in enumerate(self._sums[: most + 1])]

    def record(self, outcome: Round) -> None:
        """See `ChainGain`."""
        nodes = min(len(outcome.draft.tokens), self.most)
        if nodes:
            self._stood = _KEPT * self._stood + outcome.accepted
            self._foreseen = _KEPT * self._foreseen + self._sums[nodes]

    def fade(self, share: float) -> None:
        """See `ChainGain`."""
        self._stood += share * (MEASURED - self._stood)
        self._foreseen += share * (MEASURED - self._foreseen)


Gain = ChainGain | TreeGain
