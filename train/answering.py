"""What a target answers, many questions at once, with the rows that heads are trained on.

Row i of an answer is the target's last row before the answer's token i: what is there when that
token is decided. So heads that draft behind token i read row i and, if they like, the token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from specedge.runtime.errors import NumericError
from specedge.train.target import BatchTarget, TargetRows

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Answer", "Question", "answer_questions"]


@dataclass(frozen=True)
class Question:
    """Something to answer.

    Attributes:
        number: Which one it is; of two with the same seed and number, the answers agree.
        prompt: Token ids, up to where the answer begins.
        length: Most tokens of its answer.
        answer: Its answer, where there is one already; (): the target writes it.
        temperature: Of sampling from the whole law; 0 takes the likeliest token.
    """

    number: int
    prompt: tuple[int, ...]
    length: int
    answer: tuple[int, ...] = ()
    temperature: float = 0.0


@dataclass(frozen=True)
class Answer:
    """A question's answer: n tokens, the end included, and the n rows before them."""

    question: Question
    tokens: tuple[int, ...]
    rows: TargetRows


@dataclass
class _Slot:
    question: Question
    generator: np.random.Generator
    tokens: list[int] = field(default_factory=list)
    rows: list[TargetRows] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens that stand before the newest."""
        return len(self.question.prompt) + len(self.tokens) - 1

    def take(self, token: int, row: TargetRows, ends: Collection[int]) -> bool:
        """Takes the next token and the row before it; whether the answer ends with it."""
        self.tokens.append(token)
        self.rows.append(row)
        return token in ends or len(self.tokens) == self.question.length

    def answer(self) -> Answer:
        return Answer(self.question, tuple(self.tokens), _stacked(self.rows))


def answer_questions(
    target: BatchTarget,
    questions: Iterable[Question],
    *,
    ends: Collection[int],
    seed: int = 0,
    progress: Callable[[int], None] = lambda _: None,
) -> Iterator[Answer]:
    """Lets a target answer questions; fastest where neighbours are of like length.

    Args:
        target: The model.
        questions: What to answer.
        ends: Tokens that end an answer.
        seed: Of the samples.
        progress: Told how many tokens were just written.

    Yields:
        Answers, in the order in which they end.

    Raises:
        NumericError: The target computes NaN or infinity.
    """
    import torch

    waiting = iter(questions)
    slots: list[_Slot] = []
    with torch.inference_mode():
        more = True
        while more or slots:
            while more and len(slots) < target.slots:
                question = next(waiting, None)
                if question is None:
                    more = False
                elif question.answer:
                    yield _given(target, len(slots), question)
                else:
                    slot = _Slot(question, np.random.default_rng([seed, question.number]))
                    rows = target.read(len(slots), question.prompt)
                    progress(1)
                    if _extend([slot], target, rows[slice(-1, None)], ends):
                        yield slot.answer()
                    else:
                        slots.append(slot)
            if not slots:
                continue
            rows = target.step([slot.tokens[-1] for slot in slots], [slot.length for slot in slots])
            progress(len(slots))
            for place in reversed(_extend(slots, target, rows, ends)):
                done, last = slots[place], slots.pop()
                if done is not last:
                    target.move(len(slots), place, last.length)
                    slots[place] = last
                yield done.answer()


def _extend(slots: Sequence[_Slot], target: BatchTarget, rows: TargetRows, ends: Collection[int]) -> list[int]:
    """Gives each slot its next token; the places of those that ended."""
    logits = target.decoder.logits(rows.hidden)
    kept = TargetRows(rows.hidden.bfloat16(), None if rows.inner is None else rows.inner.bfloat16())
    tokens = _draw(logits, slots)
    return [
        place
        for place, (slot, token) in enumerate(zip(slots, tokens, strict=True))
        if slot.take(token, kept[slice(place, place + 1)], ends)
    ]


def _draw(logits: Tensor, slots: Sequence[_Slot]) -> list[int]:
    """A token for each row, by the inverse of its distribution function."""
    best = logits.max(-1)
    if not bool(best.values.isfinite().all()):
        raise NumericError("the target computes NaN or infinity; train in another precision, or check the checkpoint")
    tokens: list[int] = best.indices.tolist()
    for place, slot in enumerate(slots):
        if slot.question.temperature > 0:
            sums = (logits[place] / slot.question.temperature).softmax(-1).double().cumsum(-1)
            point = slot.generator.random() * float(sums[-1])
            tokens[place] = min(int((sums <= point).sum()), logits.shape[1] - 1)
    return tokens


def _given(target: BatchTarget, slot: int, question: Question) -> Answer:
    """An answer that exists already: its rows come of one pass."""
    answer = question.answer[: question.length]
    rows = target.read(slot, (*question.prompt, *answer))[slice(len(question.prompt) - 1, -1)]
    inner = None if rows.inner is None else rows.inner.bfloat16()
    return Answer(question, answer, TargetRows(rows.hidden.bfloat16(), inner))


def _stacked(rows: Sequence[TargetRows]) -> TargetRows:
    import torch

    inner = [row.inner for row in rows if row.inner is not None]
    return TargetRows(torch.cat([row.hidden for row in rows]), torch.cat(inner) if inner else None)
