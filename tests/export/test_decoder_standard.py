"""The standard graph: same numbers as the speculative one, left-padded batches, a past of length zero, its axes."""

from __future__ import annotations

import numpy as np
import pytest

from specedge.export.decoder import write_decoder
from specedge.tests.export.graphs import Speculative, Standard
from specedge.tests.reference import forward, memory_checkpoint

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

CLOSE = {"fp32": 1e-4, "fp16": 0.1, "int8": 0.5, "int4": 0.5}


def write(folder, precision="fp32", **changes):
    checkpoint = memory_checkpoint(**changes)
    spec = write_decoder(checkpoint, folder, stem="target", precision=precision, capacity=64, standard=True)
    return checkpoint, spec


@pytest.mark.parametrize("precision", CLOSE)
def test_both_graphs_agree(tmp_path, rng, precision):
    _, spec = write(tmp_path, precision, attention_bias=True)
    ids = rng.integers(0, 160, 20)
    expected, _ = Speculative(tmp_path / "target.onnx", spec).run(ids)
    standard = Standard(tmp_path / "model.onnx", spec)
    first = standard.run(ids[None, :13], np.ones((1, 13)), np.arange(13)[None])
    rest = standard.run(ids[None, 13:], np.ones((1, 20)), np.arange(13, 20)[None])
    assert first.dtype == np.float32
    assert np.abs(np.concatenate([first[0], rest[0]]) - expected).max() < CLOSE[precision]


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_a_left_padded_batch_is_what_its_rows_are_alone(tmp_path, rng, precision):
    checkpoint, spec = write(tmp_path, precision)
    long, short, pad = rng.integers(0, 160, 17), rng.integers(0, 160, 9), 8
    mask = np.ones((2, 17), np.int64)
    mask[1, :pad] = 0
    positions = np.stack([np.arange(17), np.maximum(np.arange(17) - pad, 0)])
    batch = Standard(tmp_path / "model.onnx", spec, batch=2)
    ids = np.stack([long, np.concatenate([np.full(pad, 3), short])])
    prompt = batch.run(ids, mask, positions)
    following = rng.integers(0, 160, 2)
    step = batch.run(following[:, None], np.concatenate([mask, [[1], [1]]], 1), [[17], [9]])
    for row, text in enumerate((long, short)):
        alone = Standard(tmp_path / "model.onnx", spec)
        whole = np.append(text, following[row])[None]
        expected = alone.run(whole, np.ones_like(whole), np.arange(whole.shape[1])[None])[0]
        assert np.abs(prompt[row, -len(text) :] - expected[:-1]).max() < CLOSE[precision]
        assert np.abs(step[row, 0] - expected[-1]).max() < CLOSE[precision]
    assert np.isfinite(prompt).all()
    if precision == "fp32":
        assert np.abs(prompt[1, pad:] - forward(checkpoint, short)[0]).max() < CLOSE["fp32"]


def test_inputs_and_outputs_are_named_as_other_tools_expect(tmp_path):
    write(tmp_path)
    graph = onnx.load(tmp_path / "model.onnx", load_external_data=False).graph

    def shapes(values):
        return {
            value.name: [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
            for value in values
        }

    past = ["batch_size", 2, "past_sequence_length", 16]
    total = "past_sequence_length + sequence_length"
    names = [f"{layer}.{kind}" for layer in range(2) for kind in ("key", "value")]
    assert shapes(graph.input) == {
        "input_ids": ["batch_size", "sequence_length"],
        "attention_mask": ["batch_size", total],
        "position_ids": ["batch_size", "sequence_length"],
        **{f"past_key_values.{name}": past for name in names},
    }
    assert shapes(graph.output) == {
        "logits": ["batch_size", "sequence_length", 160],
        **{f"present.{name}": ["batch_size", 2, total, 16] for name in names},
    }


def test_the_weights_are_on_disk_once(tmp_path):
    _, spec = write(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.onnx_data", "target.onnx"]
    for name in ("target.onnx", "model.onnx"):
        model = onnx.load(tmp_path / name, load_external_data=False)
        places = {
            entry.value
            for tensor in model.graph.initializer
            for entry in tensor.external_data
            if entry.key == "location"
        }
        assert places == {"model.onnx_data"}
    assert (tmp_path / "model.onnx_data").stat().st_size == spec.weight_bytes
