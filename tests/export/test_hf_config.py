"""Configurations as different versions of transformers spell them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specedge.export.hf_config import end_ids, normalise_config
from specedge.export.sources import resolve
from specedge.runtime.errors import CheckpointError
from specedge.tests.tiny import TinyLlama, write_tiny_checkpoint

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("given", "theta", "scaling"),
    [
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, None),
        ({"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 5e5}, 5e5, None),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}}, 5e5, LLAMA3 | {"rope_type": "llama3"}),
        (
            {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}},
            5e5,
            LLAMA3 | {"rope_type": "llama3"},
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 1e4, {"rope_type": "linear", "factor": 2.0}),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0}},
            1e4,
            {"rope_type": "linear", "factor": 2.0},
        ),
        ({"rope_scaling": None, "rope_parameters": None}, 1e4, None),
    ],
)
def test_rope_is_read_from_either_place(given, theta, scaling):
    config = normalise_config({"model_type": "llama", **given}, Path("config.json"))
    assert (config["rope_theta"], config["rope_scaling"]) == (theta, scaling)
    assert "rope_parameters" not in config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta twice"),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 4.0},
            },
            "contradict each other",
        ),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
            "has type 'linear' and rope_type 'yarn'",
        ),
        ({"rope_scaling": {"factor": 2.0}}, "has no rope_type"),
        ({"rope_scaling": 2.0}, "where an object belongs"),
        ({"rope_parameters": [1]}, "where an object belongs"),
        ({"rope_parameters": {"chunked_attention": {"rope_theta": 1.0}}}, "unknown layer types"),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, "torch_dtype twice"),
    ],
)
def test_contradictions_are_errors(given, message):
    with pytest.raises(CheckpointError, match=message) as error:
        normalise_config({"model_type": "llama", **given}, Path("some/config.json"))
    assert "config.json" in str(error.value)


def test_rope_of_two_layer_types():
    parameters = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = normalise_config({"model_type": "gemma3_text", "rope_parameters": parameters}, Path("config.json"))
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e6, 1e4)
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}


def test_a_family_with_another_default_base_is_not_guessed():
    assert "rope_theta" not in normalise_config({"model_type": "mixtral"}, Path("config.json"))


def test_dtype_has_one_name():
    for given in ({"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}, {"dtype": "bfloat16", "torch_dtype": "bfloat16"}):
        config = normalise_config(given, Path("config.json"))
        assert config["torch_dtype"] == "bfloat16" and "dtype" not in config


def test_ends_of_text():
    assert end_ids({"eos_token_id": [2, 5, 2]}, {"eos_token_id": 9}) == [2, 5]
    assert end_ids({}, {"eos_token_id": 9}) == [9]
    assert end_ids({"eos_token_id": None}, {}) == []
    with pytest.raises(CheckpointError, match="eos_token_id is"):
        end_ids({"eos_token_id": "</s>"})


@pytest.mark.both
@pytest.mark.parametrize("scaling", [None, LLAMA3 | {"rope_type": "llama3"}])
def test_what_transformers_saves_is_read_back(tmp_path, scaling):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    model = TinyLlama(rope_theta=5e5, rope_scaling=scaling)
    folder = write_tiny_checkpoint(tmp_path / "a", model)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(str(folder))
    loaded.save_pretrained(str(tmp_path / "b"))
    transformers.AutoTokenizer.from_pretrained(str(folder)).save_pretrained(str(tmp_path / "b"))
    before, after = resolve(str(folder)), resolve(str(tmp_path / "b"))
    for key in ("rope_theta", "rope_scaling", "torch_dtype", "hidden_size", "tie_word_embeddings"):
        assert after.config[key] == before.config[key], key
    assert after.tokenizer.chat_template == before.tokenizer.chat_template
    for name in before.tensors:
        np.testing.assert_array_equal(after.tensors[name], before.tensors[name])
