"""How well a draft agrees with its target, measured on answers that the target wrote.

The target's own text is given to both models (teacher forcing), so one pass over a text measures
every position at once, and nothing is decoded. The draft sees its own keys and values throughout,
also where a bundle would let it read the target's: what is measured here is the cautious figure.

For the laws p of the target and q of the draft at temperature 1, and their logits z_p and z_q:

    alpha          how often argmax z_q = argmax z_p: the acceptance of greedy decoding
    alpha_sampled  mean sum_x min(p(x), q(x)): the acceptance of speculative sampling at temperature 1
                   (Leviathan et al. 2023, arXiv:2211.17192, corollary 3.6)
    kl             mean KL(p||q), nats
    logit_error    mean |z_q - z_p|, each row less its own mean difference, which changes no law
    nll            mean -log q(answer token), nats; target_nll the same of p
    tau            committed tokens a pass of the target, for several draft lengths
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from specedge.export.texts import Text
from specedge.runtime.contracts import Draft, Floats, Target
from specedge.runtime.errors import NumericError, StorageError, UsageError

__all__ = ["DRAFT_LENGTHS", "Agreement", "TargetLogits", "measure", "walk"]

DRAFT_LENGTHS = (2, 4, 8)

_PASS_ROWS = 128  # rows of logits of one pass: 25 MB of a vocabulary of 49,152
_STEP_ROWS = 16  # rows compared at a time, so that what is computed from them stays in the processor's cache

Counter = Callable[[int, int], None]
"""Told how many texts are done, of how many."""


@dataclass(frozen=True)
class Agreement:
    """What the module's docstring defines, over the answer tokens of one text or of all.

    Attributes:
        tokens: Answer tokens.
        tau: By draft length. The first token of an answer comes with the prompt's pass, which is
            not counted; None where there is no other.
        texts: Of each text, in order; empty in these themselves.
    """

    tokens: int
    alpha: float
    alpha_sampled: float
    kl: float
    logit_error: float
    nll: float
    target_nll: float
    tau: Mapping[int, float | None]
    texts: tuple[Agreement, ...] = ()


def measure(
    target: Target, draft: Target, texts: Sequence[Text], *, draft_lengths: Sequence[int] = DRAFT_LENGTHS
) -> Agreement:
    """Measures one draft; for several drafts of one target see `TargetLogits`.

    Args:
        target, draft: Models, each with a cache of its own, which is emptied.
        texts: What the target answered (to its own greedy answers, if `tau` is to be what decoding gives).
        draft_lengths: For `tau`.

    Raises:
        UsageError: No text, a text without prompt or answer, or one longer than a cache.
        NumericError: A model computes NaN or infinity.
        StorageError: There is no room for the target's logits in the folder for temporary files.
    """
    with TemporaryDirectory(prefix="specedge-") as folder:
        return TargetLogits.record(target, texts, Path(folder)).measure(draft, draft_lengths=draft_lengths)


class TargetLogits:
    """A target's logits of the answer tokens of texts, kept in a file, to compare any number of drafts with."""

    def __init__(self, path: Path, texts: Sequence[Text], vocab_size: int) -> None:
        """Takes a file that `record` wrote."""
        self.texts = tuple(texts)
        rows = sum(len(text.answer) for text in texts)
        self._rows: Floats = np.memmap(path, np.float32, "r", shape=(rows, vocab_size))

    @property
    def tokens(self) -> int:
        """Answer tokens of all texts."""
        return len(self._rows)

    @property
    def nll(self) -> float:
        """Mean -log p of the answers' tokens, nats."""
        answers = np.array([token for text in self.texts for token in text.answer])
        total = 0.0
        for first in range(0, len(answers), _STEP_ROWS):
            tokens = answers[first : first + _STEP_ROWS]
            log_p = _log_softmax(np.array(self._rows[first : first + _STEP_ROWS]))
            total -= float(log_p[np.arange(len(tokens)), tokens].sum(dtype=np.float64))
        return total / len(answers)

    @classmethod
    def record(
        cls, target: Target, texts: Sequence[Text], folder: Path, progress: Counter | None = None
    ) -> TargetLogits:
        """Runs the target over the texts.

        Args:
            target: The model; its cache is emptied.
            texts: At least one, each with a prompt and an answer.
            folder: Where the file is written, 4 bytes for each answer token and token of the vocabulary.
            progress: Told of each text.

        Raises:
            As `measure`.
        """
        _check(target, texts)
        path, vocab_size = folder / "target-logits.f32", 0
        try:
            with path.open("wb") as stream:  # not through a memmap, where a full disk ends the process
                for number, text in enumerate(texts):
                    _tell(progress, number, len(texts))
                    for rows in _answer_logits(target, text, "the target"):
                        vocab_size = rows.shape[1]
                        stream.write(rows.tobytes())
        except OSError as error:
            raise StorageError(
                f"{path}: cannot be written ({error.strerror}); free some space, or set TMPDIR"
            ) from None
        _tell(progress, len(texts), len(texts))
        return cls(path, texts, vocab_size)

    def measure(
        self, draft: Target, *, draft_lengths: Sequence[int] = DRAFT_LENGTHS, progress: Counter | None = None
    ) -> Agreement:
        """Runs a draft over the texts and compares.

        Where one vocabulary is longer than the other, its further tokens are padding and left out.

        Args:
            draft: The model; its cache is emptied.
            draft_lengths: For `tau`.
            progress: Told of each text.

        Raises:
            UsageError: A text is longer than the draft's cache.
            NumericError: The draft computes NaN or infinity.
        """
        _check(draft, self.texts)
        sums, start = [], 0
        for number, text in enumerate(self.texts):
            _tell(progress, number, len(self.texts))
            total = _Sums()
            for rows in _answer_logits(draft, text, "the draft"):
                at = len(total.agrees)
                total.add(self._rows[start : start + len(rows)], rows, text.answer[at : at + len(rows)])
                start += len(rows)
            sums.append(total)
        _tell(progress, len(self.texts), len(self.texts))
        return _pooled(sums, draft_lengths)


