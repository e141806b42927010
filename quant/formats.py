"""Number formats, one row each: how a linear layer's weight is stored and what the activations are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specedge.runtime.errors import UsageError

__all__ = ["DEVICES", "FORMATS", "Format", "default_precision", "find_format"]

Kind = Literal["dense", "blocks", "columns"]


@dataclass(frozen=True)
class Format:
    """One number format.

    Attributes:
        name: "fp32", "fp16", "int8" or "int4".
        kind: "dense": plain floats; "blocks": integers with a scale for each block of a row of the
            weight (MatMulNBits); "columns": int8 with one scale for each output, activations
            quantised row by row.
        dtype: numpy name of the activations, the cache and the scales.
        bits: Bits of a weight.
        block_size: Weights that share a scale, where kind is "blocks".
        symmetric: Whether zero is always the middle of the range (no zero points).
        head_bits: Bits of the vocabulary matrix; None: as the rest.
    """

    name: str
    kind: Kind
    dtype: str
    bits: int
    block_size: int = 0
    symmetric: bool = True
    head_bits: int | None = None


# Block-32 INT4 is asymmetric: as a draft of its own fp32 model it is accepted far more often than a
# symmetric one. The per-column int8 form has no CUDA kernel, so CUDA gets 8-bit blocks; its
# attention has no fp32 kernel, so every CUDA row computes in fp16.
FORMATS: dict[str, dict[str, Format]] = {
    "cpu": {
        "fp32": Format("fp32", "dense", "float32", 32),
        "fp16": Format("fp16", "dense", "float16", 16),
        "int8": Format("int8", "columns", "float32", 8),
        "int4": Format("int4", "blocks", "float32", 4, block_size=32, symmetric=False),
    },
    "cuda": {
        "fp16": Format("fp16", "dense", "float16", 16),
        "int8": Format("int8", "blocks", "float16", 8, block_size=32),
        "int4": Format("int4", "blocks", "float16", 4, block_size=32, symmetric=False),
    },
}

DEVICES = tuple(FORMATS)
_DEFAULT = {"cpu": "fp32", "cuda": "fp16"}


def default_precision(device: str) -> str:
    """The precision a device gets where none is asked for.

    Raises:
        UsageError: There is no such device.
    """
    _rows(device)
    return _DEFAULT[device]


def find_format(precision: str, device: str = "cpu") -> Format:
    """The row of a precision on a device.

    Raises:
        UsageError: There is no such device, or no such precision on it.
    """
    rows = _rows(device)
    if precision not in rows:
        raise UsageError(
            f"precision {precision!r} is not available on device {device!r}: choose one of {', '.join(rows)}"
        )
    return rows[precision]


def _rows(device: str) -> dict[str, Format]:
    if device not in FORMATS:
        raise UsageError(f"device {device!r} is not available in this version: choose one of {', '.join(DEVICES)}")
    return FORMATS[device]
