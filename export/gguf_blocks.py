"""Blocks of a GGUF file as they are: the codes and scales that it holds, without rounding its weights again.

A block is 32 weights of one output (ggml-common.h of ggml):

    Q4_0    d, 16 bytes of k          w = d (k - 8)
    Q4_1    d, m, 16 bytes of k       w = d k + m = d (k - 8) + (m + 8 d)
    Q8_0    d, 32 bytes of k          w = d k

with d and m in 16-bit floats. A byte of 4-bit codes holds weight i in its low half and weight i + 16 in
its high half. All sums of 16-bit floats below 1 are exact in 32 bits, so the weights are the file's to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from specedge.export.checkpoint import RoundedTensors, Tensors
from specedge.models import Family
from specedge.quant.grid import Grid, Group, Rounded
from specedge.quant.layer import Layer, Quantiser
from specedge.runtime.errors import UsageError

__all__ = ["block_grids", "join_rows", "keep_blocks", "kept_bytes", "rounded_tensors", "take_rows", "unpack_blocks"]

Matrix = NDArray[np.float32]

_SIZE = 32
_HALF = 8  # the middle of 4-bit codes
_CHUNK = 1 << 18  # blocks unpacked at a time, which bounds the temporary arrays

_Q4_0 = Grid("integer", 4, _SIZE, scale_dtype="float16")
_Q4_1 = Grid("affine", 4, _SIZE, scale_dtype="float16")
_Q8_0 = Grid("integer", 8, _SIZE, scale_dtype="float16")


def block_grids() -> dict[int, Grid | None]:
    """The grid of each GGML number format that can be kept as it is; None: plain floats.

    Raises:
        MissingExtraError: gguf is not installed.
    """
    from gguf import GGMLQuantizationType as Kind

    return {
        int(Kind.F32): None,
        int(Kind.F16): None,
        int(Kind.BF16): None,
        int(Kind.Q4_0): _Q4_0,
        int(Kind.Q4_1): _Q4_1,
        int(Kind.Q8_0): _Q8_0,
    }


def unpack_blocks(raw: NDArray[np.uint8], grid: Grid) -> Rounded:
    """The weight that a file's blocks are.

    Args:
        raw: Bytes of the blocks, [out, bytes of a row].
        grid: From `block_grids`.
    """
    heads = 2 if grid.kind == "affine" else 1  # 16-bit floats before the codes
    blocks = raw.reshape(len(raw), -1, 2 * heads + _SIZE * grid.bits // 8)
    floats = np.ascontiguousarray(blocks[..., : 2 * heads]).view("<f2").astype(np.float32)
    scale = np.ascontiguousarray(floats[..., 0])
    shift = floats[..., 1] + _HALF * scale if grid.kind == "affine" else None
    count = blocks.shape[1]
    codes = np.empty((len(raw), count, _SIZE), np.int8)
    step = max(1, _CHUNK // count)
    for start in range(0, len(raw), step):
        packed = blocks[start : start + step, :, 2 * heads :]
        if grid.bits == 8:
            codes[start : start + step] = packed.view(np.int8)
        else:
            codes[start : start + step, :, : _SIZE // 2] = (packed & 15).view(np.int8) - _HALF
            codes[start : start + step, :, _SIZE // 2 :] = (packed >> 4).view(np.int8) - _HALF
    return Rounded(grid, codes.reshape(len(raw), -1), Group(scale, None, shift), count * _SIZE)


def take_rows(rounded: Rounded, order: NDArray[np.integer]) -> Rounded:
    """The outputs in another order."""
    group = rounded.group
    zero, shift = (None if array is None else array[order] for array in (group.zero, group.shift))
    return replace(rounded, codes=rounded.codes[order], group=Group(group.scale[order], zero, shift))


def join_rows(parts: Sequence[Rounded]) -> Rounded:
    """Weights of a file one above the other, on the smallest grid that holds the values of all.

    4-bit codes are 8-bit codes too, and a weight without a shift is one whose shift is zero: nothing is rounded.
    """
    grids = [part.grid for part in parts]
    grid = replace(_Q4_1 if _Q4_1 in grids else grids[0], bits=max(grid.bits for grid in grids))
    shift = None
    if grid.kind == "affine":
        shifts = [np.zeros_like(part.group.scale) if part.group.shift is None else part.group.shift for part in parts]
        shift = np.concatenate(shifts)
    scale = np.concatenate([part.group.scale for part in parts])
    return Rounded(grid, np.concatenate([part.codes for part in parts]), Group(scale, None, shift), parts[0].width)


def rounded_tensors(tensors: Tensors, source: str) -> RoundedTensors:
    """A checkpoint's tensors, if all of them can be kept as its file has them.

    Args:
        tensors: The checkpoint's.
        source: What the user calls the checkpoint.

    Raises:
        UsageError: It is no GGUF file.
        UnsupportedModelError: A tensor is of a number format that has no grid.
    """
    if not isinstance(tensors, RoundedTensors):
        raise UsageError(
            f"precision 'gguf' keeps the blocks of a GGUF file, which {source} is not; export with int4 or int8 instead"
        )
    for name in tensors:
        tensors.grid(name)
    return tensors


def kept_bytes(tensors: RoundedTensors, tied_head: str | None = None) -> int:
    """About what a checkpoint's tensors take when they are stored as its file has them.

    Args:
        tensors: The checkpoint's.
        tied_head: Name of a tensor that repeats the embedding; not stored.
    """
    size = 0.0
    for name in tensors:
        if name != tied_head:
            grid = tensors.grid(name)
            floats = 0 if grid is None else 2 if grid.kind == "affine" else 1  # of 16 bits, for a block
            each = 4 if grid is None else grid.bits / 8 + 2 * floats / grid.group
            size += math.prod(tensors.shape(name)) * each
    return math.ceil(size * 1.01)


def keep_blocks(tensors: RoundedTensors, family: Family) -> Quantiser:
    """Stores each layer as its file has it: blocks as they are, floats as floats.

    Joined layers whose parts differ are stored on a grid that holds both, or in floats where a part is.
    """
    modules = {
        "self_attn.qkv_proj": (family.q, family.k, family.v),
        "self_attn.o_proj": (family.output,),
        "mlp.gate_proj": (family.gate,),
        "mlp.up_proj": (family.up,),
        "mlp.down_proj": (family.down,),
    }
    ends = {"model.embed_tokens": family.embedding, "lm_head": family.head}

    def quantise(name: str, weight: Matrix, bias: Matrix | None) -> Layer:
        if name in ends:
            names = [ends[name]]
        else:
            layer, module = name.removeprefix("model.layers.").split(".", 1)
            names = [f"{family.layer.format(layer=layer)}{part}.weight" for part in modules[module]]
        if any(tensors.grid(part) is None for part in names):
            return Layer(weight, bias)
        parts = [rounded for part in names if (rounded := tensors.rounded(part)) is not None]
        return Layer(join_rows(parts), bias)

    return quantise
