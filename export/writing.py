"""Text that a target writes: many sequences side by side in one pass and one cache.

A row of the cache belongs to one sequence, and the attention bias hides it from all others; what
all begin with stands there once, for all to see. So a pass reads the weights once for all
sequences, which at the one row a pass of plain decoding is what its time goes to. Sequences take
turns: where one ends, the next begins; the rows of those that ended are taken out of the cache now
and then, as rows that nobody sees cost time all the same.

A chat model is made to write the question as well (Magpie, Xu et al. 2024, arXiv:2406.08464): given
the header that its chat template puts before a user's words, it goes on with a question, and
answers it after the header of the assistant. No data set is needed.

Each sequence draws from a generator of its own, so its text depends on the seed and its number,
not on what else is written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specedge.export.texts import Text
from specedge.runtime.contracts import Floats
from specedge.runtime.errors import NumericError, UsageError
from specedge.runtime.graph import Decoder

__all__ = ["Counter", "answer_prompts", "write_texts"]

Counter = Callable[[int, int], None]
"""Told how many tokens are written, of how many at most."""

_SIDE_BY_SIDE = 16
_PASS_ROWS = 256
_ALL = -1  # whose the prefix is
_DENSE = 0.75  # less than that share of the cache's rows is seen: the others are taken out
_QUESTION = 3  # a question takes at most a third of its text


def write_texts(
    target: Decoder,
    *,
    count: int,
    length: int,
    starts: Sequence[Sequence[int]],
    temperature: float = 1.0,
    seed: int = 0,
    ends: Collection[int] = (),
    reply: Sequence[int] = (),
    tokens: int | None = None,
    progress: Counter | None = None,
) -> list[Text]:
    """Lets a target write texts of its own.

    Args:
        target: The model; its cache is emptied, before and after.
        count: Texts to write, at most.
        length: Most tokens of a text, those given included.
        starts: What the texts begin with, in turn: a begin-of-text token, or a user's header.
        temperature: Of sampling from the whole law; 0 takes the likeliest token.
        seed: Of the samples.
        ends: Tokens that end a text.
        reply: What stands between question and answer of a chat, its first token the one that ends the question;
            (): texts have no question.
        tokens: Begin no more texts when those that were begun may come to so many tokens.
        progress: Told of tokens written.

    Returns:
        The texts; question and `reply` are part of the prompt.

    Raises:
        UsageError: A start is empty, or leaves no room for a text.
        NumericError: The target computes NaN or infinity.
    """
    _check(target, starts, length, temperature, len(reply) + 2 * bool(reply))
    rows = _Rows(target, _shared(starts), frozenset(ends), temperature)
    sequences = (
        _Sequence(
            number, list(starts[number % len(starts)]), length, _generator(seed, number), list(reply), rows.shared
        )
        for number in range(count)
    )
    most = count * length if tokens is None else min(tokens, count * length)
    done = _side_by_side(rows, sequences, most, progress)
    return [Text(tuple(each.tokens[: each.given]), tuple(each.tokens[each.given :])) for each in done]


def answer_prompts(
    target: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    length: int,
    ends: Collection[int],
    temperature: float = 0.0,
    seed: int = 0,
    progress: Counter | None = None,
) -> list[Text]:
    """Lets a target answer prompts.

    Args:
        target: The model; its cache is emptied, before and after.
        prompts: Token ids of each prompt, up to where the assistant begins to speak.
        length: Most tokens of an answer.
        ends: Tokens that end an answer; the end is part of it.
        temperature: Of sampling from the whole law; 0 takes the likeliest token.
        seed: Of the samples.
        progress: Told of tokens written.

    Returns:
        Prompts and answers, in order.

    Raises:
        UsageError: A prompt is empty, or leaves no room for its answer.
        NumericError: The target computes NaN or infinity.
    """
    for number, prompt in enumerate(prompts, start=1):
        _check(target, [prompt], len(prompt) + length, temperature, 0, f"prompt {number}")
    rows = _Rows(target, _shared(prompts), frozenset(ends), temperature)
    sequences = (
        _Sequence(number, list(prompt), len(prompt) + length, _generator(seed, number), [], rows.shared)
        for number, prompt in enumerate(prompts)
    )
    most = sum(map(len, prompts)) + length * len(prompts)
    done = _side_by_side(rows, sequences, most, progress)
    return [Text(tuple(each.tokens[: each.given]), tuple(each.tokens[each.given :])) for each in done]


@dataclass
class _Sequence:
    """One text that is being written.

    Attributes:
        number: Which one it is; the generator's and the place in the result.
        tokens: All of it so far.
        length: Most tokens it may have.
        generator: Draws its tokens.
        reply: What follows the question that it still writes; []: it writes its answer.
        run: Tokens that are in the cache.
        given: Tokens before the answer.
        ended: Nothing is to be added.
    """

    number: int
    tokens: list[int]
    length: int
    generator: np.random.Generator
    reply: list[int]
    run: int
    given: int = field(init=False)
    ended: bool = False

    def __post_init__(self) -> None:
        self._start = self.given = len(self.tokens)

    @property
    def room(self) -> int:
        """Rows of the cache that it may still take."""
        return self.length - self.run

    def extend(self, token: int, ends: Collection[int]) -> None:
        """Takes a token that the target wrote."""
        if not self.reply:
            self.tokens.append(token)
            self.ended = token in ends or len(self.tokens) == self.length
            return
        if token not in ends:
            self.tokens.append(token)
            written = len(self.tokens) - self._start
            if written < max(1, (self.length - self._start - len(self.reply)) // _QUESTION):
                return
        self.tokens.extend(self.reply)
        self.reply, self.given = [], len(self.tokens)


class _Rows:
    """The target's cache, and which sequence each row of it belongs to."""

    def __init__(self, target: Decoder, prefix: Sequence[int], ends: Collection[int], temperature: float) -> None:
        """Begins with a prefix that belongs to all sequences."""
        self.target = target
        self.shared = len(prefix)
        self._ends = ends
        self._temperature = temperature
        self._owner = np.full(target.capacity, _ALL)
        target.rewind(0)
        if prefix:
            target.forward(prefix)

    def drop_others(self, sequences: Sequence[_Sequence]) -> None:
        """Takes the rows of all but these sequences out of the cache, where they are many or room is short."""
        total, live = self.target.length, self.shared + sum(each.run - self.shared for each in sequences)
        if live < total and (live < _DENSE * total or total + _PASS_ROWS > self.target.capacity):
            owner = self._owner[:total]
            rows = np.flatnonzero(np.isin(owner, [_ALL, *(each.number for each in sequences)]))
            self._owner[: len(rows)] = owner[rows]
            self.target.keep(rows.tolist())

    def step(self, sequences: Sequence[_Sequence]) -> int:
        """Runs what is pending of the sequences, as far as one pass goes, and draws a token for each that was run.

        Returns:
            Tokens that were drawn.
        """
        start, limit = self.target.length, min(_PASS_ROWS, self.target.capacity - 1)
        tokens: list[int] = []
        positions: list[int] = []
        wanted: list[tuple[_Sequence, int]] = []
        for each in sequences:
            pending = each.tokens[each.run : each.run + limit - len(tokens)]
            self._owner[start + len(tokens) : start + len(tokens) + len(pending)] = each.number
            tokens.extend(pending)
            positions.extend(range(each.run, each.run + len(pending)))
            each.run += len(pending)
            if pending and each.run == len(each.tokens):
                wanted.append((each, len(tokens) - 1))
        logits = self.target.forward_apart(
            tokens, positions, self._sees(start, len(tokens)), [row for _, row in wanted]
        )
        if not np.isfinite(logits).all():
            raise NumericError("the target computes NaN or infinity while it writes; export it in another precision")
        for (each, _), row in zip(wanted, logits, strict=True):
            each.extend(_draw(row, self._temperature, each.generator), self._ends)
        return len(wanted)

    def _sees(self, start: int, rows: int) -> NDArray[np.bool_]:
        """[rows, start + rows]: the prefix, and rows of the same sequence up to itself."""
        total = start + rows
        whose, owner = self._owner[start:total, None], self._owner[None, :total]
        sees: NDArray[np.bool_] = ((owner == whose) | (owner == _ALL)) & np.tri(rows, total, start, dtype=np.bool_)
        return sees


