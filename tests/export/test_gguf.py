"""GGUF files: tensors, configuration, and what damaged files give."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, quants

from specedge.export.gguf_config import gguf_config, gguf_generation, gguf_tensors
from specedge.export.gguf_file import GgufFile
from specedge.export.sources import resolve
from specedge.runtime.errors import CheckpointError, SpecEdgeError, UnsupportedModelError
from specedge.tests.tiny import CHAT_TEMPLATE, TinyLlama, write_tiny_checkpoint, write_tiny_gguf


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def write(path, pairs=(), tensors=(), arch="llama"):
    """A GGUF file of given pairs (key, value, type) and tensors (name, array, type)."""
    writer = GGUFWriter(path, arch)
    for key, value, kind in pairs:
        writer.add_key_value(key, value, kind)
    for name, array, kind in tensors:
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def one_line(error) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    "model",
    [
        TinyLlama(),
        TinyLlama(tied=False, attention_bias=True, rope_theta=500000.0, heads=8, kv_heads=1, head_dim=32, seed=3),
    ],
    ids=["tied", "untied with biases"],
)
def test_tensors_come_back_as_the_model_had_them(tmp_path, model):
    checkpoint = resolve(str(write_tiny_gguf(tmp_path / "m.gguf", model)))
    expected = model.tensors()
    assert set(checkpoint.tensors) == set(expected)
    for name, tensor in expected.items():
        assert checkpoint.tensors.shape(name) == tensor.shape
        assert checkpoint.tensors[name].dtype == np.float32
        np.testing.assert_array_equal(checkpoint.tensors[name], tensor, err_msg=name)


@pytest.mark.parametrize("model", [TinyLlama(), TinyLlama(tied=False, attention_bias=True, head_dim=32)])
def test_gguf_and_folder_of_one_model_are_the_same_checkpoint(tmp_path, model):
    folder = resolve(str(write_tiny_checkpoint(tmp_path / "folder", model)))
    gguf = resolve(str(write_tiny_gguf(tmp_path / "m.gguf", model)))
    written_by_files_alone = {"torch_dtype", "pad_token_id"}
    for key in (set(folder.config) | set(gguf.config)) - written_by_files_alone:
        assert gguf.config[key] == folder.config[key], key
    assert gguf.generation == folder.generation
    assert gguf.tokenizer.chat_template == folder.tokenizer.chat_template == CHAT_TEMPLATE
    assert json.loads(gguf.tokenizer.model)["model"]["vocab"].items() >= (
        json.loads(folder.tokenizer.model)["model"]["vocab"].items()
    )
    assert (gguf.name, gguf.source, gguf.license) == ("m", "gguf:m.gguf", "Apache-2.0")


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_number_formats_are_dequantised_near_what_was_stored(tmp_path, rng, kind):
    form = GGMLQuantizationType[kind]
    original = rng.standard_normal((5, 64)).astype(np.float32)
    packed = original.astype(np.float16) if kind == "F16" else quants.quantize(original, form)
    file = GgufFile(write(tmp_path / "q.gguf", tensors=[("t", packed, form)]))
    step = {"F16": 2e-3, "BF16": 2e-2, "Q8_0": 2e-2}.get(kind, 0.35)
    assert file.tensors["t"].shape == (5, 64)
    assert np.abs(file.read("t") - original).max() < step


def test_a_tensor_larger_than_a_chunk_is_read_whole(tmp_path, monkeypatch, rng):
    monkeypatch.setattr("specedge.export.gguf_file._CHUNK", 100)
    original = rng.standard_normal((7, 32)).astype(np.float32)
    file = GgufFile(write(tmp_path / "t.gguf", tensors=[("t", original, GGMLQuantizationType.F32)]))
    np.testing.assert_array_equal(file.read("t"), original)


def llama3_divisors(theta, head, factor, low, high, original):
    """As llama.cpp's converter makes them: a loop over the frequencies with three cases."""
    divisors = []
    for index in range(0, head, 2):
        wavelength = 2 * np.pi * theta ** (index / head)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_scaling_of_llama_3_comes_back_from_its_divisors(tmp_path, factor):
    model = TinyLlama(heads=2, kv_heads=1, head_dim=64, rope_theta=500000.0)
    divisors = llama3_divisors(500000.0, 64, factor, 1.0, 4.0, 8192)
    assert len(set(divisors)) > 3  # all three cases occur
    config = resolve(str(write_tiny_gguf(tmp_path / "m.gguf", model, rope_freqs=divisors))).config
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_unknown_divisors_are_handed_on_as_they_are(tmp_path):
    model = TinyLlama(heads=2, kv_heads=1, head_dim=64, rope_theta=500000.0)
    divisors = llama3_divisors(500000.0, 64, 8.0, 2.0, 5.0, 8192).astype(np.float32)
    scaling = resolve(str(write_tiny_gguf(tmp_path / "m.gguf", model, rope_freqs=divisors))).config["rope_scaling"]
    assert scaling["rope_type"] == "longrope"
    np.testing.assert_array_equal(np.array(scaling["long_factor"], np.float32), divisors)


