"""Blocks of a GGUF file are kept as they are: read, joined, stored and run without a second rounding."""

from __future__ import annotations

import hashlib
import itertools
import struct
from dataclasses import replace

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quants

from specedge.export.checkpoint import RoundedTensors
from specedge.export.gguf_blocks import join_rows, keep_blocks, kept_bytes, rounded_tensors
from specedge.export.gguf_file import GgufFile
from specedge.export.graphs import make_plan
from specedge.export.linear import Linears
from specedge.export.nodes import GraphBuilder
from specedge.export.pipeline import export
from specedge.export.sources import resolve
from specedge.export.weights import WeightFile
from specedge.models import find_family
from specedge.quant.grid import Rounded, dequantise
from specedge.quant.layer import Layer, effective_weight
from specedge.runtime.bundle import open_bundle
from specedge.runtime.errors import CheckpointError, UnsupportedModelError, UsageError
from specedge.tests.export.bundles import QUICK, names
from specedge.tests.export.graphs import Speculative
from specedge.tests.reference import session
from specedge.tests.tiny import TinyLlama, write_tiny_gguf

KINDS = ("Q4_0", "Q4_1", "Q8_0")
QKV = "model.layers.1.self_attn.qkv_proj"
GGUF = replace(QUICK, precision="gguf", capacity=64)


def same_bits(one, other) -> bool:
    return one.shape == other.shape and np.array_equal(one.view(np.uint32), other.view(np.uint32))


def one_line(error) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


