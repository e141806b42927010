"""A tuning for the eye: a table, and a picture of predicted against measured speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specedge.runtime.options import PLAIN
from specedge.runtime.plotting import check_plotting, png
from specedge.runtime.tuning import Tuning

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["plot", "table"]


def table(tuning: Tuning) -> Group:
    """Methods with the draft length found for each, predicted and measured; passes by width."""
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    plain = tuning.choices[PLAIN].measured_ms
    methods = Table(title=f"{escape(tuning.note)}; {tuning.prompts} prompts")
    for heading in ("method", "draft length", "τ", "ms/token predicted", "measured", "off by", "speed-up"):
        methods.add_column(heading, justify="left" if heading == "method" else "right")
    for name, choice in tuning.choices.items():
        methods.add_row(
            escape(name) + (" *" if name == tuning.method else ""),
            str(choice.draft_length),
            f"{choice.tau:.2f}",
            f"{choice.predicted_ms:.2f}",
            f"{choice.measured_ms:.2f}",
            f"{100 * (choice.predicted_ms / choice.measured_ms - 1):+.0f} %",
            f"{plain / choice.measured_ms:.2f} ×",
        )
    passes = Table(title="ms of a pass by its rows")
    for width in tuning.passes:
        passes.add_column(str(width), justify="right")
    passes.add_row(*(f"{ms:.1f}" for ms in tuning.passes.values()))
    return Group(methods, passes)


def plot(tuning: Tuning) -> bytes:
    """The picture, as PNG.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    figure = check_plotting().Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    names = list(tuning.choices)
    for offset, label in ((-0.2, "predicted"), (0.2, "measured")):
        heights = [1e3 / getattr(tuning.choices[name], f"{label}_ms") for name in names]
        axes.bar([place + offset for place in range(len(names))], heights, width=0.4, label=label)
    axes.set_xticks(range(len(names)), names, rotation=20, ha="right")
    axes.set_ylabel("tokens/s")
    axes.set_title(tuning.note, fontsize="small")
    axes.legend()
    return png(figure)
