"""The speculative graph of tiny models against a numpy reference: chains, pieces, trees, padding, every switch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from specedge.export.decoder import write_decoder
from specedge.quant.formats import find_format, grid_for
from specedge.quant.grid import dequantise, round_nearest
from specedge.runtime.errors import CheckpointError, StorageError, UnsupportedModelError, UsageError
from specedge.tests.export.graphs import Speculative, tree_errors
from specedge.tests.reference import changed, forward, memory_checkpoint

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

CAPACITY = 64
PRECISIONS = ("fp32", "fp16", "int8", "int4")
# Absolute error of a logit (they reach 12), for activations rounded to 16 or 8 bits.
CLOSE = {"fp32": 1e-4, "fp16": 0.1, "int8": 1.5, "int4": 1.5}

SHAPES = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "one key head": {"num_key_value_heads": 1},
    "as many key heads": {"num_key_value_heads": 4},
    "wide heads": {"head_dim": 32},
    "one layer": {"num_hidden_layers": 1},
    "width 80": {"hidden_size": 80, "intermediate_size": 112, "num_attention_heads": 5, "num_key_value_heads": 5},
    "mistral": {"model_type": "mistral", "sliding_window": CAPACITY},
}


def write(checkpoint, folder, precision="fp32", **options):
    spec = write_decoder(
        checkpoint, folder, **{"stem": "target", "precision": precision, "capacity": CAPACITY, **options}
    )
    return folder / spec.file, spec


def rounded(checkpoint, form):
    """The checkpoint with the weights that a graph of this number format computes with."""
    layers = checkpoint.config["num_hidden_layers"]

    def round_weight(name, weight):
        grid = grid_for(form, name.removesuffix(".weight"), layers)
        return weight if weight.ndim == 1 or grid is None else dequantise(round_nearest(weight, grid))

    return changed(checkpoint, **{name: round_weight(name, weight) for name, weight in checkpoint.tensors.items()})


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_chain_in_one_pass(tmp_path, rng, shape, precision):
    checkpoint = memory_checkpoint(**SHAPES[shape])
    path, spec = write(checkpoint, tmp_path, precision)
    ids = rng.integers(0, 160, 24)
    logits, hidden = Speculative(path, spec).run(ids)
    expected, rows = forward(rounded(checkpoint, find_format(precision)), ids)
    assert logits.dtype == hidden.dtype == np.float32
    assert np.abs(logits - expected).max() < CLOSE[precision]
    assert np.abs(hidden - rows).max() < CLOSE[precision]
    assert (logits.argmax(-1) == expected.argmax(-1)).mean() > 0.9


def test_an_int8_draft(tmp_path, rng):
    checkpoint = memory_checkpoint()
    path, spec = write(checkpoint, tmp_path, "int8", stem="draft", draft=True)
    ids = rng.integers(0, 160, 24)
    logits, _ = Speculative(path, spec).run(ids)
    expected, _ = forward(rounded(checkpoint, find_format("int8", draft=True)), ids)
    assert np.abs(logits - expected).max() < CLOSE["int8"]
    assert spec.precision == "int8-block"
    assert spec.file == "draft.onnx"


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("past", [0, 11])
@pytest.mark.parametrize("pad", [0, 3])
@pytest.mark.parametrize("capacity", [None, 32])
def test_a_tree_sees_its_own_paths_only(tmp_path, rng, precision, past, pad, capacity):
    checkpoint = memory_checkpoint()
    graph = Speculative(*write(checkpoint, tmp_path, precision), capacity)
    assert max(tree_errors(graph, checkpoint, rng, past, pad)) < CLOSE[precision]


def test_pieces_and_a_rewind_continue_where_the_cache_ends(tmp_path, rng):
    checkpoint = memory_checkpoint()
    path, spec = write(checkpoint, tmp_path)
    graph = Speculative(path, spec)
    ids = rng.integers(0, 160, 30)
    expected, _ = forward(checkpoint, ids)
    graph.run(ids[:9])
    graph.run(rng.integers(0, 160, 6))
    graph.length = 9
    for start, end in ((9, 10), (10, 17), (17, 30)):
        logits, _ = graph.run(ids[start:end], pad=2)
        assert np.abs(logits - expected[start:end]).max() < CLOSE["fp32"]


def test_only_wanted_rows_are_scored(tmp_path, rng):
    path, spec = write(memory_checkpoint(), tmp_path)
    ids = rng.integers(0, 160, 8)
    every, _ = Speculative(path, spec).run(ids)
    some, hidden = Speculative(path, spec).run(ids, wanted=[7, 2])
    assert (some == every[[7, 2]]).all()
    assert len(hidden) == 8


@pytest.mark.parametrize("precision", [*PRECISIONS, "int8 draft"])
def test_a_row_does_not_depend_on_how_many_run_with_it(tmp_path, rng, precision):
    """At P = 0 a row sees only itself: attention is exact, and every product must be too, bit for bit."""
    precision, _, draft = precision.partition(" ")
    checkpoint = memory_checkpoint(hidden_size=128, intermediate_size=384, vocab_size=1000, num_hidden_layers=3)
    path, spec = write(checkpoint, tmp_path, precision, draft=bool(draft))
    ids = rng.integers(0, 1000, 16)
    alone = [np.concatenate(Speculative(path, spec).run(ids[row : row + 1]), -1)[0] for row in range(16)]
    for width in (2, 3, 4, 5, 7, 8, 16):
        together = Speculative(path, spec).run(ids[:width], np.zeros(width, np.int64), np.eye(width, dtype=bool))
        assert (np.concatenate(together, -1) == alone[:width]).all(), f"width {width}"


def test_rotary_scaling_reaches_the_graph(tmp_path, rng):
    checkpoint = memory_checkpoint(rope_scaling={"rope_type": "linear", "factor": 2.0})
    path, spec = write(checkpoint, tmp_path)
    ids = rng.integers(0, 160, 20)
    frequencies = 10000.0 ** (-np.arange(0, 16, 2) / 16) / 2
    logits, _ = Speculative(path, spec).run(ids)
    assert np.abs(logits - forward(checkpoint, ids, frequencies=frequencies)[0]).max() < CLOSE["fp32"]
    assert np.abs(logits - forward(checkpoint, ids)[0]).max() > 0.1


def test_what_the_manifest_is_told(tmp_path):
    told = []
    _, spec = write(memory_checkpoint(), tmp_path / "new", "fp16", on_tensor=told.append)
    assert dataclasses.asdict(spec) == {
        "file": "target.onnx",
        "flavour": "gqa",
        "precision": "fp16",
        "layers": 2,
        "kv_heads": 2,
        "head_dim": 16,
        "hidden_size": 64,
        "vocab_size": 160,
        "capacity": CAPACITY,
        "cache_dtype": "float16",
        "weight_bytes": sum(told),
        "shares_cache": False,
        "cache_layers": (),
        "recipe": "fp16",
        "taps": (),
        "device": "",
        "fixed": False,
        "top": 0,
        "chains": "",
        "compact": "",
    }
    assert {path.name: path.stat().st_size for path in (tmp_path / "new").iterdir()}["target.onnx_data"] == sum(told)


def test_a_tied_matrix_is_stored_once(tmp_path):
    sizes = {}
    for precision in PRECISIONS:
        for tied in (True, False):
            folder = tmp_path / f"{precision}{tied}"
            checkpoint = memory_checkpoint(tie_word_embeddings=tied, vocab_size=4096)
            sizes[precision, tied] = write(checkpoint, folder, precision)[1].weight_bytes
    for precision, size in (("fp32", 4), ("fp16", 2), ("int8", 1), ("int4", 1)):
        assert sizes[precision, False] - sizes[precision, True] > 0.95 * size * 4096 * 64


@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("precision", ["fp16", "int8", "int4"])
def test_a_cuda_graph_computes_in_half_precision(tmp_path, rng, device, precision):
    checkpoint = memory_checkpoint()
    path, spec = write(checkpoint, tmp_path, precision, device=device)
    assert spec.cache_dtype == "float16"
    kinds = {tensor.data_type for tensor in onnx.load(path, load_external_data=False).graph.initializer}
    assert onnx.TensorProto.FLOAT not in kinds
    # The CPU can run it too, if not fast.
    ids = rng.integers(0, 160, 24)
    logits, _ = Speculative(path, spec).run(ids)
    assert (logits.argmax(-1) == forward(checkpoint, ids)[0].argmax(-1)).mean() > 0.7


def test_the_graph_file_stays_small_and_declares_an_old_opset(tmp_path):
    path, _ = write(memory_checkpoint(), tmp_path, "int4")
    model = onnx.load(path, load_external_data=False)
    assert path.stat().st_size < 40_000
    assert (model.ir_version, {entry.domain: entry.version for entry in model.opset_import}) == (
        10,
        {"": 21, "com.microsoft": 1},
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"precision": "int2"}, UsageError, "precision 'int2'"),
        ({"device": "npu"}, UsageError, "device 'npu' is not available in this version"),
        ({"attention": "flash"}, UsageError, "attention is 'flash': choose one of gqa, onnx24, plain"),
        ({"device": "tensorrt", "attention": "gqa"}, UsageError, "TensorRT does not know GroupQueryAttention"),
        ({"device": "cuda", "precision": "fp32"}, UsageError, "precision 'fp32' is not available on device 'cuda'"),
        ({"capacity": 129}, UsageError, "capacity is 129: tiny takes 1 to 128 positions"),
        ({"capacity": 0}, UsageError, "capacity is 0"),
    ],
)
def test_options_out_of_range(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        write(memory_checkpoint(), tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_a_window_smaller_than_the_capacity_is_refused(tmp_path):
    checkpoint = memory_checkpoint(model_type="mistral", sliding_window=CAPACITY - 1)
    with pytest.raises(UnsupportedModelError, match=r"window of 63 rows .* --capacity 63"):
        write(checkpoint, tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("model.norm.weight", None, CheckpointError, "has no tensor 'model.norm.weight'"),
        ("model.layers.1.mlp.up_proj.weight", np.zeros((96, 65)), CheckpointError, r"has shape \[96, 65\] where"),
        ("model.layers.0.self_attn.q_norm.weight", np.zeros(16), UnsupportedModelError, "q_norm.weight' has no place"),
    ],
)
def test_tensors_that_do_not_fit_the_config(tmp_path, name, value, error, message):
    broken = changed(memory_checkpoint(), **{name: None if value is None else value.astype(np.float32)})
    with pytest.raises(error, match=message):
        write(broken, tmp_path)


def test_leftovers_of_other_tools_are_passed_over(tmp_path):
    extra = {
        "lm_head.weight": np.zeros((160, 64), np.float32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32),
    }
    write(changed(memory_checkpoint(), **extra), tmp_path)


def test_a_weight_file_that_is_there_is_not_overwritten(tmp_path):
    write(memory_checkpoint(), tmp_path)
    with pytest.raises(StorageError, match="File exists"):
        write(memory_checkpoint(), tmp_path)