def walk(agrees: Sequence[bool], draft_length: int) -> tuple[int, int]:
    """Greedy speculative decoding of an answer whose tokens the draft guesses where `agrees` says so.

    It drafts `draft_length` tokens, commits those before its first wrong one and one of the target's
    own, and goes on from there. A draft that agreed up to some token has seen what the target has
    seen, so its next guess is the one that was measured.

    Returns:
        Tokens committed after the first, and passes of the target.
    """
    at, passes = 1, 0
    while at < len(agrees):
        drafted = agrees[at : at + draft_length]
        at += next((place for place, right in enumerate(drafted) if not right), len(drafted)) + 1
        passes += 1
    return max(len(agrees) - 1, 0), passes


@dataclass
class _Sums:
    """Sums over the answer tokens of one text."""

    agrees: list[bool] = field(default_factory=list)
    values: NDArray[np.float64] = field(default_factory=lambda: np.zeros(5))

    def add(self, target: Floats, draft: Floats, answer: Sequence[int]) -> None:
        """Adds rows of logits, [n, vocab] each, and the n tokens that were written there."""
        common = min(target.shape[1], draft.shape[1])
        for first in range(0, len(answer), _STEP_ROWS):
            part = slice(first, first + _STEP_ROWS)
            self._add(np.array(target[part, :common]), draft[part, :common], np.array(answer[part]))

    def _add(self, z_p: Floats, z_q: Floats, answer: NDArray[np.int64]) -> None:
        log_p, log_q = _log_softmax(z_p), _log_softmax(z_q)
        p, q = np.exp(log_p), np.exp(log_q)
        error = z_q - z_p
        error -= error.mean(1, keepdims=True, dtype=np.float64).astype(np.float32)
        row = np.arange(len(answer))
        self.agrees.extend((z_p.argmax(1) == z_q.argmax(1)).tolist())
        self.values += (
            np.minimum(p, q).sum(dtype=np.float64),
            (p * (log_p - log_q)).sum(dtype=np.float64),
            np.abs(error).mean(1, dtype=np.float64).sum(),
            -log_q[row, answer].sum(dtype=np.float64),
            -log_p[row, answer].sum(dtype=np.float64),
        )


def _pooled(sums: Sequence[_Sums], lengths: Sequence[int]) -> Agreement:
    texts = tuple(_agreement([one], lengths) for one in sums)
    return _agreement(sums, lengths, texts)


def _agreement(sums: Sequence[_Sums], lengths: Sequence[int], texts: tuple[Agreement, ...] = ()) -> Agreement:
    tokens = sum(len(one.agrees) for one in sums)
    overlap, kl, error, nll, target_nll = (float(value) for value in np.sum([one.values for one in sums], 0) / tokens)
    tau: dict[int, float | None] = {}
    for length in lengths:
        committed, passes = np.sum([walk(one.agrees, length) for one in sums], axis=0)
        tau[length] = float(committed / passes) if passes else None
    alpha = sum(sum(one.agrees) for one in sums) / tokens
    return Agreement(tokens, alpha, overlap, kl, error, nll, target_nll, tau, texts)


def _answer_logits(model: Target, text: Text, who: str) -> Iterator[Floats]:
    """Logits of the rows that give the answer's tokens, in pieces; the first belongs to the prompt's last token."""
    model.rewind(0)
    pending, rest = text.prompt, text.answer[:-1]
    while pending:
        nodes = rest[: _PASS_ROWS - 1]
        logits = model.forward(pending, Draft.chain(nodes)).logits
        if not np.isfinite(logits).all():
            raise NumericError(f"{who} computes NaN or infinity; export it in another precision")
        yield logits
        model.commit(range(len(nodes)))
        pending, rest = rest[len(nodes) : len(nodes) + 1], rest[len(nodes) + 1 :]


def _check(model: Target, texts: Sequence[Text]) -> None:
    if not texts:
        raise UsageError("there is no text to measure on: give at least one")
    for number, text in enumerate(texts, start=1):
        if not text.prompt or not text.answer:
            raise UsageError(f"text {number}: its {'prompt' if not text.prompt else 'answer'} is empty; leave it out")
        if len(text.tokens) > model.capacity:
            raise UsageError(f"text {number}: {len(text.tokens)} tokens where the cache holds {model.capacity}")


def _log_softmax(logits: Floats) -> Floats:
    shifted: Floats = logits - logits.max(1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(1, keepdims=True, dtype=np.float64)).astype(np.float32)
    return shifted


def _tell(progress: Counter | None, done: int, total: int) -> None:
    if progress is not None:
        progress(done, total)
