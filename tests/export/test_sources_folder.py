"""Folders in Hugging Face layout: what is read, what is missing, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specedge.export.sources import resolve
from specedge.runtime.errors import CheckpointError, UnsupportedModelError
from specedge.tests.tiny import CHAT_TEMPLATE, TinyLlama, write_tiny_checkpoint


@pytest.fixture
def folder(tmp_path):
    return write_tiny_checkpoint(tmp_path / "tiny")


def edit(path: Path, **changes):
    """Change keys of a JSON file; None removes one."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def refused(folder, message, kind=CheckpointError):
    with pytest.raises(kind, match=message) as error:
        resolve(str(folder))
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


def test_a_folder_is_read(folder):
    checkpoint = resolve(str(folder))
    assert (checkpoint.name, checkpoint.source, checkpoint.path) == ("tiny", "folder:tiny", folder)
    assert checkpoint.generation["eos_token_id"] == [2]
    assert checkpoint.tokenizer.chat_template == CHAT_TEMPLATE
    assert "chat_template" not in checkpoint.tokenizer.config
    for name, tensor in TinyLlama().tensors().items():
        assert name in checkpoint.tensors and checkpoint.tensors.shape(name) == tensor.shape
        np.testing.assert_array_equal(checkpoint.tensors[name], tensor)
    for read in (checkpoint.tensors.__getitem__, checkpoint.tensors.shape):
        with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight is missing in .*tiny"):
            read("lm_head.weight")


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_widened_exactly(folder, dtype):
    stored = {name: tensor.astype(dtype) for name, tensor in TinyLlama().tensors().items()}
    save_file(stored, folder / "model.safetensors")
    tensors = resolve(str(folder)).tensors
    for name, tensor in stored.items():
        assert tensors[name].dtype == np.float32
        np.testing.assert_array_equal(tensors[name], tensor.astype(np.float32))


def shard(folder) -> dict[str, str]:
    """Split the weights over two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {}
    for number in (0, 1):
        name = f"model-{number + 1:05}-of-00002.safetensors"
        part = dict(list(tensors.items())[number::2])
        save_file(part, folder / name)
        places |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return places


def test_shards_are_read_by_their_index(folder):
    shard(folder)
    tensors = resolve(str(folder)).tensors
    assert set(tensors) == set(TinyLlama().tensors())
    for name, tensor in TinyLlama().tensors().items():
        np.testing.assert_array_equal(tensors[name], tensor)


@pytest.mark.parametrize(
    "place",
    ["../model.safetensors", "/etc/model.safetensors", "a/b.safetensors", "C:\\x.safetensors", "x.bin", 7, None],
)
def test_an_index_cannot_lead_out_of_the_folder(folder, place):
    places = shard(folder)
    places["model.norm.weight"] = place
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    refused(folder, "which is no file name")


def test_shards_that_are_missing_or_lack_a_tensor(folder):
    places = shard(folder)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": places | {"x": min(places.values())}})
    )
    refused(folder, r"tensor .x. in .* which does not hold it")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, r"model-00002-of-00002\.safetensors is missing")
    (folder / "model.safetensors.index.json").unlink()
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "other.safetensors")
    refused(folder, r"2 safetensors files but no model\.safetensors\.index\.json")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", r"holds no config\.json"),
        ("model.safetensors", "holds no weights"),
        ("tokenizer.json", r"holds no tokenizer\.json; write one with transformers"),
    ],
)
def test_a_missing_file_is_named(folder, name, message):
    (folder / name).unlink()
    refused(folder, message)


def test_optional_files_may_be_missing(folder):
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    checkpoint = resolve(str(folder))
    assert checkpoint.generation == {"eos_token_id": [2]}  # from config.json
    assert checkpoint.tokenizer.chat_template is None


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "consolidated.00.pth"]
)
def test_pickles_are_never_read(folder, name):
    (folder / "model.safetensors").rename(folder / name)
    refused(folder, "pickled weights .*save_pretrained", UnsupportedModelError)


def test_adapters_and_quantised_checkpoints_are_refused(folder):
    edit(folder / "config.json", quantization_config={"quant_method": "gptq"})
    refused(folder, r"quantised already \(.gptq.\)", UnsupportedModelError)
    (folder / "config.json").rename(folder / "adapter_config.json")
    refused(folder, "adapter without its model", UnsupportedModelError)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("[]", "must hold a JSON object"),
        ('{"a": 1, "a": 2}', "key 'a' stands twice"),
        ('{"a": NaN}', "NaN"),
        (r'{"a": "\ud800"}', "lone surrogate"),
        ('{"a": ' * 100_000, "nested too deeply|not valid JSON"),
        ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_damaged_json_is_named(folder, name, text, message):
    (folder / name).write_text(text)
    refused(folder, message)


def test_a_character_in_two_escapes_is_whole(folder):
    (folder / "generation_config.json").write_text(r'{"note": "\ud83d\ude00"}')
    assert resolve(str(folder)).generation["note"] == "😀"


def test_json_that_is_not_text(folder):
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")
    refused(folder, "not UTF-8")
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    refused(folder, "describes no tokenizer")


def test_where_the_chat_template_may_stand(folder):
    edit(
        folder / "tokenizer_config.json",
        chat_template=[{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}],
    )
    assert resolve(str(folder)).tokenizer.chat_template == "d"
    (folder / "chat_template.json").write_text('{"chat_template": "j"}')
    assert resolve(str(folder)).tokenizer.chat_template == "j"
    (folder / "chat_template.jinja").write_text("own\nfile")
    assert resolve(str(folder)).tokenizer.chat_template == "own\nfile"
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text('{"chat_template": 7}')
    refused(folder, "chat template is int")


def test_special_tokens_map_fills_what_the_tokenizer_config_leaves_out(folder):
    edit(folder / "tokenizer_config.json", pad_token=None)
    (folder / "special_tokens_map.json").write_text('{"pad_token": "<pad>", "eos_token": "other"}')
    config = resolve(str(folder)).tokenizer.config
    assert (config["pad_token"], config["eos_token"]) == ("<pad>", "<|im_end|>")


@pytest.mark.parametrize(
    ("card", "license"),
    [
        ("---\nlanguage: en\nlicense: apache-2.0\n---\n# Model", "Apache-2.0"),
        ("---\nlicense: 'llama3.2'\n---\n", "llama3.2"),
        ("# Model\nlicense: mit\n", None),
        ("---\nlibrary: x\n---\nlicense: mit", None),
    ],
)
def test_the_license_is_that_of_the_model_card(folder, card, license):
    (folder / "README.md").write_text(card)
    assert resolve(str(folder)).license == license
