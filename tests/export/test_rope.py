"""Rotary frequencies against transformers' own, and refusal of scalings there is no builder for."""

from __future__ import annotations

import numpy as np
import pytest

from specedge.export.rope import inverse_frequencies, rotary_tables
from specedge.models import find_family, read_dimensions
from specedge.runtime.errors import CheckpointError, UnsupportedModelError
from specedge.tests.reference import TINY

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def sizes(scaling=None, **changes):
    config = {**TINY, "head_dim": 64, "rope_theta": 500000.0, "rope_scaling": scaling, **changes}
    return read_dimensions(find_family("llama"), config)


@pytest.mark.parametrize("scaling", [None, {}, {"rope_type": "default"}])
def test_without_scaling(scaling):
    expected = 500000.0 ** (-np.arange(0, 64, 2) / 64)
    assert np.allclose(inverse_frequencies(sizes(scaling)), expected, rtol=1e-12)


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_linear_scaling_stretches_positions(key):
    plain, stretched = sizes(), sizes({key: "linear", "factor": 4.0})
    for table, reference in zip(rotary_tables(stretched, 41), rotary_tables(plain, 11), strict=True):
        assert np.allclose(table[::4], reference, atol=1e-12)


def test_llama3_keeps_short_waves_and_stretches_long_ones():
    plain, scaled = inverse_frequencies(sizes()), inverse_frequencies(sizes(LLAMA3))
    waves = 2 * np.pi / plain
    assert (scaled[waves < 8192 / 4] == plain[waves < 8192 / 4]).all()
    assert np.allclose(scaled[waves > 8192], plain[waves > 8192] / 8)
    between = (waves > 8192 / 4) & (waves < 8192)
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


@pytest.mark.both
@pytest.mark.parametrize("scaling", [LLAMA3, {"rope_type": "linear", "factor": 4.0}])
def test_frequencies_are_those_of_transformers(scaling):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    rope = pytest.importorskip("transformers.modeling_rope_utils")

    common = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 131072}
    if int(transformers.__version__.split(".")[0]) >= 5:
        config = transformers.LlamaConfig(**common, rope_parameters={**scaling, "rope_theta": 500000.0})
    else:
        config = transformers.LlamaConfig(**common, rope_scaling=scaling, rope_theta=500000.0)
    if scaling["rope_type"] in rope.ROPE_INIT_FUNCTIONS:
        theirs, attention = rope.ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
        assert attention == 1.0
        assert np.allclose(inverse_frequencies(sizes(scaling)), theirs.double().numpy(), rtol=1e-6)


def test_tables_hold_a_row_for_each_position():
    cosines, sines = rotary_tables(sizes(), 100)
    assert cosines.shape == sines.shape == (100, 32)
    assert np.allclose(cosines**2 + sines**2, 1)
    assert (cosines[0] == 1).all()
    assert sines[7, 0] == np.sin(7.0)


@pytest.mark.parametrize("kind", ["dynamic", "yarn", "longrope", 3])
def test_other_scalings_are_refused_by_name(kind):
    with pytest.raises(UnsupportedModelError, match=rf"rope_scaling of type '?{kind}'? has no builder.*linear, llama3"):
        inverse_frequencies(sizes({"rope_type": kind, "factor": 2.0}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"factor": None}, "factor is None"),
        ({"factor": "8"}, "factor is '8'"),
        ({"low_freq_factor": 0}, "low_freq_factor is 0"),
        ({"original_max_position_embeddings": float("inf")}, "original_max_position_embeddings is inf"),
        ({"high_freq_factor": 1.0}, "is not above its low_freq_factor"),
    ],
)
def test_broken_parameters_are_named(changes, message):
    with pytest.raises(CheckpointError, match=message):
        inverse_frequencies(sizes({**LLAMA3, **changes}))
