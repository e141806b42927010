"""How much disk and memory an export takes, estimated before it begins."""

from __future__ import annotations

import ctypes
import gc
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specedge.export.checkpoint import Tensors
from specedge.quant.formats import HEAD, Format, grid_for
from specedge.quant.grid import Grid

__all__ = ["Estimate", "count_parameters", "estimate", "release_memory", "stored_bytes"]

_SUMS = 0.12  # affine blocks: two more blocks for each block of blocks, and padding
_BASE = 220 << 20  # Python, numpy, onnx and ONNX Runtime
_TORCH = 480 << 20  # the same with PyTorch and transformers


@dataclass(frozen=True)
class Estimate:
    """What an export takes, in bytes.

    Attributes:
        disk: Size of the bundle.
        memory: Peak resident memory of the largest process.
        target: Size of the target's weights, part of `disk`.
        drafts: Size of all drafts' weights, part of `disk`.
    """

    disk: int
    memory: int
    target: int
    drafts: int


def count_parameters(tensors: Tensors, tied_head: str | None = None) -> tuple[int, int]:
    """Number of weights in all, and in the largest tensor.

    Args:
        tensors: The checkpoint's.
        tied_head: Name of a tensor that repeats the embedding; not counted.
    """
    sizes = [math.prod(tensors.shape(name)) for name in tensors if name != tied_head]
    return sum(sizes), max(sizes, default=0)


def stored_bytes(parameters: int, largest: int, form: Format) -> int:
    """Bytes that weights take in a number format, scales and zero points included.

    Args:
        parameters, largest: From `count_parameters`; the largest is taken for the vocabulary matrix.
        form: The number format.
    """
    rest, head = (_bytes_each(grid_for(form, name, 1), form) for name in ("", HEAD))
    return math.ceil(((parameters - largest) * rest + largest * head) * 1.01)


def _bytes_each(grid: Grid | None, form: Format) -> float:
    """Bytes of a weight, and its share of what its group has."""
    if grid is None or grid.bits == 3:
        return float(form.itemsize)
    scale = np.dtype(grid.scale_dtype).itemsize
    zero = grid.bits / 8 if grid.kind == "integer" and not grid.symmetric else 0.0
    size = grid.bits / 8 + (scale + zero) / (grid.group or 1024)
    return size * (1 + _SUMS) if grid.kind == "affine" else size


def estimate(
    parameters: int, largest: int, stored: int, drafted: Sequence[int], *, check: bool, torch: bool
) -> Estimate:
    """Estimates disk and peak memory.

    Writing holds one tensor in fp32 and what it becomes; checking holds a graph's weights
    as mapped and as ONNX Runtime packs them; PyTorch holds them once in fp32, and the embedding
    again while it is read.

    Args:
        parameters, largest: Of the target, from `count_parameters`.
        stored: Bytes of the target's weights as they will be stored (`stored_bytes`).
        drafted: The same of each draft.
        check: Whether the graphs will be run.
        torch: Whether PyTorch will be run.
    """
    peaks = [_BASE + 3 * 4 * largest]
    if check:
        peaks.append(_BASE + 2 * max([stored, *drafted]))
    if check and torch:
        peaks.append(_TORCH + 4 * (parameters + 2 * largest))
    return Estimate(stored + sum(drafted) + (16 << 20), max(peaks), stored, sum(drafted))


def release_memory() -> None:
    """Gives freed memory back to the system, which malloc alone puts off, before the next model is loaded."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:  # glibc
        trim(0)
