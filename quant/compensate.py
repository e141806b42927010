"""One linear layer, rounded and compensated: the methods of this room, in the order in which they build on each other.

1. The weight is rounded: to nearest; with "scale", in searched ranges (quant/ranges.py; what scaling
   does to neighbouring layers is the caller's, quant/scaling.py); with "gptq", passing errors on (quant/gptq.py).
2. "lowrank:R" corrects what is left of the error (quant/lowrank.py).
3. "bias" corrects what that leaves of the mean (quant/bias.py).

Methods see calibrated rows only; `damped_second` keeps them from what those have by chance, and the
tests show that the error falls on others, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specedge.quant.activations import search_step
from specedge.quant.bias import corrected_bias
from specedge.quant.descent import keep_better
from specedge.quant.gptq import round_second_order
from specedge.quant.grid import Grid, Rounded, dequantise, round_nearest
from specedge.quant.layer import Layer
from specedge.quant.lowrank import correct_low_rank
from specedge.quant.moments import Moments, damped_second
from specedge.quant.ranges import round_searched
from specedge.quant.recipe import Method

__all__ = ["automatic", "compensate"]

Matrix = NDArray[np.float32]


def compensate(
    weight: Matrix,
    bias: Matrix | None,
    grid: Grid | None,
    moments: Moments,
    methods: Sequence[Method],
    *,
    static: bool = False,
) -> Layer:
    """Decides how one linear layer is stored.

    Args:
        weight: [out, in].
        bias: [out].
        grid: Where its weights will lie; None: it is stored in floats, and nothing is missed.
        moments: Of its input (divided, where the weight was scaled).
        methods: What compensates the rounding; "distil" comes after this and "none" does nothing.
        static: Activations are rounded with a step that all rows share, and which is chosen here.

    Raises:
        ValueError: The moments are those of another layer, or a rank is larger than the matrix.
    """
    if grid is None:
        return Layer(weight, bias)
    if moments.mean.shape != weight.shape[1:]:
        raise ValueError(f"moments of {len(moments.mean)} inputs for a weight of {weight.shape[1]}")
    chosen = {method.name: method.argument for method in methods}
    if "auto" in chosen:
        chosen = {method.name: method.argument for method in automatic(grid)}
    second = damped_second(moments)
    stored = _rounded(weight, grid, second, chosen)
    missed = weight - dequantise(stored)
    low_rank = correct_low_rank(missed, second, chosen.get("lowrank") or 0)
    if low_rank is not None:
        missed = missed - low_rank.up @ low_rank.down
    if "bias" in chosen:
        bias = corrected_bias(bias, missed, moments.mean)
    ones = np.ones_like(moments.largest)
    step = search_step(moments, ones, np.square(weight).sum(0)) if static else None
    return Layer(stored, bias, low_rank, step)


def automatic(grid: Grid) -> tuple[Method, ...]:
    """The methods of "auto": what was best at no cost when the model runs.

    Measured on SmolLM2-135M (docs/compensation.md): where whole rows are int8 on both sides, GPTQ after scaling
    changes nothing for the better (KL .0112 → .0118); in 4 bits and in FP8 it does.
    """
    return (Method("scale"),) if grid.rounds_rows else (Method("scale"), Method("gptq"))


def _rounded(weight: Matrix, grid: Grid, second: Matrix, chosen: dict[str, int | None]) -> Rounded:
    if "gptq" in chosen:
        return round_second_order(weight, grid, second, search_range="scale" in chosen)
    nearest = round_nearest(weight, grid)
    if "scale" not in chosen:
        return nearest
    searched = round_searched(weight, grid, np.diagonal(second))
    return keep_better(weight, second, nearest, searched)
