"""Number formats, one row each: how a linear layer's weight is stored and what the activations are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from specedge.runtime.errors import UsageError

__all__ = ["DEVICES", "FORMATS", "Format", "default_precision", "find_format"]

Kind = Literal["dense", "blocks", "affine", "columns"]


@dataclass(frozen=True)
class Format:
    """One number format.

    Attributes:
        name: "fp32", "fp16", "int8" or "int4".
        kind: "dense": plain floats; "blocks": integers with a scale for each block of a row of the
            weight (MatMulNBits); "affine": such blocks with a real minimum (quant/affine.py);
            "columns": int8 with one scale for each output, activations quantised row by row.
        dtype: numpy name of the activations, the cache and the scales.
        bits: Bits of a weight.
        block_size: Weights that share a scale, where kind is "blocks" or "affine".
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


# A draft's worth is how often its likeliest token is the target's. On answers of SmolLM2-135M (a
# dequantised Q4_1 file, whose grid affine blocks share): .75 with integer zero points, .78 with an
# 8-bit vocabulary matrix too, .97 with affine blocks.
_INT4 = Format("int4", "affine", "float32", 4, block_size=32, head_bits=8)

# The per-column int8 form has no CUDA kernel, so CUDA gets 8-bit blocks; CUDA's attention has no
# fp32 kernel, so every row of CUDA computes in fp16.
FORMATS: dict[str, dict[str, Format]] = {
    "cpu": {
        "fp32": Format("fp32", "dense", "float32", 32),
        "fp16": Format("fp16", "dense", "float16", 16),
        "int8": Format("int8", "columns", "float32", 8),
        "int4": _INT4,
    },
    "cuda": {
        "fp16": Format("fp16", "dense", "float16", 16),
        "int8": Format("int8", "blocks", "float16", 8, block_size=32),
        "int4": replace(_INT4, dtype="float16"),
    },
}

# A target pays for many rows (prompts, trees), where int8 columns are cheapest; a draft runs one row
# at a time, where 8-bit blocks are: 8.7 to 11.8 ms a pass of SmolLM2-135M on one thread, and nearer to fp32.
_DRAFTS: dict[tuple[str, str], Format] = {
    ("cpu", "int8"): Format("int8", "blocks", "float32", 8, block_size=64),
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


def find_format(precision: str, device: str = "cpu", *, draft: bool = False) -> Format:
    """The row of a precision on a device.

    Args:
        precision: "fp32", "fp16", "int8" or "int4".
        device: "cpu" or "cuda".
        draft: The model drafts; it need not be good at many rows.

    Raises:
        UsageError: There is no such device, or no such precision on it.
    """
    rows = _rows(device)
    if precision not in rows:
        raise UsageError(
            f"precision {precision!r} is not available on device {device!r}: choose one of {', '.join(rows)}"
        )
    return _DRAFTS.get((device, precision), rows[precision]) if draft else rows[precision]


def _rows(device: str) -> dict[str, Format]:
    if device not in FORMATS:
        raise UsageError(f"device {device!r} is not available in this version: choose one of {', '.join(DEVICES)}")
    return FORMATS[device]
