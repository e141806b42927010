"""The model families there is a builder for: one file and one row each."""

from __future__ import annotations

from typing import Any

from specedge.models.family import Dimensions, Family, read_dimensions
from specedge.models.llama import LLAMA, MISTRAL
from specedge.runtime.errors import UnsupportedModelError

__all__ = ["FAMILIES", "Dimensions", "Family", "find_family", "known_model_types", "read_dimensions"]

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
)

_BY_TYPE = {model_type: family for family in FAMILIES for model_type in family.model_types}


def known_model_types() -> tuple[str, ...]:
    """Every `model_type` that `find_family` knows."""
    return tuple(sorted(_BY_TYPE))


def find_family(model_type: Any) -> Family:
    """The family that computes a `model_type` of config.json.

    Raises:
        UnsupportedModelError: No builder covers it.
    """
    family = _BY_TYPE.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        known = ", ".join(known_model_types())
        raise UnsupportedModelError(f"config.json: no builder for model_type {model_type!r}; there is one for: {known}")
    return family
