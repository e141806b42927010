"""Every graph for a GPU is looked up in the published tables of kernels; what they do not have is found."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from specedge.export.decoder import write_decoder
from specedge.export.dialects import Dialect
from specedge.export.heads import FILE, write_heads
from specedge.export.kernels import check_kernels, find_table, problems
from specedge.quant.formats import FORMATS, find_format, nearest
from specedge.quant.recipe import parse_recipe
from specedge.runtime.errors import ExportError
from specedge.tests.export.graphs import Speculative
from specedge.tests.heads import WIDE, random_heads
from specedge.tests.reference import forward, memory_checkpoint

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

FORMS = [("cuda", "gqa"), ("cuda", "onnx24"), ("cuda", "plain"), ("tensorrt", "onnx24"), ("tensorrt", "plain")]
CASES = [(*form, precision) for form in FORMS for precision in FORMATS[form[0]]]


def stepped(form, step=0.05):
    """A quantiser that has a step for activations, as a calibration would choose one."""
    plain = nearest(form, 2)
    return lambda *layer: dataclasses.replace(plain(*layer), step=step)


def write(folder, device, attention, precision, checkpoint=None, **options):
    form = find_format(precision, device)
    quantise = stepped(form) if form.static else None
    made = {"stem": "target", "capacity": 64, "quantise": quantise, **options}
    checkpoint = checkpoint or memory_checkpoint()
    spec = write_decoder(checkpoint, folder, precision=precision, device=device, attention=attention, **made)
    return folder / spec.file, spec


def load(path):
    return onnx.load(path, load_external_data=False)


@pytest.mark.parametrize(("device", "attention", "precision"), CASES)
def test_every_node_has_a_kernel(tmp_path, rng, device, attention, precision):
    """The twin, the mover of rows and a draft included; and the CPU runs them, so that they are whole."""
    path, spec = write(tmp_path, device, attention, precision, taps=(0, 1))
    write(tmp_path / "draft", device, attention, precision, stem="draft", draft=True)
    graphs = sorted(tmp_path.rglob("*.onnx"))
    assert {each.name for each in graphs} >= {"target.onnx", "compact.onnx", "draft.onnx"}
    for each in graphs:
        # Rows of a compiled bundle's cache are moved by the CUDA provider: no engine is needed for a copy.
        table = find_table("cuda" if each.stem == "compact" else device, attention)
        assert list(problems(load(each), table)) == []
    ids = rng.integers(0, 160, 12)
    logits, _ = Speculative(path, spec).run(ids)
    assert np.corrcoef(logits.ravel(), forward(memory_checkpoint(), ids)[0].ravel())[0, 1] > 0.95


@pytest.mark.parametrize(
    ("device", "attention", "table", "found"),
    [
        ("cpu", "gqa", ("cuda", "gqa"), "GroupQueryAttention .* has no kernel for float as T"),
        ("cuda", "gqa", ("tensorrt", "onnx24"), "SimplifiedLayerNormalization .* has no kernel"),
        ("tensorrt", "onnx24", ("tensorrt", "plain"), "opset 24 is newer than 22"),
    ],
)
def test_what_a_device_lacks_is_found(tmp_path, device, attention, table, found):
    path, _ = write(tmp_path, device, attention, "fp32" if device == "cpu" else "fp16")
    with pytest.raises(ExportError, match=found):
        check_kernels(load(path), Dialect(table[1], 21, table[0]), "target")


def test_control_flow_and_shapes_that_depend_on_values(tmp_path):
    path, _ = write(tmp_path, "tensorrt", "plain", "fp16")
    table = find_table("tensorrt", "plain")

    def broken(change):
        model = load(path)
        change(model)
        return " ".join(problems(model, table))

    def insert(kind, inputs, outputs, **attributes):
        return lambda model: model.graph.node.insert(0, onnx.helper.make_node(kind, inputs, outputs, **attributes))

    assert "control flow" in broken(insert("NonZero", ["input_ids"], ["x"]))
    assert "is asked for" in broken(lambda model: model.graph.node.append(
        onnx.helper.make_node("Shape", ["hidden"], ["x"])))  # fmt: skip
    assert "K is no constant" in broken(insert("TopK", ["attention_bias", "write_index"], ["x", "y"]))
    assert "no width" in broken(
        lambda model: model.graph.input[0].type.tensor_type.shape.dim[0].__setattr__("dim_param", "batch")
    )


@pytest.mark.parametrize("device", ["cuda", "tensorrt"])
def test_heads_have_kernels_too(tmp_path, device):
    config = dataclasses.replace(WIDE, vocab_size=160)
    recipe = parse_recipe("fp16", device, draft=True)
    write_heads(random_heads(config), memory_checkpoint(), tmp_path, recipe, device)
    assert list(problems(load(tmp_path / FILE), find_table(device, "onnx24"))) == []


def test_the_tables_say_where_they_are_from():
    for form in FORMS:
        table = find_table(*form)
        assert table.source.startswith("https://github.com/")
        assert table.version
    assert find_table("cpu", "gqa") is None
    assert find_table("cuda", "gqa").allows("com.microsoft", "GroupQueryAttention", 1, "T", "float") is False
    assert find_table("cuda", "gqa").allows("", "NoSuchOperator", 21, "T", "float") is None
