"""config.json and generation_config.json from the metadata of a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from specedge.export.gguf_file import GgufFile, GgufTensors
from specedge.export.reading import brief
from specedge.runtime.errors import CheckpointError, UnsupportedModelError

__all__ = ["ARCHITECTURES", "Architecture", "gguf_config", "gguf_generation", "gguf_tensors", "token_id"]

Number = TypeVar("Number", int, float)

# GGUF name -> Hugging Face name; {} is the layer.
_LLAMA_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blk.{}.attn_norm.weight": "model.layers.{}.input_layernorm.weight",
    "blk.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "blk.{}.attn_q.weight": "model.layers.{}.self_attn.q_proj.weight",
    "blk.{}.attn_k.weight": "model.layers.{}.self_attn.k_proj.weight",
    "blk.{}.attn_v.weight": "model.layers.{}.self_attn.v_proj.weight",
    "blk.{}.attn_output.weight": "model.layers.{}.self_attn.o_proj.weight",
    "blk.{}.attn_q.bias": "model.layers.{}.self_attn.q_proj.bias",
    "blk.{}.attn_k.bias": "model.layers.{}.self_attn.k_proj.bias",
    "blk.{}.attn_v.bias": "model.layers.{}.self_attn.v_proj.bias",
    "blk.{}.attn_output.bias": "model.layers.{}.self_attn.o_proj.bias",
    "blk.{}.ffn_gate.weight": "model.layers.{}.mlp.gate_proj.weight",
    "blk.{}.ffn_up.weight": "model.layers.{}.mlp.up_proj.weight",
    "blk.{}.ffn_down.weight": "model.layers.{}.mlp.down_proj.weight",
    "blk.{}.ffn_gate.bias": "model.layers.{}.mlp.gate_proj.bias",
    "blk.{}.ffn_up.bias": "model.layers.{}.mlp.up_proj.bias",
    "blk.{}.ffn_down.bias": "model.layers.{}.mlp.down_proj.bias",
}


@dataclass(frozen=True)
class Architecture:
    """One value of general.architecture.

    Attributes:
        model_type: Hugging Face's name of the family.
        class_name: For `architectures` in config.json.
        names: Hugging Face tensor names by GGUF names; {} is the layer.
        interleaved: Whether q and k rows are stored for interleaved rotation.
        facts: Further entries of config.json that all models of the family share.
    """

    model_type: str
    class_name: str
    names: Mapping[str, str]
    interleaved: bool
    facts: Mapping[str, Any]


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", _LLAMA_NAMES, True, {"hidden_act": "silu"}),
}

# Keys that change what the model computes and that no row above knows of; zero or false means: not used.
_FOREIGN = (
    "expert_count",
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "attention.scale",
    "attention.clamp_kqv",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "use_parallel_residual",
)
# Tensors that say nothing the metadata does not say.
_IGNORED = re.compile(r"rope_freqs\.weight|blk\.\d+\.(attn_rot_embd|rope_freqs)\.weight")


class _Metadata:
    """Typed access to the metadata of one architecture."""

    def __init__(self, file: GgufFile) -> None:
        self.values, self.path = file.metadata, file.path
        name = self.values.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise UnsupportedModelError(
                f"{self.path} holds the architecture {brief(name)}; GGUF files of {known} can be read"
            )
        self.name = name

    def has(self, key: str) -> bool:
        """Whether ARCHITECTURE.key is there and neither zero nor false nor empty."""
        value = self.values.get(f"{self.name}.{key}")
        return bool(value.size if isinstance(value, np.ndarray) else value)

    def get(self, key: str, kind: type[Number], default: Number | None = None) -> Number:
        """The positive value of ARCHITECTURE.key; without a default it must be there."""
        full = f"{self.name}.{key}"
        value: Any = self.values.get(full, default)
        if kind is float and isinstance(value, float):
            # Stored as float32; the shortest decimal gives back what config.json said (1e-05, not 9.9999997e-06).
            value = float(str(np.float32(value)))
        if value is None and default is None:
            raise CheckpointError(f"{self.path} lacks the key {full}; convert the model again")
        if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < 2**53:
            raise CheckpointError(f"{self.path}: {full} is {brief(value)} where a positive {kind.__name__} belongs")
        return value


def gguf_tensors(file: GgufFile) -> GgufTensors:
    """The file's tensors by their Hugging Face names.

    Raises:
        UnsupportedModelError: The architecture, or a tensor that it should not have, is unknown.
        CheckpointError: The metadata is incomplete.
    """
    metadata = _Metadata(file)
    architecture = ARCHITECTURES[metadata.name]
    names: dict[str, str] = {}
    for stored in file.tensors:
        if _IGNORED.fullmatch(stored):
            continue
        match = re.fullmatch(r"(blk\.)(0|[1-9]\d{0,5})(\..+)", stored)
        pattern, layer = (match[1] + "{}" + match[3], match[2]) if match else (stored, "")
        if pattern not in architecture.names:
            raise UnsupportedModelError(f"{file.path}: tensor {brief(stored)} is no part of a {metadata.name} model")
        names[architecture.names[pattern].format(layer)] = stored
    heads = metadata.get("attention.head_count", int)
    kinds = {"q_proj": heads, "k_proj": metadata.get("attention.head_count_kv", int, heads)}
    interleaved = {
        name: count
        for name in names
        for part, count in kinds.items()
        if f".{part}." in name and architecture.interleaved
    }
    for name, count in interleaved.items():
        if file.tensors[names[name]].shape[0] % (2 * count):
            raise CheckpointError(f"{file.path}: tensor {names[name]!r} cannot be cut into {count} heads")
    return GgufTensors(file, names, interleaved)


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """What config.json of the model says.

    Raises:
        UnsupportedModelError: The architecture or a feature is unknown.
        CheckpointError: The metadata is incomplete or contradicts the tensors.
    """
    metadata = _Metadata(file)
    architecture = ARCHITECTURES[metadata.name]
    for key in _FOREIGN:
        if metadata.has(key):
            raise UnsupportedModelError(f"{file.path}: a {metadata.name} model with {key} cannot be exported")
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"tensor token_embd.weight is missing in {file.path}; download it again")
    shape = file.tensors["token_embd.weight"].shape
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if len(shape) != 2 or shape[1] != metadata.get("embedding_length", int):
        raise CheckpointError(f"{file.path}: embedding_length contradicts the embedding's shape, {shape}")
    if isinstance(tokens, list) and len(tokens) > shape[0]:
        raise CheckpointError(f"{file.path} lists {len(tokens):,} tokens but embeds {shape[0]:,}; download it again")
    vocabulary, hidden = shape
    heads = metadata.get("attention.head_count", int)
    head = metadata.get("attention.key_length", int, hidden // heads)
    if metadata.get("attention.value_length", int, head) != head:
        raise UnsupportedModelError(f"{file.path}: values of another width than keys cannot be exported")
    if metadata.get("rope.dimension_count", int, head) != head:
        raise UnsupportedModelError(f"{file.path}: a rotation of only a part of each head cannot be exported")
    theta = metadata.get("rope.freq_base", float, 10000.0)
    config = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "intermediate_size": metadata.get("feed_forward_length", int),
        "num_hidden_layers": metadata.get("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("attention.head_count_kv", int, heads),
        "head_dim": head,
        "rms_norm_eps": metadata.get("attention.layer_norm_rms_epsilon", float),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, metadata, theta, head),
        "max_position_embeddings": metadata.get("context_length", int),
        "vocab_size": vocabulary,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        **architecture.facts,
        **_ids(file, vocabulary),
    }
    if config["attention_bias"] != ("blk.0.attn_output.bias" in file.tensors):
        raise UnsupportedModelError(
            f"{file.path}: q has a bias where o has none, or the reverse; no such family is known"
        )
    if metadata.has("attention.sliding_window"):
        # llama.cpp files Mistral under llama; only its own family looks at the window.
        config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
        config["sliding_window"] = metadata.get("attention.sliding_window", int)
    return config


def _rope_scaling(file: GgufFile, metadata: _Metadata, theta: float, head: int) -> dict[str, Any] | None:
    """rope_scaling as config.json has it; None for plain rotation."""
    if "rope_freqs.weight" in file.tensors:
        return _from_factors(file, metadata, theta, head)
    kind = file.metadata.get(f"{metadata.name}.rope.scaling.type", "none")
    if isinstance(kind, str) and kind == "none":
        factor = metadata.get("rope.scale_linear", float, 1.0)
        return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    factor = metadata.get("rope.scaling.factor", float)
    if isinstance(kind, str) and kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if isinstance(kind, str) and kind == "yarn":
        original = metadata.get("rope.scaling.original_context_length", int)
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise UnsupportedModelError(f"{file.path}: rope scaling {brief(kind)} cannot be exported")


def _from_factors(file: GgufFile, metadata: _Metadata, theta: float, head: int) -> dict[str, Any]:
    """The parameters of Llama 3.1's scaling from the divisors of the frequencies that the converter stored.

    The converter keeps only the divisors. All published models share low 1, high 4 and 8192 positions; where these
    do not give the divisors back, the divisors themselves are handed on, in the form of longrope.
    """
    divisors = file.read("rope_freqs.weight").reshape(-1)
    if divisors.shape != (head // 2,) or divisors.min() <= 0:
        raise CheckpointError(f"{file.path}: rope_freqs.weight must hold {head // 2} positive numbers")
    factor = float(str(divisors.max()))
    for original in (8192, 4096, 16384, 32768):
        if np.allclose(_llama3_divisors(theta, head, factor, original), divisors, rtol=1e-5, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
    listed = [float(value) for value in divisors]
    return {
        "rope_type": "longrope",
        "long_factor": listed,
        "short_factor": listed,
        "attention_factor": 1.0,
        "original_max_position_embeddings": metadata.get("context_length", int),
    }


def _llama3_divisors(theta: float, head: int, factor: float, original: int) -> np.ndarray[Any, Any]:
    """What Llama 3.1's scaling divides each frequency by: 1 for short waves, `factor` for long ones, [head / 2]."""
    wavelength = 2 * np.pi * theta ** (np.arange(0, head, 2) / head)
    smooth = np.clip((original / wavelength - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    return np.asarray(1 / ((1 - smooth) / factor + smooth))


def _ids(file: GgufFile, vocabulary: int) -> dict[str, int]:
    """Special token ids that the file names."""
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids = {ours: token_id(file.metadata, theirs, vocabulary, file.path) for ours, theirs in keys.items()}
    return {key: value for key, value in ids.items() if value is not None}


def token_id(metadata: Mapping[str, Any], kind: str, vocabulary: int, path: Path) -> int | None:
    """The id of a special token, e.g. "bos"; None if the file names none.

    Raises:
        CheckpointError: The id is outside the vocabulary.
    """
    value = metadata.get(f"tokenizer.ggml.{kind}_token_id")
    if value is None or (isinstance(value, int) and value == 0xFFFFFFFF):  # llama.cpp's way to say none
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocabulary:
        raise CheckpointError(f"{path}: the {kind} token {brief(value)} is outside the vocabulary of {vocabulary:,}")
    return value


def gguf_generation(file: GgufFile, vocabulary: int) -> dict[str, Any]:
    """What generation_config.json says: every id that ends a text, as a list.

    Raises:
        CheckpointError: An id is outside the vocabulary.
    """
    ends = [token_id(file.metadata, kind, vocabulary, file.path) for kind in ("eos", "eot", "eom")]
    return {**_ids(file, vocabulary), "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None))}
