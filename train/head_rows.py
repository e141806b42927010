"""Rows of answers as batches: what heads read, and the tokens they should have guessed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from specedge.runtime.errors import UsageError
from specedge.train.shards import Rows

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["HELD_OUT", "Batch", "HeadRows", "frequent_tokens", "held_out"]

_SEGMENT = 32
HELD_OUT = 20


def frequent_tokens(tokens: Sequence[Tensor], count: int, vocab_size: int) -> Tensor:
    """Ids of the most frequent tokens, ascending; among equals the lower ids, which a tokenizer learnt earlier.

    Args:
        tokens: What to count.
        count: How many ids; 0: all.
        vocab_size: How many there are.
    """
    if not count or count >= vocab_size:
        return torch.arange(vocab_size)
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for part in tokens:
        counts += torch.bincount(part, minlength=vocab_size)
    order = np.lexsort((np.arange(vocab_size), -counts.numpy()))
    return torch.from_numpy(np.sort(order[:count]))


@dataclass(frozen=True)
class Batch:
    """n rows.

    Attributes:
        hidden: float32 [n, hidden_size].
        inner: float32 [n, taps * hidden_size], or None.
        before: For each head int64 [n], the token before the one it guesses, as a place; -1: never guessed.
        wanted: For each head int64 [n], the token it should guess, as a place; -1: never guessed, or beyond the end.
        whole: bool [n], whether the answer goes on for as many tokens as there are heads.
        deciding: float32 [m, hidden_size], the target's rows that decided the tokens which heads should guess.
        decided: For each head int64 [n], which of these; -1: beyond the end.
    """

    hidden: Tensor
    inner: Tensor | None
    before: Sequence[Tensor]
    wanted: Sequence[Tensor]
    whole: Tensor
    deciding: Tensor
    decided: Sequence[Tensor]


class HeadRows:
    """Rows to train on, and rows held out.

    Args:
        rows: All of them.
        prompts: Answers whose numbers have one remainder by this are of one prompt: they are held out together.
        heads: How many heads there are.
        guessed: Ids of the guessed tokens, ascending.
        vocab_size: Of the target.
        device: Where batches go.

    Attributes:
        train_tokens, held_out_tokens: How many rows there are of each.
    """

    def __init__(
        self, rows: Rows, prompts: int, heads: int, guessed: Tensor, vocab_size: int, device: torch.device | str = "cpu"
    ) -> None:
        self._rows, self._heads, self._device = rows, heads, device
        places = torch.full((vocab_size,), -1)
        places[guessed] = torch.arange(len(guessed))
        self._places = places[rows.tokens]
        held = held_out(rows.numbers, prompts)
        starts = torch.nonzero(torch.cat([torch.tensor([True]), rows.numbers[1:] != rows.numbers[:-1]])).flatten()
        bounds = [*starts.tolist(), len(rows)]
        self._train: list[tuple[int, int, int]] = []
        self._held_out: list[tuple[int, int, int]] = []
        for first, last in itertools.pairwise(bounds):
            kind = self._held_out if held[first] else self._train
            kind += [(start, min(start + _SEGMENT, last), last) for start in range(first, last, _SEGMENT)]
        self.held_out_tokens = int(held.sum())
        self.train_tokens = len(rows) - self.held_out_tokens

    def check(self) -> None:
        """Sees that there is something to train on, and to measure on, before either.

        Raises:
            UsageError: There is not.
        """
        measured = any(last - first > self._heads for first, _, last in self._held_out)
        if not self._train or not measured:
            raise UsageError(
                f"{self.train_tokens} tokens to train on and {self.held_out_tokens} held out, where answers have to be "
                f"longer than {self._heads}: too few to train heads; give more prompts (20 or more), or longer answers"
            )

    def steps(self, epochs: float, segments: int, processes: int = 1) -> int:
        """Steps that so many epochs take, at so many segments a step and process."""
        return max(1, int(len(self._train) * epochs / (segments * processes)))

    def batch(self, step: int, segments: int, seed: int, share: tuple[int, int] = (0, 1)) -> Batch:
        """The batch of a step: pieces of answers, every one once an epoch, in an order that seed and epoch give."""
        rank, processes = share
        total = segments * processes
        chosen = []
        for number in range(step * total + rank * segments, step * total + (rank + 1) * segments):
            epoch, place = divmod(number, len(self._train))
            chosen.append(self._train[int(self._order(epoch, seed)[place])])
        return self._batch(chosen)

    def held_out(self, segments: int = 16) -> Iterator[Batch]:
        """The rows held out."""
        for first in range(0, len(self._held_out), segments):
            yield self._batch(self._held_out[first : first + segments])

    def _order(self, epoch: int, seed: int) -> np.ndarray:
        if getattr(self, "_epoch", None) != (epoch, seed):
            self._epoch = (epoch, seed)
            self._permutation = np.random.default_rng([seed, epoch]).permutation(len(self._train))
        return self._permutation

    def _batch(self, segments: Sequence[tuple[int, int, int]]) -> Batch:
        rows = torch.cat([torch.arange(first, last) for first, last, _ in segments])
        ends = torch.cat([torch.full((last - first,), end) for first, last, end in segments])
        before, wanted, decided = [], [], []
        # Neighbouring rows wait for the same tokens: each deciding row is there once.
        coming = [(first, range(first + 1, min(last + self._heads, end))) for first, last, end in segments]
        starts = np.cumsum([0, *(len(span) for _, span in coming)])
        offsets = torch.cat(
            [
                torch.full((last - first,), int(start) - first - 1)
                for (first, last, _), start in zip(segments, starts[:-1], strict=True)
            ]
        )
        for head in range(1, self._heads + 1):
            inside = rows + head < ends
            token = self._places[(rows + head).clamp_max(len(self._rows) - 1)]
            wanted.append(torch.where(inside, token, -1).to(self._device))
            decided.append(torch.where(inside, rows + head + offsets, -1).to(self._device))
            before.append(self._places[(rows + head - 1).clamp_max(len(self._rows) - 1)].to(self._device))
        inner = None if self._rows.inner is None else self._rows.inner[rows].to(self._device).float()
        hidden = self._rows.hidden[rows].to(self._device).float()
        later = torch.tensor([row for _, span in coming for row in span], dtype=torch.long)
        deciding = self._rows.hidden[later].to(self._device).float()
        return Batch(hidden, inner, before, wanted, rows + self._heads < ends, deciding, decided)


def held_out(numbers: Tensor, prompts: int) -> Tensor:
    """Whether answers are held out: those to every twentieth prompt."""
    return numbers % prompts % HELD_OUT == 0
