"""How long a pass of each of several models takes, measured side by side."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from time import perf_counter

from specedge.runtime.contracts import Draft
from specedge.runtime.graph import Decoder

__all__ = ["PAST", "pass_times", "verify_times"]

PAST = 256
"""Rows in the cache before the pass that is timed."""

_TURNS = 31
_WARM_UP = 3


def pass_times(models: Sequence[Decoder], past: int = PAST) -> list[float]:
    """Median milliseconds of a pass of one row of each model.

    The models take turns, so that a machine that grows warm or busy slows all of them alike. Only
    the graph runs: each pass is repeated over buffers that are filled already. The caches are emptied.

    Args:
        models: Models with room for `past` + 1 rows.
        past: Rows in the cache before the pass.
    """
    for model in models:
        _fill(model, past)
        model.forward([0])
    times: list[list[float]] = [[] for _ in models]
    for turn in range(_WARM_UP + _TURNS):
        for model, taken in zip(models, times, strict=True):
            begun = perf_counter()
            model.repeat()
            if turn >= _WARM_UP:
                taken.append(1e3 * (perf_counter() - begun))
    return [median(taken) for taken in times]


def verify_times(target: Decoder, draft_lengths: Sequence[int], past: int = PAST) -> dict[int, float]:
    """Median milliseconds of a pass that verifies a draft of each length, and of one without a draft (0).

    The lengths take turns. The cache is emptied.
    """
    vocab = target.spec.vocab_size
    drafts = {length: Draft.chain([token % vocab for token in range(length)]) for length in (0, *draft_lengths)}
    times: dict[int, list[float]] = {length: [] for length in drafts}
    _fill(target, past)
    for turn in range(_WARM_UP + _TURNS):
        for length, draft in drafts.items():
            target.rewind(past)
            target.forward([0], draft)
            begun = perf_counter()
            target.repeat()
            if turn >= _WARM_UP:
                times[length].append(1e3 * (perf_counter() - begun))
    target.rewind(0)
    return {length: median(taken) for length, taken in times.items()}


def _fill(model: Decoder, past: int) -> None:
    model.rewind(0)
    model.forward([token % model.spec.vocab_size for token in range(past)])
