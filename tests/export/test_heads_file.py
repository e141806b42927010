"""Files of heads: this project's own and the public layouts come in; what is missing, foreign or a pickle is told."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

from specedge.export.heads_file import read_heads, write_heads_file
from specedge.runtime.errors import CheckpointError, UnsupportedModelError, UsageError
from specedge.tests.heads import PLAIN, WIDE, random_heads

SIZE, VOCAB = PLAIN.hidden_size, PLAIN.vocab_size


def written(path, heads, **options):
    write_heads_file(path, heads.config, heads.tensors, heads.vocabulary, heads.calibration, **options)
    return path


@pytest.mark.parametrize(
    "config", [PLAIN, WIDE, replace(PLAIN, lm_head="own"), replace(WIDE, lm_head="lowrank", rank=4)]
)
@pytest.mark.parametrize(("precision", "bound"), [("float16", 5e-4), ("int8", 5e-3)])
def test_own_files_come_back(tmp_path, config, precision, bound):
    heads = random_heads(config)
    found = read_heads(written(tmp_path / "h.safetensors", heads, precision=precision), VOCAB)
    assert (found.config, found.calibration) == (heads.config, heads.calibration)
    assert (
        found.vocabulary is None if heads.vocabulary is None else found.vocabulary.tolist() == heads.vocabulary.tolist()
    )
    for name, tensor in heads.tensors.items():
        assert np.abs(found.tensors[name] - tensor).max() <= bound * max(1, np.abs(tensor).max())


def faster_decoding(heads=2, blocks=1, bias=True, vocab=VOCAB):
    random = np.random.default_rng(1)
    tensors = {}
    for head in range(heads):
        for block in range(blocks):
            tensors[f"{head}.{block}.linear.weight"] = random.standard_normal((SIZE, SIZE)).astype(np.float32)
            if bias:
                tensors[f"{head}.{block}.linear.bias"] = random.standard_normal(SIZE).astype(np.float32)
        tensors[f"{head}.{blocks}.weight"] = random.standard_normal((vocab, SIZE)).astype(np.float16)
    return tensors


def vllm(heads=2, blocks=1, prefix="medusa_heads."):
    tensors = faster_decoding(heads, blocks, bias=False)
    renamed = {}
    for name, tensor in tensors.items():
        head, place, *rest = name.split(".")
        kind = f"blocks.{head}.layers.{place}.weight" if "linear" in rest else f"lm_heads.{head}.weight"
        renamed[prefix + kind] = tensor
    return renamed


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
@pytest.mark.parametrize("blocks", [1, 2])
def test_faster_decodings_layout(tmp_path, prefix, blocks):
    tensors = faster_decoding(blocks=blocks)
    save_file({prefix + name: each for name, each in tensors.items()}, tmp_path / "medusa_lm_head.safetensors")
    heads = read_heads(tmp_path, VOCAB)
    assert (heads.config.heads, heads.config.blocks, heads.config.lm_head) == (2, blocks, "own")
    assert (heads.tensors["heads.1.blocks.0.square.bias"] == tensors["1.0.linear.bias"]).all()
    assert (heads.tensors["heads.1.lm_head.weight"] == tensors[f"1.{blocks}.weight"]).all()


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_vllms_layout(tmp_path, prefix):
    tensors = vllm(prefix=prefix)
    save_file(tensors, tmp_path / "model.safetensors")
    heads = read_heads(tmp_path / "model.safetensors", VOCAB)
    assert heads.config.lm_head == "own"
    assert not heads.tensors["heads.0.blocks.0.square.bias"].any()
    assert (heads.tensors["heads.1.blocks.0.square.weight"] == tensors[f"{prefix}blocks.1.layers.0.weight"]).all()


def test_vllms_layout_with_one_vocabulary_matrix_and_a_token_map(tmp_path):
    tensors = {name: each for name, each in vllm(prefix="").items() if name != "lm_heads.1.weight"}
    save_file({**tensors, "token_map": np.arange(50, 90)}, tmp_path / "model.safetensors")
    heads = read_heads(tmp_path, VOCAB)
    assert (heads.config.lm_head, heads.config.vocabulary) == ("shared", 40)
    assert heads.vocabulary.tolist() == list(range(50, 90))


def test_a_whole_matrix_is_cut_to_the_token_map(tmp_path):
    tensors = vllm(prefix="")
    save_file({**tensors, "token_map": np.array([7, 3, 11])}, tmp_path / "model.safetensors")
    heads = read_heads(tmp_path, VOCAB)
    assert (heads.tensors["heads.1.lm_head.weight"] == tensors["lm_heads.1.weight"][[7, 3, 11]]).all()


@pytest.mark.parametrize(
    ("tensors", "lost"),
    [
        (faster_decoding(3), "1.0.linear.weight"),
        (faster_decoding(3), "1.1.weight"),
        (vllm(3), "medusa_heads.lm_heads.1.weight"),
    ],
    ids=["block", "matrix", "vllm"],
)
def test_what_is_missing_is_named(tmp_path, tensors, lost):
    save_file({name: each for name, each in tensors.items() if name != lost}, tmp_path / "h.safetensors")
    with pytest.raises(CheckpointError, match=rf"lacks {lost.removeprefix('medusa_heads.')}; is it whole"):
        read_heads(tmp_path / "h.safetensors", VOCAB)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"1.1.weight": None}, r"lacks 1\.1\.weight"),
        ({"1.0.linear.weight": None}, r"lacks 1\.0\.linear\.weight"),
        ({"1.0.linear.weight": None, "1.0.linear.bias": None}, r"lacks 1\.0\.linear\.weight"),
        ({"2000000.0.linear.weight": np.zeros((2, 2), np.float32)}, "2000001 heads"),
        ({"0.0.linear.weight": np.zeros((), np.float32)}, "hidden_size is 0"),
        ({"optimizer.step": np.zeros(2, np.float32)}, r"holds optimizer\.step, which is no part"),
    ],
    ids=["matrix", "block", "head", "huge", "scalar", "more"],
)
def test_two_heads_of_which_something_is_wrong(tmp_path, change, said):
    tensors = {**faster_decoding(2), **change}
    save_file({name: each for name, each in tensors.items() if each is not None}, tmp_path / "h.safetensors")
    with pytest.raises(CheckpointError, match=said):
        read_heads(tmp_path / "h.safetensors", VOCAB)


@pytest.mark.parametrize(
    "ids", [np.array([3, VOCAB]), np.array([-1, 3]), np.array(3)], ids=["beyond", "below", "scalar"]
)
def test_a_token_map_of_another_model(tmp_path, ids):
    save_file({**vllm(prefix=""), "token_map": ids}, tmp_path / "h.safetensors")
    with pytest.raises(CheckpointError, match="token_map is no list of this model's 320 tokens"):
        read_heads(tmp_path / "h.safetensors", VOCAB)


def test_own_files_with_a_tensor_missing_or_too_many(tmp_path):
    from safetensors.numpy import load_file

    path = written(tmp_path / "h.safetensors", random_heads(PLAIN))
    metadata = {"specedge_heads": PLAIN.to_json()}
    tensors = load_file(path)
    lost = tensors.pop("heads.2.blocks.0.square.bias")
    save_file(tensors, path, metadata)
    with pytest.raises(CheckpointError, match=r"lacks heads\.2\.blocks\.0\.square\.bias"):
        read_heads(path, VOCAB)
    save_file({**tensors, "heads.2.blocks.0.square.bias": lost, "more": lost}, path, metadata)
    with pytest.raises(CheckpointError, match="holds more, which its description does not know"):
        read_heads(path, VOCAB)
    save_file({**tensors, "heads.2.blocks.0.square.bias": lost[:-1]}, path, metadata)
    with pytest.raises(CheckpointError, match=r"square\.bias has shape \[63\] where \[64\] belongs"):
        read_heads(path, VOCAB)


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "pytorch_model.bin"])
@pytest.mark.parametrize("in_folder", [False, True])
def test_a_pickle_is_refused_with_the_command_that_converts_it(tmp_path, name, in_folder):
    torch = pytest.importorskip("torch")
    path = tmp_path / name
    torch.save({key: torch.from_numpy(each) for key, each in faster_decoding().items()}, path)
    with pytest.raises(UnsupportedModelError, match="is a pickle") as caught:
        read_heads(tmp_path if in_folder else path, VOCAB)
    python, *arguments = shlex.split(str(caught.value).split("matter: ", 1)[1])
    assert python == "python"
    subprocess.run([sys.executable, *arguments], check=True)
    assert read_heads(path.with_suffix(".safetensors"), VOCAB).config.heads == 2


def test_files_that_hold_no_heads(tmp_path):
    save_file({"model.norm.weight": np.ones(4, np.float32)}, tmp_path / "h.safetensors")
    with pytest.raises(UnsupportedModelError, match="no Medusa heads of a layout that is known"):
        read_heads(tmp_path / "h.safetensors", VOCAB)
    with pytest.raises(CheckpointError, match="is missing"):
        read_heads(tmp_path / "none.safetensors", VOCAB)


def test_another_models_heads_are_refused():
    heads = random_heads(WIDE)
    heads.check_target(SIZE, VOCAB, 2)
    for other in ((SIZE + 8, VOCAB, 2), (SIZE, VOCAB + 1, 2), (SIZE, VOCAB, 1)):
        with pytest.raises(UsageError, match="heads of another model"):
            heads.check_target(*other)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"positions": "many"}, "positions is 'many'"),
        ({"top": [[0.5]]}, "beyond a head's guesses|path is longer"),
        ({"paths": [[0, 0], [0]]}, "paths with"),
        ({"more": 1}, "unknown key"),
        ({"values": [10**400] * 6}, "not between 0 and 1"),
        ({"positions": -3}, "positions -3"),
        ({"text": "a\x1b[2J"}, "positions 100 of"),
    ],
)
def test_a_calibration_that_makes_no_sense(tmp_path, change, said):
    from dataclasses import asdict

    heads = random_heads(PLAIN)
    raw = json.loads(json.dumps(asdict(heads.calibration)))
    notes = {"specedge_calibration": json.dumps({**raw, **change})}
    write_heads_file(tmp_path / "h.safetensors", PLAIN, heads.tensors, None, None, notes=notes)
    with pytest.raises(CheckpointError, match=said):
        read_heads(tmp_path / "h.safetensors", VOCAB)
