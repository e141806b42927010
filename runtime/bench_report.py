"""From replies to numbers, and from numbers to a table and a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specedge.runtime.events import Finish
from specedge.runtime.files import write_text
from specedge.runtime.options import PLAIN
from specedge.runtime.pass_times import PAST, WIDTHS

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

__all__ = ["OTHER_BUNDLE", "PLAIN", "summarise", "table", "write_result"]

OTHER_BUNDLE = f"{PLAIN}@"
"""Begins the name of another bundle's plain decoding."""


def summarise(categories: Sequence[str], replies: Mapping[str, Sequence[Finish]]) -> dict[str, Any]:
    """The numbers of every method, overall and by category.

    Each method's block holds, over the prompts of that category (or all):

    - `tau`: committed tokens / target passes, both summed over the prompts; prefill not counted.
    - `alpha`: accepted / evaluated draft nodes, both summed; None where nothing was drafted.
    - `ms_per_token`: decoding time / tokens after the first, of each prompt; median and 95th percentile.
    - `speedup`: plain decoding's ms per token / the method's on the same prompt; median over the prompts.
    - `draft_ms`, `verify_ms`, `host_ms`: time a round spends drafting, in the target's pass, and
      in everything else; each prompt's average over its rounds, then the median over the prompts.
      The share of host time is host_ms / (draft_ms + verify_ms + host_ms).
    - `step_p99_ms`: each reply's 99th percentile of the time between visible tokens; median over the prompts.
    - `equal`: whether all token ids equal plain decoding's on every prompt.
    - `lossless`: whether the method keeps the law of this bundle's target. Another bundle has a
      target of its own, so a baseline is not lossless.

    A prompt whose reply ended with the first token has nothing decoded and no part in the times.

    Args:
        categories: Category of each prompt.
        replies: Each contender's replies in the order of the prompts. Plain decoding is the
            first of them; those of other bundles begin with `OTHER_BUNDLE`.
    """
    plain = next(iter(replies.values()))
    return {
        name: {
            **_numbers(answers, plain, lossless=not name.startswith(OTHER_BUNDLE)),
            "categories": {
                category: _numbers(
                    [answer for answer, of in zip(answers, categories, strict=True) if of == category],
                    [answer for answer, of in zip(plain, categories, strict=True) if of == category],
                    lossless=not name.startswith(OTHER_BUNDLE),
                )
                for category in dict.fromkeys(categories)
            },
        }
        for name, answers in replies.items()
    }


def _numbers(answers: Sequence[Finish], plain: Sequence[Finish], *, lossless: bool) -> dict[str, Any]:
    stats = [answer.stats for answer in answers]
    decoded = [one for one in stats if one.decoded]
    times = [one.decode_ms / one.decoded for one in decoded]
    speedups = [
        (other.stats.decode_ms / other.stats.decoded) / (answer.stats.decode_ms / answer.stats.decoded)
        for answer, other in zip(answers, plain, strict=True)
        if answer.stats.decoded and other.stats.decoded
    ]
    return {
        "tau": _ratio(sum(one.decoded for one in stats), sum(one.passes for one in stats)),
        "alpha": _ratio(sum(one.accepted for one in stats), sum(one.evaluated for one in stats)),
        "ms_per_token": {"median": _percentile(times, 50), "p95": _percentile(times, 95)},
        "speedup": {"median": _percentile(speedups, 50)},
        "draft_ms": _percentile([one.draft_ms / one.passes for one in decoded], 50),
        "verify_ms": _percentile([one.verify_ms / one.passes for one in decoded], 50),
        "host_ms": _percentile([one.host_ms / one.passes for one in decoded], 50),
        "step_p99_ms": _percentile([one.step_ms[2] for one in decoded if one.step_ms is not None], 50),
        "equal": all(answer.ids == other.ids for answer, other in zip(answers, plain, strict=True)),
        "lossless": lossless and all(one.lossless for one in stats),
    }


def _ratio(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def _percentile(values: Sequence[float], percent: int) -> float | None:
    return round(float(np.percentile(values, percent)), 4) if values else None


def table(result: Mapping[str, Any]) -> Group:
    """A result for the eye: all prompts, then the speed-ups by category."""
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    methods: Mapping[str, Any] = result["methods"]
    where = f"{result['model']} {result['precision']}, {result['device']}, {result['threads']} threads"
    overall = Table(title=f"{escape(where)}: {result['prompts']} prompts, {result['max_tokens']} tokens, greedy")
    for heading in ("method", "speed-up", "τ", "α", "ms/token", "p95", "draft ms", "verify ms", "host", "equal"):
        overall.add_column(heading, justify="left" if heading == "method" else "right")
    for name, block in methods.items():
        overall.add_row(escape(name), *_cells(block))
    by_category = Table(title="speed-up (τ) by category")
    by_category.add_column("category")
    for name in methods:
        by_category.add_column(escape(name), justify="right")
    for category in next(iter(methods.values()))["categories"]:
        blocks = [block["categories"][category] for block in methods.values()]
        by_category.add_row(escape(category), *(f"{_times(one)} ({_number(one['tau'])})" for one in blocks))
    passes = [_passes_table(result["passes"])] if result["passes"] else []
    notes = [*result["notes"]]
    if not passes:
        notes.append(f"passes of several rows were not timed: that takes a capacity of {PAST + max(WIDTHS)}")
    if loop := result["loop"]:
        notes.append(
            f"plain decoding through the loop: {loop['loop_ms']} ms a token, {loop['ratio']} x a bare pass of "
            f"{loop['bare_ms']} ms; host time of a round of 8 rows: {loop['host_ms']} ms"
        )
    if result["skipped"]:
        notes.append(f"{result['skipped']} prompts skipped: too long for the context")
    return Group(overall, by_category, *passes, *(Text(note) for note in notes))


def _passes_table(passes: Mapping[str, Mapping[str, Any]]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    widths = list(next(iter(passes.values()))["ms"])
    shown = Table(title=f"ms of a pass of {', '.join(widths)} rows, {PAST} behind it")
    for heading in ("graph of", "format", *widths, "of target", "8 rows / 1"):
        shown.add_column(heading, justify="left" if heading in ("graph of", "format") else "right")
    for name, block in passes.items():
        times = [f"{ms:.1f}" for ms in block["ms"].values()]
        ratios = [_number(block[key]) for key in ("of_target", "growth")]
        shown.add_row(escape(name), escape(block["precision"]), *times, *ratios)
    return shown


def _cells(block: Mapping[str, Any]) -> list[str]:
    parts = [block[name] for name in ("draft_ms", "verify_ms", "host_ms")]
    share = "-" if None in parts or not sum(parts) else f"{parts[2] / sum(parts):.1%}"
    return [
        _times(block),
        _number(block["tau"]),
        _number(block["alpha"]),
        _number(block["ms_per_token"]["median"]),
        _number(block["ms_per_token"]["p95"]),
        _number(parts[0]),
        _number(parts[1]),
        share,
        "yes" if block["equal"] else "no",
    ]


def _times(block: Mapping[str, Any]) -> str:
    value = block["speedup"]["median"]
    return "-" if value is None else f"{value:.2f} ×"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def write_result(result: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes a result as JSON, beside and then in place.

    Raises:
        StorageError: The file cannot be written.
    """
    write_text(path, json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
