"""Two layers of one input as one: the same outputs, one below the other, or None where one product cannot do."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from specedge.quant.formats import find_format
from specedge.quant.grid import dequantise, round_nearest
from specedge.quant.layer import Layer, LowRank, join_layers

GRIDS = {name: find_format(name).grid for name in ("int8", "int8-block", "int4")}


def layer(rng, grid, outputs=24, **more):
    weight = rng.standard_normal((outputs, 64)).astype(np.float32)
    return Layer(weight if grid is None else round_nearest(weight, grid), **more)


@pytest.mark.parametrize("name", GRIDS)
def test_the_weights_stand_one_below_the_other(rng, name):
    bias = rng.standard_normal(24).astype(np.float32)
    first, second = (layer(rng, GRIDS[name], bias=bias, step=0.5) for _ in range(2))
    both = join_layers(first, second)
    expected = np.concatenate([dequantise(first.weight), dequantise(second.weight)])
    assert (dequantise(both.weight) == expected).all()
    assert (both.bias == np.concatenate([bias, bias])).all()
    assert both.step == 0.5


def test_what_one_product_cannot_do(rng):
    one = layer(rng, GRIDS["int8"])
    low = LowRank(np.zeros((2, 64), np.float32), np.zeros((24, 2), np.float32))
    others = [
        layer(rng, None),
        layer(rng, GRIDS["int8-block"]),
        dataclasses.replace(one, step=0.1),
        dataclasses.replace(one, low_rank=low),
        dataclasses.replace(one, bias=np.zeros(24, np.float32)),
    ]
    assert [join_layers(one, other) for other in others] == [None] * len(others)
    assert join_layers(layer(rng, None), layer(rng, None)) is None
