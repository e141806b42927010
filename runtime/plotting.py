"""The package that draws, which is optional."""

from __future__ import annotations

import io
from importlib import import_module
from typing import Any

from specedge.runtime.errors import MissingExtraError

__all__ = ["check_plotting", "png"]


def check_plotting() -> Any:
    """The package that draws, looked for before any work is done: the module matplotlib.figure.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        return import_module("matplotlib.figure")  # not by name: types of an optional package are not always there
    except ImportError:
        raise MissingExtraError("matplotlib", "plot") from None


def png(figure: Any) -> bytes:
    """A figure as PNG."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    return drawn.getvalue()
