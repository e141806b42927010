"""Rotary embedding: inverse frequencies with their scalings, and the tables of cosines and sines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specedge.models import Dimensions
from specedge.runtime.errors import CheckpointError, UnsupportedModelError

__all__ = ["inverse_frequencies", "rotary_tables"]

Doubles = NDArray[np.float64]


def inverse_frequencies(dimensions: Dimensions) -> Doubles:
    """Angle per position of each rotated pair, [head_dim / 2] (RoFormer, arXiv 2104.09864), scaling applied.

    Raises:
        UnsupportedModelError: The scaling has no builder.
        CheckpointError: A parameter of the scaling is missing or makes no sense.
    """
    pairs = np.arange(0, dimensions.head_dim, 2, dtype=np.float64)
    plain = dimensions.rope_theta ** (-pairs / dimensions.head_dim)
    scaling = dimensions.rope_scaling
    if not scaling:
        return plain
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in _SCALINGS:
        raise UnsupportedModelError(
            f"config.json: rope_scaling of type {kind!r} has no builder; there is one for: {', '.join(_SCALINGS)}"
        )
    return _SCALINGS[kind](plain, scaling)


def rotary_tables(dimensions: Dimensions, rows: int) -> tuple[Doubles, Doubles]:
    """Cosines and sines for positions 0 to rows - 1, each [rows, head_dim / 2], in float64."""
    angles = np.outer(np.arange(rows, dtype=np.float64), inverse_frequencies(dimensions))
    return np.cos(angles), np.sin(angles)


def _default(plain: Doubles, _: Mapping[str, Any]) -> Doubles:
    return plain


def _linear(plain: Doubles, scaling: Mapping[str, Any]) -> Doubles:
    """Positions divided by a factor (arXiv 2306.15595)."""
    return plain / _number(scaling, "factor")


def _llama3(plain: Doubles, scaling: Mapping[str, Any]) -> Doubles:
    """Llama 3.1: long waves are stretched, short ones kept, those between blended.

    Formula: transformers, modeling_rope_utils.py, `_compute_llama3_parameters`.
    """
    factor = _number(scaling, "factor")
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    original = _number(scaling, "original_max_position_embeddings")
    if high <= low:
        raise CheckpointError(
            f"config.json: rope_scaling's high_freq_factor {high} is not above its low_freq_factor {low}"
        )
    waves = 2 * math.pi / plain
    blend = np.clip((original / waves - low) / (high - low), 0.0, 1.0)
    return (1 - blend) * plain / factor + blend * plain


_SCALINGS = {"default": _default, "linear": _linear, "llama3": _llama3}


def _number(scaling: Mapping[str, Any], key: str) -> float:
    value = scaling.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
        raise CheckpointError(f"config.json: rope_scaling's {key} is {value!r} where a positive number belongs")
    return float(value)
