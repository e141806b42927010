"""A folder in Hugging Face layout as a checkpoint."""

from __future__ import annotations

from pathlib import Path

from specedge.export.checkpoint import Checkpoint
from specedge.runtime.errors import CheckpointError

__all__ = ["read_folder"]


def read_folder(path: Path, *, name: str | None = None, source: str | None = None) -> Checkpoint:
    """Read a folder."""
    raise CheckpointError(f"{path}: not yet")
