"""A comparison of drafts for the eye: a table, and a picture.

A result is what `compare` returns and `specedge compare-compensation --out` writes:

- `rows`, one a draft: `recipe`, its `format` and `methods`, and either `error`, why there are no
  numbers, or the numbers of export/agreement.py (`alpha`, `alpha_sampled`, `kl`, `logit_error`,
  `nll`, `tau` by draft length, and `texts`: some of them of each prompt), `weight_bytes`, `seconds`
  (`write`, `measure`) and, where the format has an operator: `draft_ms`, a pass of one row behind
  `past` others; `cost`, that over the target's pass, timed side by side; and `estimate`, the best
  draft length and the speed-up that passes alone would give with it.
- `target_nll`, of the target on its own answers; `verify_ms`, its pass by draft length.
- `baseline`: plain decoding a user would pick instead, timed in the same way.
- `timed`, of the best drafts as they decode: `speedup` over plain decoding in the target's
  precision, `speedup_baseline` over the baseline's, `equal` whether the text was plain decoding's.
- `complete`: false in what was written before the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specedge.runtime.plotting import check_plotting, png

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["gap_closed", "plot", "table"]

_LENGTHS = ("2", "4", "8")
_WIDTH, _HEIGHT, _DPI = 14.0, 4.2, 120


def gap_closed(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> float | None:
    """How much of the gap from the uncompensated draft's acceptance to 1 a compensation closes.

    (alpha - alpha_0) / (1 - alpha_0), where alpha_0 is the same format's without compensation.
    None where there is no such number.
    """
    for other in rows:
        if other["format"] == row["format"] and other["methods"] == "none":
            if row is other or "alpha" not in other or "alpha" not in row or other["alpha"] == 1:
                return None
            return float((row["alpha"] - other["alpha"]) / (1 - other["alpha"]))
    return None


def table(result: Mapping[str, Any]) -> Group:
    """A result for the eye: all drafts, then those that were timed as they decode."""
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    where = f"{result['model']} {result['precision']}, {result['device']}, {result['threads'] or 'all'} threads"
    title = f"{where}: {result['prompts']} prompts, {result['tokens']} tokens of the target's own, greedy"
    drafts = Table(title=escape(title))
    headings = ("format", "compensation", "α", "gap closed", "α (T=1)", "KL", "|logit error|", "NLL")
    for heading in (*headings, "τ 2", "τ 4", "τ 8", "MB", "ms", "of target", "promises"):
        drafts.add_column(heading, justify="left" if heading in headings[:2] else "right")
    previous = ""
    for row in result["rows"]:
        if previous not in ("", row["format"]):
            drafts.add_section()
        previous = row["format"]
        cells = ["-"] * 13 if "error" in row else _cells(row, result["rows"])
        drafts.add_row(escape(row["format"]), escape(row["methods"]), *cells)
    failed = [f"{row['recipe']}: {row['error']}" for row in result["rows"] if "error" in row]
    parts: list[Any] = [drafts]
    if "timed" in result:
        parts.append(_timed_table(result["timed"], result["baseline"]["recipe"]))
    return Group(*parts, *(Text(note) for note in (*_notes(result), *failed)))


def _timed_table(timed: Mapping[str, Any], baseline: str) -> Any:
    from rich.markup import escape
    from rich.table import Table

    shown = Table(title=f"the best as they decode: {timed['prompts']} prompts, one a category")
    for heading in ("draft", "draft length", "speed-up", f"over plain {baseline}", "τ", "α", "ms/token", "equal"):
        shown.add_column(heading, justify="left" if heading == "draft" else "right")
    for recipe, block in timed["drafts"].items():
        times = [_times(block[name]) for name in ("speedup", "speedup_baseline")]
        numbers = [_number(block[name], 2) for name in ("tau", "alpha", "ms_per_token")]
        shown.add_row(escape(recipe), str(block["draft_length"]), *times, *numbers, "yes" if block["equal"] else "no")
    return shown


def _cells(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    gap = gap_closed(row, rows)
    return [
        _number(row["alpha"], 3),
        "-" if gap is None else f"{gap:.0%}",
        _number(row["alpha_sampled"], 3),
        _number(row["kl"], 4),
        _number(row["logit_error"], 3),
        _number(row["nll"], 3),
        *(_number(row["tau"][length], 2) for length in _LENGTHS),
        f"{row['weight_bytes'] / 1e6:.0f}",
        _number(row.get("draft_ms"), 1),
        _number(row.get("cost"), 2),
        _times(row["estimate"]["speedup"]) if "estimate" in row else "-",
    ]


def _notes(result: Mapping[str, Any]) -> list[str]:
    baseline, verify = result["baseline"], result["verify_ms"]
    notes = [
        f"the target's NLL on its own answers: {result['target_nll']:.3f}; its pass: "
        + ", ".join(f"{ms:.1f} ms with {length} drafted" for length, ms in verify.items()),
        f"plain {baseline['recipe']}: {baseline['ms']:.1f} ms a pass, {baseline['cost']:.2f} of the target's",
        "the drafts saw their own keys and values only, which is cautious: in a bundle a self-draft reads the target's",
    ]
    if "timed" in result:
        notes += result["timed"]["notes"]
    if result["skipped"]:
        notes.append(f"{result['skipped']} prompts skipped: too long for the context")
    return notes


def plot(result: Mapping[str, Any]) -> bytes:
    """The picture, as PNG: acceptance, KL and speed by format, a colour a compensation.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    figure = check_plotting().Figure(figsize=(_WIDTH, _HEIGHT), dpi=_DPI, layout="constrained")
    acceptance, divergence, speed = figure.subplots(1, 3)
    rows = [row for row in result["rows"] if "error" not in row]
    _bars(acceptance, rows, [row["alpha"] for row in rows], "α, greedy")
    _bars(divergence, rows, [row["kl"] for row in rows], "KL(p‖q), nats")
    if any(row["kl"] > 0 for row in rows):
        divergence.set_yscale("log")
    _bars(speed, rows, [row["estimate"]["speedup"] if "estimate" in row else 0.0 for row in rows], "speed-up promised")
    speed.axhline(1.0, color="0.5", linewidth=0.8)
    cost = result["baseline"]["cost"]
    speed.axhline(1 / cost, color="0.5", linewidth=0.8, linestyle="--", label=f"plain {result['baseline']['recipe']}")
    handles, labels = speed.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, fontsize="small")
    figure.suptitle(f"{result['model']} {result['precision']}: {result['prompts']} prompts, {result['tokens']} tokens")
    return png(figure)


def _bars(axes: Any, rows: Sequence[Mapping[str, Any]], heights: Sequence[float], title: str) -> None:
    """A group of bars for each format, in each a bar for each compensation."""
    formats = list(dict.fromkeys(row["format"] for row in rows))
    methods = list(dict.fromkeys(row["methods"] for row in rows))
    width = 0.8 / max(len(methods), 1)
    for place, method in enumerate(methods):
        own = [(row, height) for row, height in zip(rows, heights, strict=True) if row["methods"] == method]
        at = [formats.index(row["format"]) + (place - (len(methods) - 1) / 2) * width for row, _ in own]
        axes.bar(at, [height for _, height in own], width, label=method)
    axes.set_title(title)
    axes.set_xticks(range(len(formats)), formats, rotation=45, ha="right", fontsize="small")


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ×"


def _number(value: float | None, places: int) -> str:
    return "-" if value is None else f"{value:.{places}f}"
