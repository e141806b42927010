"""The table of number formats, and what is said of formats that are not in it."""

from __future__ import annotations

import pytest

from specedge.quant.formats import DEVICES, FORMATS, default_precision, find_format
from specedge.runtime.errors import UsageError


def test_every_row_says_its_own_name():
    for device, rows in FORMATS.items():
        for precision, form in rows.items():
            assert form.name == precision
            for draft in (False, True):
                found = find_format(precision, device, draft=draft)
                assert (found.name, found.dtype) == (precision, form.dtype)
                assert found.kind != "blocks" or found.block_size > 0


def test_defaults():
    assert {device: default_precision(device) for device in DEVICES} == {"cpu": "fp32", "cuda": "fp16"}
    assert find_format("fp16", "cuda").dtype == "float16"


def test_an_int8_draft_is_fast_for_one_row_and_a_target_for_many():
    assert find_format("int8").kind == "columns"
    assert find_format("int8", draft=True).kind == "blocks"


@pytest.mark.parametrize(
    ("precision", "device", "message"),
    [
        ("bf16", "cpu", "precision 'bf16' .*: choose one of fp32, fp16, int8, int4"),
        ("fp32", "cuda", "precision 'fp32' is not available on device 'cuda': choose one of fp16, int8, int4"),
        ("fp16", "tensorrt", "device 'tensorrt' is not available in this version: choose one of cpu, cuda"),
    ],
)
def test_what_is_not_in_the_table_is_named(precision, device, message):
    with pytest.raises(UsageError, match=message):
        find_format(precision, device)


def test_no_default_for_an_unknown_device():
    with pytest.raises(UsageError, match="device 'tensorrt' is not available"):
        default_precision("tensorrt")
