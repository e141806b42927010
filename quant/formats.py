"""Number formats, one row each: the grid a linear layer's weight lies on, and what the activations are."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from specedge.quant.grid import Grid, round_nearest
from specedge.quant.layer import Layer, Quantiser
from specedge.runtime.errors import UsageError

__all__ = [
    "ALIASES",
    "DEVICES",
    "EMBEDDING",
    "FORMATS",
    "HEAD",
    "Format",
    "default_precision",
    "find_format",
    "grid_for",
    "is_row_invariant",
    "nearest",
]

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
"""Names of the vocabulary's two ends; a tied matrix is one layer, the embedding."""

_INVARIANT = {(3, 32), (4, 32), (8, 32), (8, 64)}
"""Bits and sizes of blocks that give a row the same bits in every pass."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Format:
    """One number format.

    Attributes:
        name: Of the row: "fp32", "fp16", "bf16", "int8", "int8-static", "int8-block", "int4", "int3", "fp8-e4m3",
            "fp8-e5m2" or "gguf".
        dtype: numpy name of the activations and the cache.
        grid: Where weights lie; None: they are plain floats of `dtype`. A grid over whole rows of
            the weight has its activations rounded to int8 as well; a grid in blocks leaves that
            to its operator.
        kept: Parts that have a grid of their own, or None for plain floats: "head" (the vocabulary),
            "first" and "last" (layers).
        static: Activations are rounded with a calibrated step, the same for all rows.
        emulated: No operator multiplies this grid: weights are rounded to it and stored as floats.
        explicit: Rounding stands in the graph as QuantizeLinear and DequantizeLinear, as a compiler wants it.
    """

    name: str
    dtype: str
    grid: Grid | None = None
    kept: tuple[tuple[str, Grid | None], ...] = ()
    static: bool = False
    emulated: bool = False
    explicit: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of an activation."""
        return 4 if self.dtype == "float32" else 2


def _blocks(bits: int, group: int, scale_dtype: str = "float16", *, symmetric: bool = True) -> Grid:
    return Grid("integer", bits, group, symmetric=symmetric, scale_dtype=scale_dtype)


def _float8(name: str, float_dtype: str) -> Format:
    return Format(name, "float32", Grid("float8", 8, float_dtype=float_dtype))


def _compiled(name: str, grid: Grid) -> Format:
    return Format(name, "float16", grid, kept=(("head", None),), static=True, explicit=True)


_ROWS = Grid("integer", 8, narrow=True)

# A draft's worth is how often its likeliest token is the target's. On answers of SmolLM2-135M (a
# dequantised Q4_1 file, whose grid affine blocks share): .75 with integer zero points, .78 with an
# 8-bit vocabulary matrix too, .97 with affine blocks.
_INT4 = Format("int4", "float32", Grid("affine", 4, 32, scale_dtype="float16"), kept=(("head", _blocks(8, 32)),))

# A grid over whole rows has no CUDA kernel, so CUDA gets 8-bit blocks; CUDA's attention has no
# fp32 kernel, so every row of CUDA computes in fp16.
FORMATS: dict[str, dict[str, Format]] = {
    "cpu": {
        row.name: row
        for row in (
            Format("fp32", "float32"),
            Format("fp16", "float16"),
            Format("int8", "float32", _ROWS),
            Format("int8-static", "float32", _ROWS, static=True),
            Format("int8-block", "float32", _blocks(8, 64, "float32")),
            _INT4,
            Format("int3", "float32", _blocks(3, 32), kept=(("head", _blocks(8, 32)),), emulated=True),
            _float8("fp8-e4m3", "float8_e4m3fn"),
            _float8("fp8-e5m2", "float8_e5m2"),
            Format("gguf", "float32"),
        )
    },
    "cuda": {
        row.name: row
        for row in (
            Format("fp16", "float16"),
            Format("bf16", "bfloat16"),
            Format("int8", "float16", _blocks(8, 32)),
            replace(_INT4, dtype="float16"),
        )
    },
    # TensorRT rounds activations by steps that are known when it compiles, and weights by outputs. It
    # keeps both ends of the vocabulary in floats: an embedding is no product.
    "tensorrt": {
        row.name: row
        for row in (
            Format("fp32", "float32"),
            Format("fp16", "float16"),
            _compiled("int8", _ROWS),
            _compiled("fp8-e4m3", Grid("float8", 8, float_dtype="float8_e4m3fn")),
        )
    },
}

ALIASES = {"fp8": "fp8-e4m3", "int8-rows": "int8"}

# A target pays for many rows (prompts, trees), where whole rows are cheapest; a draft runs one row
# at a time, where 8-bit blocks are: 8.7 to 11.8 ms a pass of SmolLM2-135M on one thread, and nearer to fp32.
_DRAFTS: dict[tuple[str, str], Format] = {
    ("cpu", "int8"): FORMATS["cpu"]["int8-block"],
}

DEVICES = tuple(FORMATS)
_DEFAULT = {"cpu": "fp32", "cuda": "fp16", "tensorrt": "fp16"}


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
        precision: Name of a row, "fp8" for "fp8-e4m3", or "int8-rows" for the row "int8" in a draft too.
        device: "cpu", "cuda" or "tensorrt".
        draft: The model drafts; it need not be good at many rows.

    Raises:
        UsageError: There is no such device, or no such precision on it.
    """
    rows = _rows(device)
    name = ALIASES.get(precision, precision)
    if name in rows:
        return _DRAFTS.get((device, precision), rows[name]) if draft else rows[name]
    if name.startswith("fp8-") and name in FORMATS["cpu"]:
        raise UsageError(
            f"precision {precision!r} is not available on device {device!r}: FP8 arithmetic needs compute capability "
            "8.9 or newer (Ada, Thor) and --device tensorrt; Orin has 8.7, so use int8 or int4 there"
        )
    raise UsageError(f"precision {precision!r} is not available on device {device!r}: choose one of {', '.join(rows)}")


def grid_for(form: Format, name: str, layers: int) -> Grid | None:
    """The grid of one linear layer; None: plain floats.

    Args:
        form: The model's number format.
        name: The layer's, as `Quantiser` knows it.
        layers: How many layers the model has.
    """
    kept, place = dict(form.kept), _place(name, layers)
    return kept.get(place, form.grid)


def is_row_invariant(form: Format) -> bool:
    """Whether a row's result is the same whatever runs with it, as a target's must be.

    In other blocks than `_INVARIANT` MatMulNBits takes another way for some numbers of rows (measured on x86).
    """
    grids = [grid for grid in (form.grid, *(grid for _, grid in form.kept)) if grid is not None]
    return all(grid.kind == "float8" or not grid.group or (grid.bits, grid.group) in _INVARIANT for grid in grids)


def nearest(form: Format, layers: int) -> Quantiser:
    """Rounds each weight to the nearest values of its grid, and compensates nothing."""

    def quantise(name: str, weight: NDArray[np.float32], bias: NDArray[np.float32] | None) -> Layer:
        grid = grid_for(form, name, layers)
        return Layer(weight if grid is None else round_nearest(weight, grid), bias)

    return quantise


def _place(name: str, layers: int) -> str:
    """Which part of a model a linear layer belongs to; "" for the middle."""
    if name in (EMBEDDING, HEAD):
        return "head"
    found = _LAYER.match(name)
    layer = int(found[1]) if found else -1
    return "first" if layer == 0 else "last" if layer == layers - 1 else ""


def _rows(device: str) -> dict[str, Format]:
    if device not in FORMATS:
        raise UsageError(f"device {device!r} is not available in this version: choose one of {', '.join(DEVICES)}")
    return FORMATS[device]
