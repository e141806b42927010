"""What tests of exporting share: quick options, a bundle's files, and whether one is whole."""

from __future__ import annotations

from pathlib import Path

from specedge.export.options import ExportOptions
from specedge.runtime.bundle import open_bundle

__all__ = ["QUICK", "TEXTS", "is_whole", "names"]

QUICK = ExportOptions(drafts=("none",), verify=False)
TEXTS = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "genai_config.json",
}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def is_whole(folder: Path) -> bool:
    """Whether a bundle is whole and alone in its folder."""
    open_bundle(folder, verify=True)
    return names(folder.parent) == {"bundle"}
