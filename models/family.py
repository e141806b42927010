"""What a model family is: a frozen table of facts, and how its dimensions are read from a config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specedge.runtime.errors import CheckpointError, UnsupportedModelError

__all__ = ["Dimensions", "Family", "read_dimensions"]

_LARGEST = 1 << 31
_HEAD_STEP = 16  # half a head is rotated in vectors of 8
_NO_DEFAULT = object()


@dataclass(frozen=True)
class Family:
    """Facts of a family of decoders: pre-norm, RMSNorm, half-split rotary embedding, gated feed-forward.

    Attributes:
        name: Name of the family, as in the manifest.
        model_types: The `model_type` values of config.json that this family computes.
        activation: `hidden_act` of the gate; "silu".
        qkv_bias, output_bias, mlp_bias: The config key that says whether these layers have a bias; None: none has.
        tied: Whether the embedding is also the head where the config does not say.
        norm_eps: Epsilon of the norms where the config does not say.
        rope_theta: Base of the rotary embedding where the config does not say.
        window: The config key of a sliding attention window; None: there is none.
        embedding, final_norm, head: Tensor names.
        layer: Prefix of a layer's tensors.
        attention_norm, mlp_norm, q, k, v, output, gate, up, down: Modules inside a layer.
        ignored: Endings of tensor names that the computation does not need.
    """

    name: str
    model_types: tuple[str, ...]
    activation: str = "silu"
    qkv_bias: str | None = None
    output_bias: str | None = None
    mlp_bias: str | None = None
    tied: bool = False
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    window: str | None = None
    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    layer: str = "model.layers.{layer}."
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    output: str = "self_attn.o_proj"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class Dimensions:
    """Sizes and switches of one model, read from its config.json.

    Attributes:
        layers, heads, kv_heads, head_dim, hidden_size, mlp_size, vocab_size: Sizes.
        norm_eps: Epsilon of the norms.
        positions: Most positions the model was made for.
        qkv_bias, output_bias, mlp_bias: Whether these layers have a bias.
        tied: Whether the embedding is also the head.
        window: Rows a row may look back on; None: all.
        rope_theta: Base of the rotary embedding.
        rope_scaling: The config's rope_scaling; None: plain.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    mlp_size: int
    vocab_size: int
    norm_eps: float
    positions: int
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tied: bool
    window: int | None
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads; values have the same."""
        return self.kv_heads * self.head_dim


def read_dimensions(family: Family, config: Mapping[str, Any]) -> Dimensions:
    """Reads a model's sizes and switches.

    Args:
        family: The family that `model_type` names.
        config: Content of config.json.

    Raises:
        CheckpointError: A value is missing or makes no sense.
        UnsupportedModelError: The config asks for something the family's builder does not compute.
    """
    _refuse_other_computations(family, config)
    heads = _count(config, "num_attention_heads")
    hidden_size = _count(config, "hidden_size")
    kv_heads = _count(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        )
    head_dim = _count(config, "head_dim", hidden_size // heads)
    if head_dim % 2:
        raise CheckpointError(f"config.json: head_dim {head_dim} is odd, so it cannot be rotated in halves")
    if head_dim % _HEAD_STEP:
        raise UnsupportedModelError(
            f"config.json: head_dim {head_dim} is no multiple of {_HEAD_STEP}, and ONNX Runtime's attention rotates "
            "no other heads"
        )
    scaling = config.get("rope_scaling")
    if scaling is not None and not isinstance(scaling, Mapping):
        raise CheckpointError(f"config.json: rope_scaling is {scaling!r} where an object belongs")
    return Dimensions(
        layers=_count(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        mlp_size=_count(config, "intermediate_size"),
        vocab_size=_count(config, "vocab_size"),
        norm_eps=_positive(config, "rms_norm_eps", family.norm_eps),
        positions=_count(config, "max_position_embeddings", 2048),
        qkv_bias=_switch(config, family.qkv_bias),
        output_bias=_switch(config, family.output_bias),
        mlp_bias=_switch(config, family.mlp_bias),
        tied=_switch(config, "tie_word_embeddings", family.tied),
        window=_window(family, config),
        rope_theta=_positive(config, "rope_theta", family.rope_theta),
        rope_scaling=scaling,
    )


def _refuse_other_computations(family: Family, config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", family.activation)
    if activation != family.activation:
        raise UnsupportedModelError(
            f"config.json: hidden_act {activation!r} has no builder; family {family.name} has {family.activation!r}"
        )
    rotated = config.get("partial_rotary_factor")
    if rotated not in (None, 1):
        raise UnsupportedModelError(
            f"config.json: partial_rotary_factor {rotated!r} has no builder; family {family.name} rotates whole heads"
        )
    if config.get("rope_parameters") and "rope_theta" not in config:
        raise CheckpointError("config.json: rope_theta stands only in rope_parameters; read it to the top level first")


def _window(family: Family, config: Mapping[str, Any]) -> int | None:
    if family.window is None or config.get(family.window) is None:
        return None
    return _count(config, family.window)


def _count(config: Mapping[str, Any], key: str, default: object = _NO_DEFAULT) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is _NO_DEFAULT:
        raise CheckpointError(f"config.json: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _LARGEST:
        raise CheckpointError(f"config.json: {key} is {value!r} where a positive whole number belongs")
    return value


def _positive(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
        raise CheckpointError(f"config.json: {key} is {value!r} where a positive number belongs")
    return float(value)


def _switch(config: Mapping[str, Any], key: str | None, default: bool = False) -> bool:
    value = default if key is None else config.get(key, default)
    if value is None:
        value = default
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {key} is {value!r} where true or false belongs")
    return value
