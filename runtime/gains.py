"""How many drafted tokens will stand, by drafter and draft length, learnt while replies run."""

from __future__ import annotations

from collections.abc import Sequence

from specedge.runtime.contracts import Round

__all__ = ["ChainGain", "Gain", "TreeGain"]

_KEPT = 0.97
_TRUST = 3.0
_DEEPEST = 64


class ChainGain:
    """A chain's gain: for each depth the share of nodes that stand where all before them stood.

    A moving average, with a memory of about thirty nodes a depth; a depth that was never seen is
    taken to be like the one before it.

    Args:
        prior: The share at depth 1 before anything was seen, or one for each depth.
        most: Longest draft that the drafter can make.
    """

    def __init__(self, prior: float | Sequence[float], most: int = _DEEPEST) -> None:
        self._prior = list(prior) if isinstance(prior, Sequence) else [prior]
        self.most = most
        self._stood: list[float] = []
        self._tested: list[float] = []

    def expected(self, most: int) -> list[float]:
        """Expected accepted tokens with drafts of 0, 1, … `most` tokens."""
        sums, survives, before = [0.0], 1.0, 0.0
        for depth in range(min(most, self.most)):
            before = self._share(depth, before)
            survives *= before
            sums.append(sums[-1] + survives)
        return sums

    def record(self, outcome: Round) -> None:
        """Learns from a round."""
        nodes, accepted = len(outcome.draft.tokens), outcome.accepted
        for depth in range(min(nodes, accepted + 1, _DEEPEST)):
            if depth == len(self._stood):
                self._stood.append(0.0)
                self._tested.append(0.0)
            self._stood[depth] = _KEPT * self._stood[depth] + (depth < accepted)
            self._tested[depth] = _KEPT * self._tested[depth] + 1

    def fade(self, share: float) -> None:
        """Forgets this share of what was seen."""
        self._stood = [(1 - share) * each for each in self._stood]
        self._tested = [(1 - share) * each for each in self._tested]

    def _share(self, depth: int, before: float) -> float:
        prior = self._prior[depth] if depth < len(self._prior) else before
        if depth >= len(self._stood):
            return prior
        # What this reply shows of the depth before says more of an unseen depth than the prior does.
        return (self._stood[depth] + _TRUST * prior) / (self._tested[depth] + _TRUST)


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
        self._stood = self._foreseen = 0.0

    def expected(self, most: int) -> list[float]:
        """See `ChainGain`."""
        factor = (self._stood + _TRUST) / (self._foreseen + _TRUST)
        return [min(factor * each, float(nodes)) for nodes, each in enumerate(self._sums[: most + 1])]

    def record(self, outcome: Round) -> None:
        """See `ChainGain`."""
        nodes = min(len(outcome.draft.tokens), self.most)
        if nodes:
            self._stood = _KEPT * self._stood + outcome.accepted
            self._foreseen = _KEPT * self._foreseen + self._sums[nodes]

    def fade(self, share: float) -> None:
        """See `ChainGain`."""
        self._stood *= 1 - share
        self._foreseen *= 1 - share


Gain = ChainGain | TreeGain
