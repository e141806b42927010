"""Prompt lookup: what followed the last few tokens the last time they stood in the text."""

from __future__ import annotations

from bisect import bisect_right

from specedge.runtime.contracts import EMPTY_DRAFT, Context, Draft, Verdict

__all__ = ["NgramDrafter"]


class NgramDrafter:
    """Drafts by copying (prompt lookup decoding: https://github.com/apoorvumang/prompt-lookup-decoding).

    An index maps every n-gram of the committed tokens to where it was followed; it grows by a
    token at a time, so that a round costs the same however long the text is.

    Args:
        max_ngram: Longest suffix looked up; it is tried first.
        min_ngram: Shortest suffix looked up.

    Attributes:
        matched: Length of the suffix that the last draft was found by; 0: there was none.
    """

    name = "ngram"

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"n-grams of {min_ngram} to {max_ngram} tokens are no range")
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self.matched = 0
        self._tokens: list[int] = []
        self._followers: dict[tuple[int, ...], list[int]] = {}  # n-gram -> positions after it, ascending

    def propose(self, context: Context, budget: int) -> Draft:
        """See `contracts.Drafter`. Of several matches, the most recent one that fills the budget is copied."""
        self._follow(context)
        tokens, length = self._tokens, len(self._tokens)
        for size in self._sizes:
            if budget < 1 or size >= length:
                continue
            positions = self._followers[tuple(tokens[-size:])]
            start = positions[max(bisect_right(positions, length - budget) - 1, 0)]
            if start < length:  # the suffix itself is in the index too, with nothing after it
                self.matched = size
                return Draft.chain(tokens[start : start + budget])
        self.matched = 0
        return EMPTY_DRAFT

    def observe(self, context: Context, verdict: Verdict) -> None:
        """See `contracts.Drafter`."""
        self._follow(context)

    def rewind(self, length: int) -> None:
        """See `contracts.Drafter`."""
        while len(self._tokens) > length:
            for ngram in self._ngrams():
                positions = self._followers[ngram]
                positions.pop()
                if not positions:
                    del self._followers[ngram]
            self._tokens.pop()

    def _follow(self, context: Context) -> None:
        """Brings the index to the committed tokens."""
        tokens = context.tokens
        self.rewind(len(tokens))
        if self._tokens and self._tokens[-1] != tokens[len(self._tokens) - 1]:
            self.rewind(0)  # another text, and nobody said so
        for token in tokens[len(self._tokens) :]:
            self._tokens.append(token)
            for ngram in self._ngrams():
                self._followers.setdefault(ngram, []).append(len(self._tokens))

    def _ngrams(self) -> list[tuple[int, ...]]:
        """The n-grams that end with the newest token."""
        return [tuple(self._tokens[-size:]) for size in self._sizes if size <= len(self._tokens)]
