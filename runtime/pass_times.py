"""How long a pass of each of several graphs takes, measured side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Any

from specedge.runtime.contracts import Draft
from specedge.runtime.graph import Decoder

__all__ = ["PAST", "WIDTHS", "compare_passes", "pass_times"]

PAST = 256
"""Rows in the cache before the pass that is timed."""

WIDTHS = (1, 4, 8, 16)
"""Rows of the passes that `compare_passes` times."""

_TURNS = 31
_WARM_UP = 3


def pass_times(models: Sequence[Decoder], widths: Sequence[int] = (1,), past: int = PAST) -> list[dict[int, float]]:
    """Median milliseconds of a pass of each model, by the number of rows.

    Models and widths take turns, so that a machine that grows warm or busy slows all of them alike.
    Only the graph is timed: a pass that was just made runs again over the same buffers. Every row has
    its logits computed, as those of a draft have. The caches are emptied.

    Args:
        models: Models with room for `past` and the widest pass.
        widths: Rows of a pass; one token and a chain of drafted ones.
        past: Rows in the cache before the pass.
    """
    for model in models:
        model.rewind(0)
        model.forward([token % model.spec.vocab_size for token in range(past)])
    times: list[dict[int, list[float]]] = [{width: [] for width in widths} for _ in models]
    for turn in range(_WARM_UP + _TURNS):
        for width in widths:
            for model, taken in zip(models, times, strict=True):
                model.rewind(past)
                model.forward([0], Draft.chain([token % model.spec.vocab_size for token in range(width - 1)]))
                begun = perf_counter()
                model.repeat()
                if turn >= _WARM_UP:
                    taken[width].append(1e3 * (perf_counter() - begun))
    for model in models:
        model.rewind(0)
    return [{width: median(values) for width, values in taken.items()} for taken in times]


def compare_passes(models: Mapping[str, Decoder]) -> dict[str, dict[str, Any]]:
    """Times passes of `WIDTHS` rows of graphs that have names, the target the first.

    Returns:
        By name: `precision`; `ms` of a pass by its rows; `of_target`, a pass of one row over the
        target's (a draft's is the c of the literature); `growth`, eight rows over one. Graphs whose
        cache is too small are left out, and without the target there are none.
    """
    fitting = {name: model for name, model in models.items() if model.capacity >= PAST + max(WIDTHS)}
    if next(iter(models), None) not in fitting:
        return {}
    times = dict(zip(fitting, pass_times(list(fitting.values()), WIDTHS), strict=True))
    one = next(iter(times.values()))[1]
    return {
        name: {
            "precision": fitting[name].spec.recipe or fitting[name].spec.precision,
            "ms": {str(width): round(ms, 3) for width, ms in taken.items()},
            "of_target": round(taken[1] / one, 4),
            "growth": round(taken[8] / taken[1], 4),
        }
        for name, taken in times.items()
    }
