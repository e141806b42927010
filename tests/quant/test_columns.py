"""int8 with one scale for each output."""

from __future__ import annotations

import numpy as np

from specedge.quant.columns import dequantise_columns, quantise_columns


def test_no_weight_is_off_by_more_than_half_a_step(rng):
    weight = rng.standard_normal((9, 130)).astype(np.float32) * np.logspace(-6, 3, 9, dtype=np.float32)[:, None]
    columns = quantise_columns(weight)
    assert np.abs(columns.values).max(-1).tolist() == [127] * 9
    assert (np.abs(dequantise_columns(columns) - weight) <= columns.scales[:, None] * 0.5001).all()


def test_an_output_of_zeros():
    columns = quantise_columns(np.zeros((2, 8), np.float32))
    assert (dequantise_columns(columns) == 0).all()
    assert (columns.scales > 0).all()


def test_many_rows_are_rounded_in_parts_without_a_seam(rng, monkeypatch):
    weight = rng.standard_normal((33, 64)).astype(np.float32)
    whole = quantise_columns(weight)
    monkeypatch.setattr("specedge.quant.columns._CHUNK", 640)
    assert (quantise_columns(weight).values == whole.values).all()
