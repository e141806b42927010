"""Reading a checkpoint's small files and arrays without trusting them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specedge.runtime.errors import CheckpointError

__all__ = ["brief", "check_finite", "parse_json", "read_json", "read_text", "spdx"]

MAX_TEXT_BYTES = 256 << 20
"""Larger than any tokenizer.json or index (Gemma 3's is 33 MB)."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SPDX = {"apache-2.0": "Apache-2.0", "mit": "MIT", "bsd-3-clause": "BSD-3-Clause", "cc-by-4.0": "CC-BY-4.0"}


def brief(value: object) -> str:
    """A value from a file as it may stand in a message: on one line, without control characters, not long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def read_text(path: Path) -> str:
    """A text file of bounded size.

    Raises:
        CheckpointError: It is missing, too large, or not UTF-8.
    """
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; is the checkpoint complete?")
        if path.stat().st_size > MAX_TEXT_BYTES:
            raise CheckpointError(f"{path} is over {MAX_TEXT_BYTES >> 20} MiB; this is no checkpoint file")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text (byte {error.start}); download it again") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def parse_json(text: str, where: str) -> dict[str, Any]:
    """A JSON object, strictly: no key twice, no NaN, no deep nesting.

    Raises:
        CheckpointError: The text is not such an object; `where` names it.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"key {brief(twice)} stands twice")
        return result

    def constant(name: str) -> float:
        # Old generation configs hold Infinity, e.g. for an unset length penalty; NaN has no use anywhere.
        if name == "NaN":
            raise ValueError("NaN is not allowed")
        return float(name)

    try:
        value = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except RecursionError as error:
        raise CheckpointError(f"{where} is nested too deeply") from error
    except ValueError as error:
        raise CheckpointError(f"{where} is not valid JSON: {error}") from error
    if _SURROGATE.search(text) and not _is_encodable(value):
        raise CheckpointError(f"{where} holds half a character (a lone surrogate), which cannot be written again")
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} must hold a JSON object, not {type(value).__name__}")
    return value


def _is_encodable(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; see `parse_json`.

    Raises:
        CheckpointError: The file cannot be read or is no such object.
    """
    return parse_json(read_text(path), str(path))


def check_finite(array: NDArray[np.float32], name: str, path: Path) -> NDArray[np.float32]:
    """Give the array back if every value is finite.

    Raises:
        CheckpointError: It holds NaN or infinity.
    """
    # The extremes carry NaN and infinity over, and need no mask as large as the tensor.
    if array.size and not (np.isfinite(array.max()) and np.isfinite(array.min())):
        raise CheckpointError(f"tensor {name} of {path} holds NaN or infinity; the file is damaged")
    return array


def spdx(name: str | None) -> str | None:
    """The SPDX spelling of a license name as model cards write it; unknown names stay as they are."""
    return _SPDX.get(name.lower(), name) if name else None
