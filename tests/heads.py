"""Medusa heads for tests: random ones, and what they give, in plain numpy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from specedge.export.checkpoint import Checkpoint
from specedge.export.heads_file import Heads
from specedge.models import find_family
from specedge.models.medusa import NORM_EPS, HeadsConfig, tensor_shapes
from specedge.tests.calibrations import calibration
from specedge.tests.tiny import TinyLlama

__all__ = ["PLAIN", "WIDE", "logits_of", "random_heads"]

TINY = TinyLlama()
PLAIN = HeadsConfig(heads=3, hidden_size=TINY.hidden, vocab_size=TINY.vocab)
WIDE = replace(PLAIN, width=48, chain=True, taps=(0, 1), vocabulary=120)


def random_heads(config: HeadsConfig, seed: int = 0, calibrated: bool = True) -> Heads:
    """Heads with random weights; with a trimmed vocabulary, random tokens in no order."""
    random = np.random.default_rng(seed)
    tensors = {
        name: (random.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)
        for name, shape in tensor_shapes(config)
    }
    ids = random.permutation(config.vocab_size)[: config.vocabulary].astype(np.int64) if config.vocabulary else None
    measured = calibration(config.heads, min(10, config.guesses)) if calibrated else None
    return Heads(config, tensors, ids, measured, Path("heads.safetensors"))


def logits_of(heads: Heads, checkpoint: Checkpoint, hidden: Any, inner: Any, token: int) -> np.ndarray:
    """Logits [heads, guesses] as models/medusa.py says, in float64."""
    config, tensors = heads.config, {name: each.astype(np.float64) for name, each in heads.tensors.items()}
    family = find_family(checkpoint.config["model_type"])
    ids = np.arange(config.vocab_size) if heads.vocabulary is None else heads.vocabulary
    embedding = checkpoint.tensors[family.embedding].astype(np.float64)
    matrix = (
        embedding if checkpoint.config["tie_word_embeddings"] else checkpoint.tensors[family.head].astype(np.float64)
    )
    state = hidden.astype(np.float64)
    if config.taps:
        parts = inner.astype(np.float64).reshape(len(config.taps), -1)
        state = state + tensors["fuse.weight"] @ norm(parts).reshape(-1)
    result: list[np.ndarray] = []
    for head in range(config.heads):
        rows = state
        for block in range(config.blocks):
            prefix = f"heads.{head}.blocks.{block}"
            if not config.width:
                rows = rows + silu(tensors[f"{prefix}.square.weight"] @ rows + tensors[f"{prefix}.square.bias"])
                continue
            read = norm(rows)
            if config.chain and not block:
                known = token in ids
                read = np.concatenate([read, norm(embedding[token]) if known else np.zeros_like(read)])
            inside = silu(tensors[f"{prefix}.wide.weight"] @ read + tensors[f"{prefix}.wide.bias"])
            rows = rows + tensors[f"{prefix}.narrow.weight"] @ inside
        own = tensors.get(f"heads.{head}.lm_head.weight", matrix[ids])
        logits = own @ rows
        if config.lm_head == "lowrank":
            logits = logits + tensors[f"heads.{head}.lm_head.up"] @ (tensors[f"heads.{head}.lm_head.down"] @ rows)
        result.append(logits)
        if config.chain:
            state, token = rows, int(ids[logits.argmax()])
    return np.stack(result)


def norm(rows: np.ndarray) -> np.ndarray:
    return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + NORM_EPS)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))
