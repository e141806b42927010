"""Lets a target answer what it is asked, and stores the rows: the first half of training heads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from specedge.export.calibration import fingerprint_of
from specedge.export.checkpoint import Checkpoint
from specedge.train.answering import Question, answer_questions
from specedge.train.questions import in_groups
from specedge.train.shards import RowStore
from specedge.train.target import BatchTarget, fast_dtype, load_target

__all__ = ["collect", "row_facts"]

Progress = Callable[[str, int, int], None]

_CACHE_BYTES = 3 << 30
_MOST_SLOTS = 64


def row_facts(
    checkpoint: Checkpoint, questions: Sequence[Question], taps: Sequence[int], seed: int
) -> Mapping[str, Any]:
    """What rows depend on, but for the processor."""
    asked = [[each.number, each.prompt, each.length, each.answer, each.temperature] for each in questions]
    return {
        "model": fingerprint_of(checkpoint, None).model,
        "questions": hashlib.sha256(json.dumps(asked).encode()).hexdigest(),
        "taps": list(taps),
        "seed": seed,
    }


def collect(
    checkpoint: Checkpoint,
    questions: Sequence[Question],
    store: RowStore,
    *,
    ends: Collection[int],
    taps: Sequence[int],
    seed: int = 0,
    device: Any = None,
    share: tuple[int, int] = (0, 1),
    tokens: int | None = None,
    progress: Progress = lambda *_: None,
) -> None:
    """Answers the questions that a store lacks.

    Args:
        checkpoint: The target.
        questions: All of them.
        store: Where rows go.
        ends: Tokens that end an answer.
        taps: Layers whose inputs are kept.
        seed: Of samples and order.
        device: Where to compute; None: the CPU.
        share: (rank, processes): this process answers every so-many-th question.
        tokens: Enough of all answers together, earlier ones included; None: every question is answered.
        progress: Told of tokens written, of how many at most.
    """
    import torch

    rank, processes = share
    done, stored = store.done(), store.tokens()
    # Shares do not depend on what is done: another process may have stored some of its own meanwhile.
    waiting = [each for each in questions[rank::processes] if each.number not in done]
    if not waiting or (tokens is not None and stored >= tokens):
        return
    device = device or torch.device("cpu")
    dtype = fast_dtype(device)
    decoder = load_target(checkpoint, dtype, device)
    sizes = decoder.sizes
    capacity = max(len(each.prompt) + each.length for each in waiting) + 1
    slot_bytes = 2 * sizes.layers * sizes.kv_heads * sizes.head_dim * capacity * dtype.itemsize
    slots = max(1, min(_MOST_SLOTS, _CACHE_BYTES // slot_bytes, len(waiting)))
    target = BatchTarget(decoder, slots, capacity, taps, dtype)
    most, written = sum(each.length for each in waiting), 0
    if tokens is not None:
        most = min(most, (tokens - stored) // processes)

    def count(tokens: int) -> None:
        nonlocal written
        written += tokens
        progress("answer", min(written, most), most)

    finished = 0
    for answer in answer_questions(target, list(in_groups(waiting, seed)), ends=ends, seed=seed, progress=count):
        store.add(answer)
        finished += len(answer.tokens)
        if tokens is not None and finished * processes >= tokens - stored:
            break
    store.flush()
    progress("answer", most, most)
