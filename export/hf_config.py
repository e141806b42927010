"""Hugging Face's configuration files in one spelling, whichever version of transformers wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specedge.export.reading import brief
from specedge.runtime.errors import CheckpointError

__all__ = ["end_ids", "normalise_config"]

# Families whose rope_theta, where a config leaves it out, is 10,000 (the default of their config class).
_THETA_10000 = {"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3"}


def normalise_config(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """A config.json with rope_theta, rope_scaling and torch_dtype at top level, and nowhere else.

    transformers 5 writes rope_theta and the scaling into `rope_parameters` and torch_dtype as `dtype`.

    Args:
        config: Content of config.json.
        path: The file, for messages.

    Raises:
        CheckpointError: Two places contradict each other, or a value has the wrong type.
    """
    result = dict(config)
    _move_rope(result, path)
    if "dtype" in result:
        _put(result, "torch_dtype", result.pop("dtype"), path)
    return result


def _move_rope(config: dict[str, Any], path: Path) -> None:
    parameters = config.pop("rope_parameters", None)
    scaling = _scaling(config.pop("rope_scaling", None), path)
    if parameters is not None and not isinstance(parameters, dict):
        raise CheckpointError(f"{path}: rope_parameters is {brief(parameters)} where an object belongs")
    if parameters and all(isinstance(value, dict) for value in parameters.values()):
        parameters = _by_layer_type(config, parameters, path)
    if parameters:
        parameters = dict(parameters)
        if "rope_theta" in parameters:
            _put(config, "rope_theta", parameters.pop("rope_theta"), path)
        if "partial_rotary_factor" in parameters:
            _put(config, "partial_rotary_factor", parameters.pop("partial_rotary_factor"), path)
        inner = _scaling(parameters, path)
        if scaling is not None and scaling != inner:
            raise CheckpointError(f"{path}: rope_scaling and rope_parameters contradict each other; keep one of them")
        scaling = inner
    if config.get("rope_theta") is None:
        config.pop("rope_theta", None)
        if config.get("model_type") in _THETA_10000:
            config["rope_theta"] = 10000.0
    config["rope_scaling"] = scaling


def _by_layer_type(config: dict[str, Any], parameters: dict[str, Any], path: Path) -> dict[str, Any]:
    """Parameters of each layer type: those of full attention count; sliding attention's base gets its old key."""
    if not {"full_attention"} <= set(parameters) <= {"full_attention", "sliding_attention"}:
        raise CheckpointError(f"{path}: rope_parameters has the unknown layer types {brief(sorted(parameters))}")
    sliding = parameters.get("sliding_attention", {})
    if _scaling({key: value for key, value in sliding.items() if key != "rope_theta"}, path) is not None:
        raise CheckpointError(f"{path}: a rope scaling of sliding attention cannot be exported")
    if "rope_theta" in sliding:
        _put(config, "rope_local_base_freq", sliding["rope_theta"], path)
    return dict(parameters["full_attention"])


def _scaling(value: object, path: Path) -> dict[str, Any] | None:
    """A scaling with its type under `rope_type`; None if it changes nothing."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: rope_scaling is {brief(value)} where an object belongs")
    scaling = dict(value)
    old, new = scaling.pop("type", None), scaling.pop("rope_type", None)
    if old is not None and new is not None and old != new:
        raise CheckpointError(
            f"{path}: rope_scaling has type {brief(old)} and rope_type {brief(new)}; keep one of them"
        )
    kind = new if new is not None else old
    if kind == "default" or (kind is None and not scaling):
        return None
    if kind is None:
        raise CheckpointError(f"{path}: rope_scaling has no rope_type; add it, e.g. linear")
    return {"rope_type": kind, **scaling}


def _put(config: dict[str, Any], key: str, value: Any, path: Path) -> None:
    """Set a key that may be there already, with the same value."""
    if config.get(key) is not None and value is not None and config[key] != value:
        raise CheckpointError(f"{path} gives {key} twice: {brief(config[key])} and {brief(value)}; keep one of them")
    if value is not None:
        config[key] = value


def end_ids(*configs: Mapping[str, Any]) -> list[int]:
    """The end-of-text ids that the first config to name any of them has.

    Raises:
        CheckpointError: They are not whole numbers.
    """
    for config in configs:
        value = config.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(item) is int and item >= 0 for item in ids):
            raise CheckpointError(f"eos_token_id is {brief(value)} where a token id or a list of them belongs")
        return list(dict.fromkeys(ids))
    return []
