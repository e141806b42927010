"""The table of number formats, and what is said of formats that are not in it."""

from __future__ import annotations

import numpy as np
import pytest

from specedge.quant.formats import (
    DEVICES,
    FORMATS,
    default_precision,
    find_format,
    grid_for,
    is_row_invariant,
    nearest,
)
from specedge.quant.recipe import parse_recipe
from specedge.runtime.errors import UsageError


def test_every_row_says_its_own_name():
    for device, rows in FORMATS.items():
        for precision, form in rows.items():
            assert form.name == precision
            for draft in (False, True):
                found = find_format(precision, device, draft=draft)
                shorthand = draft and (device, precision) == ("cpu", "int8")
                assert (found.name, found.dtype) == ("int8-block" if shorthand else precision, form.dtype)


def test_whole_rows_have_a_name_in_drafts_too():
    assert find_format("int8-rows", draft=True) is find_format("int8-rows") is find_format("int8")
    assert find_format("int8", draft=True) is find_format("int8-block")


@pytest.mark.parametrize("text", ["int8-block:b128", "int8-block:b128:asym", "int4:b64", "int4:b128:sym", "int8:head8"])
def test_blocks_that_mix_rows(text):
    """8-bit blocks of 128 give a lone row other bits than five rows: bench said "equal: no" of such a target."""
    assert is_row_invariant(parse_recipe(text).form) == (text == "int8:head8")


def test_defaults():
    assert {device: default_precision(device) for device in DEVICES} == {
        "cpu": "fp32", "cuda": "fp16", "tensorrt": "fp16",
    }  # fmt: skip
    assert find_format("fp16", "cuda").dtype == "float16"


def test_an_int8_draft_is_fast_for_one_row_and_a_target_for_many():
    assert find_format("int8").grid.group == 0
    assert find_format("int8", draft=True).grid == find_format("int8-block").grid


@pytest.mark.parametrize(
    ("precision", "device", "message"),
    [
        (
            "bf16",
            "cpu",
            "precision 'bf16' .*: choose one of fp32, fp16, int8, int8-static, int8-block, int4, .*fp8-e4m3",
        ),
        ("fp32", "cuda", "precision 'fp32' is not available on device 'cuda': choose one of fp16, bf16, int8, int4"),
        ("fp8", "cuda", "precision 'fp8' .*compute capability 8.9 or newer .*Orin has 8.7, so use int8 or int4"),
        ("fp8-e5m2", "cuda", "compute capability 8.9"),
        ("fp16", "npu", "device 'npu' is not available in this version: choose one of cpu, cuda, tensorrt"),
        ("int4", "tensorrt", "precision 'int4' is not available on device 'tensorrt': choose one of fp32, fp16, int8"),
    ],
)
def test_what_is_not_in_the_table_is_named(precision, device, message):
    with pytest.raises(UsageError, match=message):
        find_format(precision, device)


def test_no_default_for_an_unknown_device():
    with pytest.raises(UsageError, match="device 'npu' is not available"):
        default_precision("npu")


def test_fp8_is_the_one_with_more_mantissa():
    assert find_format("fp8").name == "fp8-e4m3"


LAYERS = ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "model.layers.11.mlp.up_proj")


@pytest.mark.parametrize("layers", [12, 30])
def test_parts_that_are_kept(layers):
    form = parse_recipe("int4:b64:sym:first32:last8").form
    first, middle, eleventh = (grid_for(form, name, layers) for name in LAYERS)
    assert first is None
    assert (middle.bits, middle.group) == (4, 64)
    assert eleventh.bits == (8 if layers == 12 else 4)
    assert grid_for(form, "lm_head", layers) == grid_for(form, "model.embed_tokens", layers)
    assert grid_for(form, "lm_head", layers).bits == 8


def test_nearest_rounds_by_name_and_keeps_the_bias(rng):
    weight, bias = rng.standard_normal((8, 64)).astype(np.float32), np.ones(8, np.float32)
    quantise = nearest(parse_recipe("int4:sym:head32").form, 2)
    layer = quantise("model.layers.0.mlp.up_proj", weight, bias)
    assert layer.weight.grid.bits == 4 and layer.bias is bias
    assert quantise("lm_head", weight, None).weight is weight
