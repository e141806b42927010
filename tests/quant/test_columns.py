"""Weights with one scale for each output."""

from __future__ import annotations

import numpy as np
import pytest

from specedge.quant.columns import pack_columns
from specedge.quant.formats import find_format
from specedge.quant.grid import dequantise, round_nearest


@pytest.mark.parametrize("precision", ["int8", "fp8-e4m3", "fp8-e5m2"])
def test_values_and_scales_are_the_rounded_weight(rng, precision):
    weight = rng.standard_normal((9, 130)).astype(np.float32) * np.logspace(-6, 3, 9, dtype=np.float32)[:, None]
    weight[4] = 0
    rounded = round_nearest(weight, find_format(precision).grid)
    columns = pack_columns(rounded)
    assert columns.values.shape == (130, 9) and columns.values.itemsize == 1
    assert (columns.values.astype(np.float32).T * columns.scales[:, None] == dequantise(rounded)).all()


def test_no_int8_weight_is_off_by_more_than_half_a_step(rng):
    weight = rng.standard_normal((9, 130)).astype(np.float32)
    rounded = round_nearest(weight, find_format("int8").grid)
    assert np.abs(rounded.codes).max(-1).tolist() == [127] * 9
    assert (np.abs(dequantise(rounded) - weight) <= rounded.group.scale * 0.5001).all()
