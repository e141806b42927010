"""A model on the Hugging Face hub as a checkpoint."""

from __future__ import annotations

from specedge.export.checkpoint import Checkpoint
from specedge.runtime.errors import DownloadError

__all__ = ["read_hub"]


def read_hub(model: str, *, revision: str | None = None, offline: bool = False) -> Checkpoint:
    """Fetch and read."""
    raise DownloadError(model)
