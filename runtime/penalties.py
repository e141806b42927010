"""Penalties on the logits of tokens that a row has seen, on the row's own path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specedge.runtime.options import Options

__all__ = ["Penalties"]

Doubles = NDArray[np.float64]


class Penalties:
    """Repetition, presence and frequency penalties, and no-repeat-n-gram.

    The result depends on the logits and the prefix alone. What is kept between calls is a
    copy of the last prefix as an array, because the rows of a round share nearly all of theirs.

    Args:
        options: Says which penalties apply and how strongly.
        prompt_length: Tokens of a prefix from here on are the reply's own.
    """

    def __init__(self, options: Options, prompt_length: int) -> None:
        self._options = options
        self._prompt_length = prompt_length
        self._known: list[int] = []
        self._ids = np.zeros(256, np.int64)
        self.active = (
            options.repetition_penalty != 1.0
            or options.presence_penalty != 0.0
            or options.frequency_penalty != 0.0
            or options.no_repeat_ngram > 0
        )

    def apply(self, logits: NDArray[Any], prefix: Sequence[int]) -> Doubles:
        """Penalised logits, in the order of Hugging Face `generate` and vLLM.

        Args:
            logits: [vocab], of the token that follows `prefix`; left as they are.
            prefix: Every token before it, prompt first.

        Returns:
            [vocab] float64.
        """
        result = logits.astype(np.float64)
        ids = self._array(prefix)
        vocabulary = len(result)
        options = self._options
        if options.repetition_penalty != 1.0:
            # A token seen twice is written twice with one value: the penalty does not add up.
            seen = ids[ids < vocabulary]
            score = result[seen]
            result[seen] = np.where(score < 0, score * options.repetition_penalty, score / options.repetition_penalty)
        if options.presence_penalty or options.frequency_penalty:
            reply = ids[self._prompt_length :]
            tokens, counts = np.unique(reply[reply < vocabulary], return_counts=True)
            result[tokens] -= options.frequency_penalty * counts + options.presence_penalty
        if options.no_repeat_ngram:
            banned = _followers(ids, options.no_repeat_ngram)
            result[banned[banned < vocabulary]] = -np.inf
        return result

    def _array(self, prefix: Sequence[int]) -> NDArray[np.int64]:
        """The prefix as an array; only what differs from the last call's is converted."""
        tokens = prefix if isinstance(prefix, list) else list(prefix)
        same, step = min(len(tokens), len(self._known)), 16
        while same and tokens[:same] != self._known[:same]:
            same, step = max(0, same - step), step * 2
        self._known[same:] = tokens[same:]
        if len(tokens) > len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros(len(tokens), np.int64)])
        self._ids[same : len(tokens)] = tokens[same:]
        return self._ids[: len(tokens)]


def _followers(ids: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Tokens that would complete an n-gram of this length that `ids` holds already."""
    ends = len(ids) - length + 1  # how many n-grams there are
    if ends <= 0:
        return ids[:0]
    match = np.ones(ends, bool)
    for offset in range(length - 1):
        match &= ids[offset : offset + ends] == ids[ends + offset]
    return ids[length - 1 :][match]
