"""Writes a model as a folder in Hugging Face layout, which `specedge export` takes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from specedge.export.checkpoint import Checkpoint, Tensors

__all__ = ["write_model", "write_tokenizer"]


def write_model(folder: Path, checkpoint: Checkpoint, tensors: Tensors) -> None:
    """Writes weights in float32, config and tokenizer.

    Args:
        folder: An empty folder.
        checkpoint: Everything but the weights.
        tensors: The weights, under the checkpoint's names.
    """
    from safetensors.numpy import save_file

    arrays = {name: np.ascontiguousarray(tensors[name], np.float32) for name in tensors}
    save_file(arrays, str(folder / "model.safetensors"), {"format": "pt"})
    _write_json(folder / "config.json", dict(checkpoint.config))
    write_tokenizer(folder, checkpoint)


def write_tokenizer(folder: Path, checkpoint: Checkpoint) -> None:
    """Writes the tokenizer's files, and how to generate."""
    (folder / "tokenizer.json").write_text(checkpoint.tokenizer.model, encoding="utf-8")
    config = dict(checkpoint.tokenizer.config)
    if checkpoint.tokenizer.chat_template is not None:
        config["chat_template"] = checkpoint.tokenizer.chat_template
    _write_json(folder / "tokenizer_config.json", config)
    _write_json(folder / "generation_config.json", dict(checkpoint.generation))


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