def write(path, array, kind):
    """A GGUF file of one tensor "t"; bytes are taken as blocks."""
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("t", array, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


def qkv_kinds(q, k, v, rest="Q4_1"):
    """Number formats of the attention's parts, and of the rest."""
    return lambda name: {"q_proj": q, "k_proj": k, "v_proj": v}.get(name.split(".")[-2], rest)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_what_its_definition_says(tmp_path, rng, kind):
    step, low = 0.03125, -0.171875
    if kind == "Q8_0":
        codes = [*range(-128, -112), *range(112, 128)]
        block = struct.pack("<e32b", step, *codes)
        expected = [step * code for code in codes]
    else:
        codes = [int(code) for code in rng.integers(0, 16, 32)]
        halves = zip(codes[:16], codes[16:], strict=True)
        packed = bytes(first | second << 4 for first, second in halves)
        block = struct.pack("<e" if kind == "Q4_0" else "<ee", *([step] if kind == "Q4_0" else [step, low])) + packed
        expected = [step * (code - 8) if kind == "Q4_0" else step * code + low for code in codes]
    file = write(tmp_path / "t.gguf", np.frombuffer(block * 3, np.uint8).reshape(3, -1), kind)
    rounded = file.read_rounded("t")
    assert rounded.codes.shape == (3, 32)
    np.testing.assert_array_equal(dequantise(rounded), np.array([expected] * 3, np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_the_files_to_the_last_bit(tmp_path, rng, kind, monkeypatch):
    monkeypatch.setattr("specedge.export.gguf_blocks._CHUNK", 10)
    original = (rng.standard_normal((37, 96)) * 10.0 ** rng.integers(-4, 0, (37, 1))).astype(np.float32)
    original[3] = 0
    original[4] = 0.25
    packed = quants.quantize(original, GGMLQuantizationType[kind])
    rounded = write(tmp_path / "t.gguf", packed, kind).read_rounded("t")
    assert same_bits(dequantise(rounded), quants.dequantize(packed, GGMLQuantizationType[kind]))
    assert (rounded.width, rounded.grid.group) == (96, 32)
    assert same_bits(rounded.group.scale, rounded.group.scale.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_q_and_k_stand_for_half_split_rotation(tmp_path, kind):
    model = TinyLlama(heads=4, kv_heads=2, head_dim=32, attention_bias=True)
    tensors = resolve(str(write_tiny_gguf(tmp_path / "m.gguf", model, kinds=lambda name: kind))).tensors
    assert isinstance(tensors, RoundedTensors)
    for name, original in model.tensors().items():
        rounded = tensors.rounded(name)
        assert (rounded is None) == (tensors.grid(name) is None) == (original.ndim == 1), name
        if rounded is not None:
            assert same_bits(dequantise(rounded), tensors[name]), name
            # The file's rows are the model's rounded, whatever order the file has them in.
            expected = quants.dequantize(
                quants.quantize(original, GGMLQuantizationType[kind]), GGMLQuantizationType[kind]
            )
            assert same_bits(dequantise(rounded), expected), name


@pytest.mark.parametrize("kinds", list(itertools.product(KINDS, repeat=3)), ids="-".join)
def test_parts_of_different_formats_join_exactly(rng, kinds, tmp_path):
    parts, expected = [], []
    for number, kind in enumerate(kinds):
        form = GGMLQuantizationType[kind]
        packed = quants.quantize(rng.standard_normal((5 + number, 64)).astype(np.float32), form)
        parts.append(write(tmp_path / f"{number}.gguf", packed, kind).read_rounded("t"))
        expected.append(quants.dequantize(packed, form))
    joined = join_rows(parts)
    np.testing.assert_array_equal(dequantise(joined), np.concatenate(expected))
    assert joined.grid.bits == (8 if "Q8_0" in kinds else 4)
    assert (joined.group.shift is not None) == ("Q4_1" in kinds)


def test_one_part_in_floats_makes_the_joined_layer_floats(tmp_path):
    path = write_tiny_gguf(tmp_path / "m.gguf", kinds=qkv_kinds("Q4_0", "Q4_1", "F16"))
    tensors = resolve(str(path)).tensors
    quantise = keep_blocks(tensors, find_family("llama"))
    weight = np.concatenate([tensors[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"])
    layer = quantise(QKV, weight, None)
    assert layer.weight is weight
    down = "model.layers.0.mlp.down_proj"
    assert isinstance(quantise(down, tensors[f"{down}.weight"], None).weight, Rounded)


@pytest.mark.parametrize("tied", [True, False])
def test_every_layer_is_what_the_tensors_say(tmp_path, tied):
    path = write_tiny_gguf(tmp_path / "m.gguf", TinyLlama(tied=tied), kinds=qkv_kinds("Q4_0", "Q4_1", "Q8_0"))
    tensors = resolve(str(path)).tensors
    quantise = keep_blocks(tensors, find_family("llama"))
    ends = ["model.embed_tokens"] if tied else ["model.embed_tokens", "lm_head"]
    modules = ["self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    for name in [*ends, *(f"model.layers.{layer}.{module}" for layer in range(2) for module in modules)]:
        # Zeros in the weight's place: it is the file that decides.
        layer = quantise(name, np.zeros_like(tensors[f"{name}.weight"]), None)
        assert same_bits(effective_weight(layer), tensors[f"{name}.weight"])
    bias = np.ones(128, np.float32)
    layer = quantise(QKV, np.zeros((128, 64), np.float32), bias)
    weight = np.concatenate([tensors[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"])
    np.testing.assert_array_equal(effective_weight(layer), weight)
    assert layer.bias is bias


def test_other_formats_are_refused_before_anything_is_written(tmp_path):
    path = write_tiny_gguf(tmp_path / "m.gguf", kinds=qkv_kinds("Q4_0", "Q4_0", "Q5_1", "Q8_0"))
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.attn_v\.weight is Q5_1, .*int4 or int8") as error:
        export(str(path), tmp_path / "home" / "bundle", GGUF)
    assert str(path) in one_line(error)
    assert not (tmp_path / "home").exists() or not names(tmp_path / "home")
    with pytest.raises(UnsupportedModelError, match="Q5_1"):
        export(str(path), tmp_path / "home" / "bundle", replace(QUICK, drafts=("self-gguf",), capacity=64))


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "IQ4_NL"])
def test_formats_that_have_no_grid_are_named(tmp_path, kind):
    block, size = {"Q4_K": (256, 144), "Q6_K": (256, 210), "IQ4_NL": (32, 18)}[kind]
    file = write(tmp_path / "t.gguf", np.zeros((2, size), np.uint8), kind)
    assert file.tensors["t"].shape == (2, block)
    for ask in (file.grid, file.read_rounded):
        with pytest.raises(UnsupportedModelError, match=f"tensor t is {kind}, .*Q4_0.*Q8_0.* can"):
            ask("t")


def test_a_checkpoint_that_is_no_gguf_is_refused(tmp_path, tiny_checkpoint):
    for options in (GGUF, replace(QUICK, drafts=("self-gguf",), capacity=64)):
        with pytest.raises(UsageError, match=r"blocks of a GGUF file, which .* is not") as error:
            export(str(tiny_checkpoint), tmp_path / "home" / "bundle", options)
        one_line(error)
    assert not (tmp_path / "home").exists() or not names(tmp_path / "home")


def test_damaged_scales_name_their_tensor(tmp_path):
    block = struct.pack("<ee", float("nan"), 0.5) + bytes(16)
    file = write(tmp_path / "t.gguf", np.frombuffer(block, np.uint8).reshape(1, -1), "Q4_1")
    with pytest.raises(CheckpointError, match=r"tensor t .*NaN"):
        file.read_rounded("t")
    with pytest.raises(CheckpointError, match="tensor x is missing"):
        file.read_rounded("x")


@pytest.mark.parametrize("kinds", list(itertools.product(KINDS, repeat=2)), ids="-".join)
def test_a_stored_layer_multiplies_with_the_files_weights(tmp_path, rng, kinds):
    original = rng.standard_normal((70, 96)).astype(np.float32)
    parts = [
        write(tmp_path / f"{number}.gguf", quants.quantize(rows, GGMLQuantizationType[kind]), kind).read_rounded("t")
        for number, (rows, kind) in enumerate(zip((original[:30], original[30:]), kinds, strict=True))
    ]
    joined = join_rows(parts)
    linears = Linears("float32", exact=True)
    with WeightFile(tmp_path / "w.onnx_data") as weights:
        linears.store(weights, "layer", Layer(joined))
        graph = GraphBuilder(weights, "float32")
        graph.input("x", "float32", ["rows", 96])
        graph.output(linears.apply(graph, "x", "layer"), "float32", ["rows", 70])
        (tmp_path / "m.onnx").write_bytes(graph.model("layer").SerializeToString())
    run = session(tmp_path / "m.onnx").run
    # Rows of a single one lose nothing when they are rounded to 8 bits.
    [weight] = run(None, {"x": np.eye(96, dtype=np.float32)})
    np.testing.assert_allclose(weight.T, dequantise(joined), rtol=0, atol=1e-5)
    rows = rng.standard_normal((16, 96)).astype(np.float32)
    alone = np.concatenate([run(None, {"x": row[None]})[0] for row in rows])
    for width in (2, 3, 5, 8, 16):
        assert same_bits(run(None, {"x": rows[:width]})[0], alone[:width])


def logits_of(folder, which, ids):
    manifest = open_bundle(folder).manifest
    spec = manifest.target if which == "target" else manifest.drafts[which]
    return Speculative(folder / spec.file, spec).run(ids)[0]


def divergence(p, q) -> float:
    """Mean KL(p||q) of laws given as logits."""
    p, q = (rows - np.logaddexp.reduce(rows, axis=-1, keepdims=True) for rows in (p, q))
    return float((np.exp(p) * (p - q)).sum(-1).mean())


MIXES = {
    **{kind: lambda name, kind=kind: kind for kind in KINDS},
    "mixed": qkv_kinds("Q4_0", "Q4_1", "Q8_0"),
    "some floats": qkv_kinds("Q4_0", "F16", "Q8_0", "BF16"),
}


@pytest.mark.parametrize("kinds", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_graph_computes_with_the_files_weights(tmp_path, rng, kinds, tied):
    path = write_tiny_gguf(tmp_path / "m.gguf", TinyLlama(tied=tied, attention_bias=True), kinds=kinds)
    ids = rng.integers(0, 320, 48)
    export(str(path), tmp_path / "fp32", replace(QUICK, precision="fp32", capacity=64))
    export(str(path), tmp_path / "gguf", GGUF)
    expected, found = (logits_of(tmp_path / name, "target", ids) for name in ("fp32", "gguf"))
    assert divergence(expected, found) < 2e-3  # activations are rounded to 8 bits
    assert (expected.argmax(-1) == found.argmax(-1)).mean() > 0.9


def test_a_draft_may_have_the_files_blocks(tmp_path, rng):
    path = write_tiny_gguf(tmp_path / "m.gguf", kinds=lambda name: "Q4_1")
    manifest = export(
        str(path), tmp_path / "bundle", replace(QUICK, drafts=("self-gguf", "self-int8"), verify=True, capacity=256)
    )
    assert set(manifest.drafts) == {"self-gguf", "self-int8"}
    assert manifest.drafts["self-gguf"].precision == "gguf"
    ids = rng.integers(0, 320, 48)
    p, q = (logits_of(tmp_path / "bundle", name, ids) for name in ("target", "self-gguf"))
    assert 0 < divergence(p, q) < 2e-3


def stored(folder, spec) -> dict[str, tuple[int, int]]:
    """Offset and length of each tensor in a graph's weight file, by its name."""
    import onnx

    model = onnx.load(folder / spec.file, load_external_data=False)
    found = {}
    for tensor in model.graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if entries:
            found[tensor.name] = (int(entries["offset"]), int(entries["length"]))
    return found


def check_size(folder, tensors, capacity_bytes) -> None:
    """The weight file is as large as the tensors and the rotary tables, and holds nothing twice."""
    spec = open_bundle(folder).manifest.target
    data = (folder / "onnx" / "model.onnx_data").read_bytes()
    spans = set(stored(folder, spec).values())
    large = [hashlib.sha256(data[start : start + size]).digest() for start, size in spans if size >= 1 << 14]
    assert len(set(large)) == len(large), "a tensor stands in the file twice"
    page = 4096 * len(spans)
    assert sum(size for _, size in spans) <= len(data) <= sum(size for _, size in spans) + page
    as_it_has_them = sum(tensors.size(name) for name in tensors)
    assert abs(len(data) - capacity_bytes - as_it_has_them) <= page + as_it_has_them // 100


WIDE = TinyLlama(hidden=256, intermediate=512, heads=4, kv_heads=2, head_dim=64)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bundle_is_as_large_as_the_file(tmp_path, kind):
    path = write_tiny_gguf(tmp_path / "m.gguf", WIDE, kinds=lambda name: kind)
    manifest = export(str(path), tmp_path / "bundle", GGUF)
    tensors = Sizes(path)
    check_size(tmp_path / "bundle", tensors, 64 * 64 * 4)
    rounded = rounded_tensors(resolve(str(path)).tensors, "m")
    plan = make_plan(resolve(str(path)), GGUF, torch=False)
    assert plan.estimate.target == kept_bytes(rounded) == pytest.approx(manifest.target.weight_bytes, rel=0.2)
    assert kept_bytes(rounded) == pytest.approx(sum(tensors.size(name) for name in tensors), rel=0.02)


def test_floats_of_16_bits_stay_that_small(tmp_path):
    kinds = lambda name: "F16" if "embed" in name or "down" in name else "Q4_0"  # noqa: E731
    path = write_tiny_gguf(tmp_path / "m.gguf", WIDE, kinds=kinds)
    export(str(path), tmp_path / "bundle", GGUF)
    check_size(tmp_path / "bundle", Sizes(path), 64 * 64 * 4)


class Sizes(dict):
    """Bytes of each tensor in a GGUF file."""

    def __init__(self, path) -> None:
        super().__init__({name: info.size for name, info in GgufFile(path).tensors.items()})

    def size(self, name) -> int:
        return self[name]


@pytest.mark.model
def test_the_built_in_model_keeps_its_blocks(tmp_path, model_bundle):
    from specedge.export.builtin import fetch

    path = fetch("smollm2-135m")
    tensors = rounded_tensors(resolve("smollm2-135m").tensors, "smollm2-135m")
    matrices = 0
    for name in tensors:
        rounded = tensors.rounded(name)
        if rounded is not None:
            matrices += 1
            assert same_bits(dequantise(rounded), tensors[name]), name
    assert matrices == 1 + 7 * 30
    export("smollm2-135m", tmp_path / "bundle", replace(GGUF, capacity=2048))
    check_size(tmp_path / "bundle", Sizes(path), 2 * 2048 * 32 * 4)
    parameters = sum(np.prod(tensors.shape(name)) for name in tensors)
    assert open_bundle(tmp_path / "bundle").manifest.target.weight_bytes < 0.75 * parameters
    ids = np.arange(1000, 1200)
    p, q = (logits_of(folder, "target", ids) for folder in (model_bundle, tmp_path / "bundle"))
    assert divergence(p, q) < 0.05
