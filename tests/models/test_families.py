"""Families are found by model_type, and a config is read or refused by name."""

from __future__ import annotations

import pytest

from specedge.models import FAMILIES, find_family, known_model_types, read_dimensions
from specedge.runtime.errors import CheckpointError, UnsupportedModelError
from specedge.tests.reference import TINY


def read(**changes):
    config = {key: value for key, value in {**TINY, **changes}.items() if value != "missing"}
    return read_dimensions(find_family(config["model_type"]), config)


def test_every_family_is_found_by_its_types():
    for family in FAMILIES:
        for model_type in family.model_types:
            assert find_family(model_type) is family
            assert model_type in known_model_types()


@pytest.mark.parametrize("model_type", ["mamba", None, 7, "", "Llama"])
def test_an_unknown_type_lists_the_known(model_type):
    with pytest.raises(UnsupportedModelError, match=r"no builder for model_type .*: llama, mistral$"):
        find_family(model_type)


def test_sizes_that_a_config_leaves_out_follow_from_others():
    sizes = read(head_dim="missing", num_key_value_heads=None, rms_norm_eps="missing", tie_word_embeddings="missing")
    assert (sizes.head_dim, sizes.kv_heads, sizes.norm_eps, sizes.tied) == (16, 4, 1e-6, False)
    assert (sizes.q_size, sizes.kv_size) == (64, 64)
    assert not (sizes.qkv_bias or sizes.output_bias or sizes.mlp_bias)


def test_biases_follow_the_config():
    sizes = read(attention_bias=True, mlp_bias=True)
    assert sizes.qkv_bias and sizes.output_bias and sizes.mlp_bias
    assert not read(model_type="mistral", attention_bias=True).qkv_bias


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "missing"}, "hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"intermediate_size": 1 << 40}, "intermediate_size is"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'"),
        ({"rope_theta": "missing", "rope_parameters": {"rope_theta": 1e6}}, "rope_theta stands only in"),
    ],
)
def test_a_broken_config_is_named(changes, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        read(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"head_dim": 24}, "head_dim 24 is no multiple of 16"),
    ],
)
def test_another_computation_is_refused(changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        read(**changes)


def test_a_window_belongs_to_mistral_only():
    assert read(sliding_window=64).window is None
    assert read(model_type="mistral", sliding_window=64).window == 64
    assert read(model_type="mistral", sliding_window=None).window is None
