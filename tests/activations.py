"""Activations as trained decoders have them: correlated, of non-zero mean, with a few channels far larger."""

from __future__ import annotations

import numpy as np

from specedge.quant.grid import Grid
from specedge.quant.moments import Moments, MomentsSum

GRIDS = {
    "int4-sym-b32": Grid("integer", 4, 32, scale_dtype="float16"),
    "int4-sym-b64": Grid("integer", 4, 64, scale_dtype="float16"),
    "int4-asym-b64": Grid("integer", 4, 64, symmetric=False, scale_dtype="float16"),
    "int4-affine-b32": Grid("affine", 4, 32, scale_dtype="float16"),
    "int3-sym-b32": Grid("integer", 3, 32),
    "int8-block": Grid("integer", 8, 64),
    "int8-rows": Grid("integer", 8, narrow=True),
    "fp8-e4m3": Grid("float8", 8, float_dtype="float8_e4m3fn"),
    "fp8-e5m2": Grid("float8", 8, float_dtype="float8_e5m2"),
}


def activations(rng: np.random.Generator, width: int, *, parts: int = 2) -> list[np.ndarray]:
    """`parts` independent sets of rows, [2048, width], of one law."""
    mixing = np.eye(width) + rng.standard_normal((width, width)) / np.sqrt(width)
    mean = rng.standard_normal(width) * 0.5
    size = np.where(rng.random(width) < 0.03, 12, 1) * rng.uniform(0.5, 1.5, width)
    rows = [(rng.standard_normal((2048, width)) @ mixing + mean) * size for _ in range(parts)]
    return [part.astype(np.float32) for part in rows]


def moments_of(rows: np.ndarray) -> Moments:
    """The moments of rows, added in batches of 300."""
    total = MomentsSum(rows.shape[1])
    for start in range(0, len(rows), 300):
        total.add(rows[start : start + 300])
    return total.result()