def test_linear_and_yarn_scaling(tmp_path):
    def scaling(*pairs):
        names = [f"llama.rope.{key}" for key, _, _ in pairs]
        base = write_tiny_gguf(tmp_path / "m.gguf")
        file = GgufFile(base)
        file.metadata |= {name: value for name, (_, value, _) in zip(names, pairs, strict=True)}
        return gguf_config(file)["rope_scaling"]

    assert scaling() is None
    assert scaling(("scaling.type", "none", None)) is None
    assert scaling(("scaling.type", "linear", None), ("scaling.factor", 4.0, None)) == {
        "rope_type": "linear",
        "factor": 4.0,
    }
    assert scaling(("scale_linear", 2.0, None)) == {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(UnsupportedModelError, match="longrope"):
        scaling(("scaling.type", "longrope", None), ("scaling.factor", 4.0, None))
    with pytest.raises(CheckpointError, match=r"scaling\.factor"):
        scaling(("scaling.type", "linear", None))


def test_every_end_that_the_file_names_ends_a_text(tiny):
    file = GgufFile(tiny)
    assert gguf_generation(file, 320)["eos_token_id"] == [2]
    file.metadata |= {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 2}
    assert gguf_generation(file, 320)["eos_token_id"] == [2, 7]
    file.metadata["tokenizer.ggml.eom_token_id"] = 320
    with pytest.raises(CheckpointError, match="eom token 320 is outside"):
        gguf_generation(file, 320)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.architecture", "mamba", "architecture 'mamba'; GGUF files of llama"),
        ("general.architecture", ["llama"], "architecture"),
        ("llama.expert_count", 8, "expert_count"),
        ("llama.logit_scale", 0.5, "logit_scale"),
        ("llama.embedding_length", 32, "embedding_length contradicts"),
        ("llama.feed_forward_length", np.array([1, 2]), "where a positive int belongs"),
        ("llama.feed_forward_length", np.arange(5000), "where a positive int belongs"),
        ("general.architecture", "x\n" * 500, "architecture"),
        ("llama.attention.value_length", 8, "values of another width"),
        ("tokenizer.ggml.tokens", ["t"] * 321, "lists 321 tokens but embeds 320"),
        ("llama.block_count", -1, "where a positive int belongs"),
        ("llama.context_length", True, "where a positive int belongs"),
        ("llama.rope.dimension_count", 8, "only a part of each head"),
        ("llama.rope.scaling.type", np.array([1]), "rope"),
        ("tokenizer.ggml.bos_token_id", "one", "bos token 'one'"),
    ],
)
def test_metadata_that_cannot_be_exported(tiny, key, value, message):
    file = GgufFile(tiny)
    file.metadata[key] = value
    with pytest.raises(CheckpointError, match=message) as error:
        gguf_config(file)
    assert str(tiny) in one_line(error)


def test_a_window_makes_it_a_mistral(tiny):
    file = GgufFile(tiny)
    file.metadata["llama.attention.sliding_window"] = 4096
    config = gguf_config(file)
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 4096)


def test_an_embedding_that_is_no_matrix_is_refused(tmp_path):
    flat = ("token_embd.weight", np.ones(32, np.float32), GGMLQuantizationType.F32)
    file = GgufFile(write(tmp_path / "x.gguf", [("llama.embedding_length", 32, GGUFValueType.UINT32)], [flat]))
    with pytest.raises(CheckpointError, match="embedding_length contradicts"):
        gguf_config(file)


def test_missing_metadata_is_named(tiny):
    file = GgufFile(tiny)
    del file.metadata["llama.block_count"]
    with pytest.raises(CheckpointError, match=r"lacks the key llama\.block_count"):
        gguf_config(file)


def test_unknown_tensors_are_refused_and_missing_ones_named(tiny):
    file = GgufFile(tiny)
    tensors = gguf_tensors(file)
    assert "model.layers.9.mlp.up_proj.weight" not in tensors
    for read in (tensors.__getitem__, tensors.shape):
        with pytest.raises(CheckpointError, match=r"model\.layers\.9\.mlp\.up_proj\.weight is missing"):
            read("model.layers.9.mlp.up_proj.weight")
    file.tensors["blk.0.attn_q_norm.weight"] = file.tensors["blk.0.attn_norm.weight"]
    with pytest.raises(UnsupportedModelError, match="attn_q_norm"):
        gguf_tensors(file)


