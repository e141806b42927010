"""Adds up a reply's rounds into its statistics."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from specedge.runtime.contracts import Round
from specedge.runtime.events import Stats
from specedge.runtime.options import PLAIN

__all__ = ["peak_memory_bytes", "total", "trim"]


def trim(last: Round, seen: int) -> Round:
    """A round of which only the first `seen` tokens became visible.

    Nodes behind them count neither as evaluated nor as accepted.
    """
    unseen = len(last.tokens) - seen
    accepted = min(last.accepted, seen)
    evaluated = min(last.evaluated, max(accepted, last.evaluated - unseen))
    corrected = last.corrected and seen > last.accepted
    return replace(last, tokens=last.tokens[:seen], accepted=accepted, evaluated=evaluated, corrected=corrected)


def total(
    rounds: Sequence[Round],
    *,
    method: str,
    lossless: bool,
    prompt_tokens: int,
    cached_tokens: int,
    ttft_ms: float = 0.0,
    baseline_ms: Sequence[float] = (),
    forecast: float | None = None,
    notes: Sequence[str] = (),
) -> Stats:
    """Statistics of a reply; the first round, which runs the prompt, is prefill, the others decoding."""
    decoding = [item for item in rounds if not item.prefill]
    draft_ms = sum(item.draft_ms for item in decoding)
    verify_ms = sum(item.verify_ms for item in decoding)
    host_ms = sum(item.host_ms for item in decoding)
    return Stats(
        method=method,
        lossless=lossless,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        tokens=sum(len(item.tokens) for item in rounds),
        passes=len(decoding),
        proposed=sum(len(item.draft.tokens) for item in decoding),
        evaluated=sum(item.evaluated for item in decoding),
        accepted=sum(item.accepted for item in decoding),
        ttft_ms=ttft_ms,
        prefill_ms=sum(item.verify_ms for item in rounds if item.prefill),
        decode_ms=draft_ms + verify_ms + host_ms,
        draft_ms=draft_ms,
        verify_ms=verify_ms,
        host_ms=host_ms,
        peak_memory_bytes=peak_memory_bytes(),
        corrected=sum(item.corrected for item in decoding),
        bonus=sum(not item.corrected and len(item.tokens) > item.accepted for item in decoding),
        depths=_depths(decoding),
        rounds=dict(Counter(item.draft.by or PLAIN for item in decoding)),
        step_ms=_percentiles([item.draft_ms + item.verify_ms + item.host_ms for item in decoding]),
        baseline_ms=median(baseline_ms) if baseline_ms else None,
        forecast=forecast,
        notes=tuple(notes),
    )


def _depths(rounds: Sequence[Round]) -> tuple[tuple[int, int], ...]:
    """For each depth: rounds that tested a node there, and rounds in which one stood."""
    tested, stood = Counter[int](), Counter[int]()
    for item in rounds:
        reached = item.accepted + (item.evaluated > item.accepted)
        tested.update(range(reached))
        stood.update(range(item.accepted))
    return tuple((tested[depth], stood[depth]) for depth in range(max(tested, default=-1) + 1))


def _percentiles(times: Sequence[float]) -> tuple[float, float, float] | None:
    if not times:
        return None
    middle, late, last = np.percentile(times, (50, 95, 99))
    return float(middle), float(late), float(last)


def peak_memory_bytes() -> int:
    """Peak resident memory of this process; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
