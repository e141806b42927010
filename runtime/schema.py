"""Closed schemas: JSON of an untrusted file into dataclasses, nothing unknown, missing, twice or of another type."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NoReturn

__all__ = ["fields_of", "mapping_of", "one_line", "parse_json"]

_MAX_DEPTH = 32

_KINDS: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "str": (str,),
    "str | None": (str, type(None)),
    "int | None": (int, type(None)),
    "tuple[int, ...]": (list,),
}


def fields_of(cls: type, raw: Any, where: str) -> dict[str, Any]:
    """Takes a dataclass's fields out of JSON; unknown, missing and wrongly typed ones are errors."""
    mapping = dict(mapping_of(raw, where))
    values: dict[str, Any] = {}
    for item in dataclasses.fields(cls):
        if item.name in mapping:
            value = mapping.pop(item.name)
            kinds = _KINDS.get(str(item.type))
            if (isinstance(value, bool) and kinds != (bool,)) or (kinds is not None and not isinstance(value, kinds)):
                raise ValueError(f"{where}: {item.name} is {one_line(value)}")
            values[item.name] = value
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where}: {item.name} is missing")
        elif item.default is not dataclasses.MISSING:
            values[item.name] = item.default
    if mapping:
        raise ValueError(f"{where}: unknown key {one_line(min(mapping))}")
    return values


def mapping_of(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is not an object")
    return value


def parse_json(text: str) -> Any:
    """JSON without duplicate keys, NaN or deep nesting.

    Raises:
        ValueError: It is not such JSON.
        RecursionError: It is nested deeper than Python can read.
    """
    raw = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    _check_depth(raw)
    return raw


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _check_depth(value: Any, depth: int = 0) -> None:
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for child in children:
        _check_depth(child, depth + 1)


def one_line(value: object) -> str:
    """A value of an untrusted file, short and without control characters."""
    text = str(value) if isinstance(value, Exception) else repr(value)
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= 160 else text[:157] + "..."