def _side_by_side(rows: _Rows, sequences: Iterator[_Sequence], most: int, progress: Counter | None) -> list[_Sequence]:
    """Runs sequences to their ends; begins none once those begun may come to `most` tokens."""
    done: list[_Sequence] = []
    running: list[_Sequence] = []
    waiting = next(sequences, None)
    finished = 0  # tokens of sequences that ended
    while waiting is not None or running:
        while waiting is not None and len(running) < _SIDE_BY_SIDE:
            if finished + sum(each.length for each in running) >= most:
                waiting = None
                break
            if rows.shared + sum(each.length - rows.shared for each in [*running, waiting]) > rows.target.capacity:
                break
            running.append(waiting)
            waiting = next(sequences, None)
        if running:
            rows.step(running)
            ended = [each for each in running if each.ended]
            running = [each for each in running if not each.ended]
            done.extend(ended)
            finished += sum(len(each.tokens) for each in ended)
            rows.drop_others(running)
            if progress is not None:
                progress(min(finished + sum(len(each.tokens) for each in running), most), most)
    return sorted(done, key=lambda each: each.number)


def _draw(logits: Floats, temperature: float, generator: np.random.Generator) -> int:
    """A token of the law softmax(logits / temperature), drawn by the inverse of its distribution function."""
    if temperature == 0:
        return int(logits.argmax())
    scaled = (logits - logits.max()).astype(np.float64) / temperature
    sums = np.cumsum(np.exp(scaled))
    return int(np.searchsorted(sums, generator.random() * sums[-1], side="right"))


def _shared(starts: Sequence[Sequence[int]]) -> Sequence[int]:
    """What all begin with, but for the last token of each, whose row gives the next one."""
    ordered = sorted(map(tuple, starts))
    first, last = (ordered[0], ordered[-1]) if ordered else ((), ())
    limit = min(map(len, starts), default=1) - 1
    same = next((place for place in range(limit) if first[place] != last[place]), limit)
    return first[:same]


def _generator(seed: int, number: int) -> np.random.Generator:
    return np.random.default_rng([seed, number])


def _check(
    target: Decoder,
    starts: Sequence[Sequence[int]],
    length: int,
    temperature: float,
    further: int,
    what: str = "a text's start",
) -> None:
    if not np.isfinite(temperature) or temperature < 0:
        raise UsageError(f"temperature is {temperature}: give 0 or more")
    if length > target.capacity - 1:
        raise UsageError(f"{what}: {length} tokens with what follows, where {target.capacity - 1} fit; shorten it")
    for start in starts:
        if not start:
            raise UsageError(f"{what} is empty: give at least a token")
        if len(start) + further >= length:
            raise UsageError(f"{what} has {len(start)} tokens, which leaves no room for a text of {length}")