def test_nan_is_an_error_that_names_the_tensor(tmp_path):
    bad = np.ones((2, 32), np.float32)
    bad[1, 3] = np.nan
    file = GgufFile(write(tmp_path / "nan.gguf", tensors=[("t", bad, GGMLQuantizationType.F32)]))
    with pytest.raises(CheckpointError, match=r"tensor t .*NaN"):
        file.read("t")


def test_a_file_that_shrinks_after_it_was_opened_is_an_error(tiny, tmp_path):
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(tiny.read_bytes())
    file = GgufFile(copy)
    with copy.open("r+b") as handle:
        handle.truncate(file.tensors["token_embd.weight"].offset + 10)
    with pytest.raises(CheckpointError, match="became shorter"):
        file.read("token_embd.weight")


def test_truncation_anywhere_is_an_error(tiny, tmp_path):
    data = tiny.read_bytes()
    start = min(info.offset for info in GgufFile(tiny).tensors.values())
    cut = tmp_path / "cut.gguf"
    for size in [0, 3, 7, 23, *range(24, start, start // 150), start, len(data) - 1]:
        cut.write_bytes(data[:size])
        with pytest.raises(CheckpointError) as error:
            resolve(str(cut))
        assert str(cut) in one_line(error)


def test_text_and_other_versions_are_refused(tmp_path, tiny):
    path = tmp_path / "x.gguf"
    for content, message in [
        (b"hello, this is text", "no GGUF file"),
        (b"", "no GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(64), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(64), "big-endian"),
    ]:
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=message) as error:
            resolve(str(path))
        assert str(path) in one_line(error)


@pytest.mark.parametrize(
    "tail",
    [
        struct.pack("<QQ", 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 0, 1 << 60),  # an array of 2^60 bytes
        struct.pack("<QQ", 0, 1 << 60),  # 2^60 pairs
        struct.pack("<QQ", 1 << 60, 0),  # 2^60 tensors
        struct.pack("<QQ", 0, 1) + struct.pack("<Q", 1 << 63),  # a key of 2^63 bytes
        struct.pack("<QQ", 0, 1) + struct.pack("<Q1sI", 1, b"k", 9) + struct.pack("<IQ", 9, 1) * 9,  # arrays of arrays
        struct.pack("<QQ", 0, 1) + struct.pack("<Q1sI", 1, b"k", 99) + bytes(64),  # a type that does not exist
        struct.pack("<QQ", 0, 2) + struct.pack("<Q1sIB", 1, b"k", 0, 1) * 2 + bytes(64),  # a key twice
        struct.pack("<QQ", 0, 1) + struct.pack("<Q2sIB", 2, b"\xff\xfe", 0, 1) + bytes(64),  # not UTF-8
        struct.pack("<QQ", 1, 0) + struct.pack("<Q1sI", 1, b"t", 200) + bytes(64),  # 200 dimensions
        struct.pack("<QQ", 1, 0) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 32, 0, 1 << 62) + bytes(64),  # far outside
        struct.pack("<QQ", 1, 0) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 1 << 62, 0, 0) + bytes(64),  # huge
        struct.pack("<QQ", 1, 0) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 31, 8, 0) + bytes(64),  # half a block
        struct.pack("<QQ", 1, 0) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 32, 999, 0) + bytes(64),  # unknown format
    ],
    ids=range(13),
)
def test_declared_sizes_are_not_believed(tmp_path, tail):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + tail)
    with pytest.raises(CheckpointError) as error:
        GgufFile(path)
    assert str(path) in one_line(error)


def test_files_in_parts_and_odd_alignments_are_refused(tmp_path):
    part = write(tmp_path / "part.gguf", [("split.count", 3, GGUFValueType.UINT16)])
    with pytest.raises(CheckpointError, match="join them"):
        GgufFile(part)
    tensor = ("t", np.ones((1, 32), np.float32), GGMLQuantizationType.F32)
    odd = write(tmp_path / "odd.gguf", [("general.alignment", 3, GGUFValueType.UINT32)], [tensor])
    with pytest.raises(CheckpointError, match="power of two"):
        GgufFile(odd)


def test_damaged_bytes_never_give_anything_but_our_errors(tiny, tmp_path, rng):
    data = bytearray(tiny.read_bytes())
    start = min(info.offset for info in GgufFile(tiny).tensors.values())
    path, refused = tmp_path / "x.gguf", 0
    for _ in range(400):
        changed = bytearray(data)
        for position in rng.integers(0, start, 3):
            changed[position] = rng.integers(0, 256)
        path.write_bytes(changed)
        try:
            checkpoint = resolve(str(path))
            for name in checkpoint.tensors:
                checkpoint.tensors[name]
        except SpecEdgeError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 50  # most of the head is vocabulary, where a changed letter may go unnoticed
