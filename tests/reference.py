"""Decoders small enough for a test, and a plain numpy reference of what they compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specedge.export.checkpoint import Checkpoint, Tokenizer

__all__ = ["LLAMA3", "TINY", "MemoryTensors", "forward", "memory_checkpoint", "random_tree", "session"]

TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 160,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}

# Llama 3.1's scaling of the rotation, for short contexts.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


class MemoryTensors(dict[str, NDArray[np.float32]]):
    """Tensors of a checkpoint that was never on disk."""

    def shape(self, name: str) -> tuple[int, ...]:
        return self[name].shape


def memory_checkpoint(seed: int = 0, **changes: Any) -> Checkpoint:
    """A random model of TINY's config with some keys changed."""
    config = {**TINY, **changes}
    rng = np.random.default_rng(seed)
    tensors = MemoryTensors(
        {
            name: (
                1 + 0.1 * rng.standard_normal(shape)
                if "norm" in name
                else rng.standard_normal(shape) * (0.1 if name.endswith("bias") else shape[-1] ** -0.5)
            ).astype(np.float32)
            for name, shape in _tensors(config)
        }
    )
    # Logits that differ by more than rounding, as a trained model's do.
    tensors["model.embed_tokens.weight"] *= 4
    return Checkpoint("tiny", "folder:tiny", config, tensors, Tokenizer("{}", {}), Path("tiny"))


def _tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, mlp, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
        attention, gated = config.get("attention_bias"), config.get("mlp_bias")
        for name, out, into, bias in (
            ("self_attn.q_proj", q, hidden, attention),
            ("self_attn.k_proj", kv, hidden, attention),
            ("self_attn.v_proj", kv, hidden, attention),
            ("self_attn.o_proj", hidden, q, attention),
            ("mlp.gate_proj", mlp, hidden, gated),
            ("mlp.up_proj", mlp, hidden, gated),
            ("mlp.down_proj", hidden, mlp, gated),
        ):
            yield f"{prefix}{name}.weight", (out, into)
            if bias:
                yield f"{prefix}{name}.bias", (out,)


def forward(
    checkpoint: Checkpoint,
    ids: NDArray[np.int64],
    positions: NDArray[np.int64] | None = None,
    allowed: NDArray[np.bool_] | None = None,
    frequencies: NDArray[np.float64] | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Logits [S, vocab] and hidden rows [S, hidden] of one sequence, in float64, without a cache.

    Args:
        checkpoint: The model.
        ids: [S] token ids.
        positions: [S]; None: 0 to S - 1.
        allowed: [S, S], which rows a row may see; None: those before it and itself.
        frequencies: [head_dim / 2] inverse frequencies; None: without scaling.
    """
    config, tensors = checkpoint.config, checkpoint.tensors
    heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    rows = len(ids)
    positions = np.arange(rows) if positions is None else positions
    allowed = np.tril(np.ones((rows, rows), bool)) if allowed is None else allowed
    if frequencies is None:
        frequencies = config["rope_theta"] ** (-np.arange(0, size, 2) / size)
    angles = np.outer(positions, frequencies)

    def linear(x: Any, name: str) -> Any:
        y = x @ tensors[f"{name}.weight"].astype(np.float64).T
        return y + tensors[f"{name}.bias"] if f"{name}.bias" in tensors else y

    def norm(x: Any, name: str) -> Any:
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"])
        return x / scale * tensors[f"{name}.weight"]

    def split(x: Any, count: int) -> Any:
        return x.reshape(rows, count, size).transpose(1, 0, 2)

    def rotate(x: Any) -> Any:
        low, high = x[..., : size // 2], x[..., size // 2 :]
        cosine, sine = np.cos(angles), np.sin(angles)
        return np.concatenate([low * cosine - high * sine, high * cosine + low * sine], -1)

    x = tensors["model.embed_tokens.weight"].astype(np.float64)[ids]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        y = norm(x, f"{prefix}input_layernorm")
        q = rotate(split(linear(y, f"{prefix}self_attn.q_proj"), heads))
        k = rotate(split(linear(y, f"{prefix}self_attn.k_proj"), kv_heads)).repeat(heads // kv_heads, 0)
        v = split(linear(y, f"{prefix}self_attn.v_proj"), kv_heads).repeat(heads // kv_heads, 0)
        scores = np.where(allowed, q @ k.transpose(0, 2, 1) * size**-0.5, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (weights / weights.sum(-1, keepdims=True)) @ v
        x = x + linear(mixed.transpose(1, 0, 2).reshape(rows, -1), f"{prefix}self_attn.o_proj")
        y = norm(x, f"{prefix}post_attention_layernorm")
        gate = linear(y, f"{prefix}mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(y, f"{prefix}mlp.up_proj"), f"{prefix}mlp.down_proj")
    hidden = norm(x, "model.norm")
    head = tensors["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    return hidden @ head.astype(np.float64).T, hidden


def random_tree(rng: np.random.Generator, nodes: int) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """A random tree, parents first: which nodes each may see (its ancestors and itself), and its depth."""
    allowed = np.eye(nodes, dtype=bool)
    depth = np.zeros(nodes, np.int64)
    for node in range(1, nodes):
        parent = int(rng.integers(node))
        allowed[node] |= allowed[parent]
        depth[node] = depth[parent] + 1
    return allowed, depth


def session(path: Path) -> Any:
    """An ONNX Runtime session on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def changed(checkpoint: Checkpoint, **tensors: NDArray[np.float32] | None) -> Checkpoint:
    """The checkpoint with some tensors replaced (or, with None, taken out)."""
    merged = MemoryTensors({**checkpoint.tensors, **tensors})
    kept = MemoryTensors({name: tensor for name, tensor in merged.items() if tensor is not None})
    return dataclasses.replace(checkpoint, tensors=kept)
