"""Which heads go into a bundle."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from specedge.export.checkpoint import Checkpoint
from specedge.export.heads_file import Heads, read_heads
from specedge.models import find_family, read_dimensions

__all__ = ["NO_HEADS", "find_heads", "shipped_heads"]

NO_HEADS = "none"
_BUILTIN = "builtin:"


def find_heads(checkpoint: Checkpoint, wanted: str | None) -> Heads | None:
    """Reads the heads for a model.

    Args:
        checkpoint: The model.
        wanted: A file or folder, or "none"; None: those shipped for a built-in model, where there are any.

    Raises:
        UsageError: They are another model's.
        CheckpointError: They cannot be read.
    """
    if wanted == NO_HEADS:
        return None
    path = shipped_heads(checkpoint.source) if wanted is None else Path(wanted).expanduser()
    if path is None:
        return None
    sizes = read_dimensions(find_family(checkpoint.config.get("model_type")), checkpoint.config)
    heads = read_heads(path, sizes.vocab_size)
    heads.check_target(sizes.hidden_size, sizes.vocab_size, sizes.layers)
    return heads


def shipped_heads(source: str) -> Path | None:
    """The heads that this package holds for a built-in model."""
    if not source.startswith(_BUILTIN):
        return None
    path = Path(str(resources.files("specedge.models"))) / "shipped" / f"{source.removeprefix(_BUILTIN)}.safetensors"
    return path if path.is_file() else None
