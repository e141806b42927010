"""Every way a linear layer is stored, with everything that may be added to it, against numpy."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from specedge.export.linear import Linears
from specedge.export.nodes import GraphBuilder
from specedge.export.vocabulary import Vocabulary
from specedge.export.weights import WeightFile
from specedge.quant.formats import EMBEDDING, grid_for
from specedge.quant.grid import round_nearest
from specedge.quant.layer import Layer, LowRank, effective_weight
from specedge.quant.recipe import parse_recipe

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

NAME = "model.layers.0.mlp.up_proj"
RECIPES = (
    "fp32", "fp16", "int8", "int8-static", "int8-block", "int8-block:asym", "int4", "int4:b64", "int4:sym",
    "int4:asym", "int4:b64:sym", "int4:b128:asym", "int3", "fp8-e4m3", "fp8-e5m2", "int4 exact", "int8-block exact",
)  # fmt: skip
# With 4 bits, MatMulNBits takes another way for one row than for several, but in blocks of 32.
DEPENDENT = ("int4:b64", "int4:b64:sym", "int4:b128:asym")
# Relative error of a product, for activations rounded to 16 or 8 bits.
CLOSE = {"fp32": 1e-6, "fp16": 2e-3, "int3": 1e-6, "fp8-e4m3": 1e-6, "fp8-e5m2": 1e-6}
ROUNDED = 0.02
WIDTH, OUTPUTS = 192, 48


@cache
def form_of(recipe):
    return parse_recipe(recipe.removesuffix(" exact")).form


def layer_of(rng, recipe, *, width=WIDTH, outputs=OUTPUTS, name=NAME, **features):
    weight = rng.standard_normal((outputs, width)).astype(np.float32) + 0.2
    grid = grid_for(form_of(recipe), NAME if recipe.endswith("exact") else name, 3)
    if recipe == "int4 exact":  # what a file has: minima in 16 bits
        rounded = round_nearest(weight, grid)
        low = (rounded.group.shift - 8 * rounded.group.scale).astype(np.float16).astype(np.float32)
        shift = low + 8 * rounded.group.scale
        return Layer(replace(rounded, group=replace(rounded.group, shift=shift)), **features)
    if recipe == "int8-block exact":  # what a file's mixed blocks become: 8 bits and a shift
        grid = replace(grid, kind="affine")
    stored = weight if grid is None else round_nearest(weight, grid)
    return Layer(stored, **features)


def session(folder, recipe, build, inputs):
    """A session of what `build` adds to a graph; the weights' names and the size of their file."""
    form = form_of(recipe)
    with WeightFile(folder / "w.onnx_data") as weights:
        graph = GraphBuilder(weights, form.dtype)
        for name, (dtype, shape) in inputs.items():
            graph.input(name, dtype, shape)
        build(graph, weights)
        (folder / "w.onnx").write_bytes(graph.model("layer").SerializeToString())
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(folder / "w.onnx", options, providers=["CPUExecutionProvider"])


def linear(folder, recipe, *layers):
    """y0, y1 … of one x; each is [rows, out]."""
    form = form_of(recipe)

    def build(graph, weights):
        linears = Linears(form.dtype, exact=recipe.endswith("exact"))
        for number, layer in enumerate(layers):
            linears.store(weights, f"{NAME}.{number}", layer)
        for number, _ in enumerate(layers):
            y = linears.apply(graph, "x", f"{NAME}.{number}")
            graph.op("Identity", y, name=f"y{number}")
            graph.output(f"y{number}", form.dtype, ["rows", "outputs"])

    width = layers[0].weight.shape[1] if isinstance(layers[0].weight, np.ndarray) else layers[0].weight.width
    found = session(folder, recipe, build, {"x": (form.dtype, ["rows", width])})
    return lambda x: [y.astype(np.float32) for y in found.run(None, {"x": x.astype(form.dtype)})]


def features_of(rng, *names, width=WIDTH, outputs=OUTPUTS):
    every = {
        "bias": rng.standard_normal(outputs).astype(np.float32),
        "low_rank": LowRank(
            rng.standard_normal((4, width)).astype(np.float32) / 8, rng.standard_normal((outputs, 4)).astype(np.float32)
        ),
        "step": 0.035,
    }
    return {name: every[name] for name in names}


@pytest.mark.parametrize("features", [(), ("bias",), ("low_rank",), ("bias", "low_rank")])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_is_what_its_weight_says(tmp_path, rng, recipe, features):
    added = features_of(rng, *features)
    if form_of(recipe).static:
        added |= features_of(rng, "step")
    layer = layer_of(rng, recipe, **added)
    x = rng.standard_normal((5, WIDTH)).astype(np.float32)
    (y,) = linear(tmp_path, recipe, layer)(x)
    exact = x @ effective_weight(layer).T + (0 if layer.bias is None else layer.bias)
    tolerance = CLOSE.get(recipe, ROUNDED) + (1e-3 if "low_rank" in features else 0)
    assert np.linalg.norm(y - exact) < tolerance * np.linalg.norm(exact)


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe not in DEPENDENT])
@pytest.mark.parametrize("features", [(), ("bias", "low_rank")])
def test_a_row_does_not_depend_on_how_many_run_with_it(tmp_path, rng, recipe, features):
    """Bit for bit: a token that is verified is the token that plain decoding gives."""
    layer = layer_of(rng, recipe, width=576, outputs=192, **features_of(rng, *features, width=576, outputs=192))
    apply = linear(tmp_path, recipe, layer)
    x = rng.standard_normal((16, 576)).astype(np.float32)
    x[3] *= 30
    alone = np.concatenate([apply(row[None])[0] for row in x])
    for width in (4, 8, 16):
        assert (apply(x[:width])[0] == alone[:width]).all(), f"width {width}"


@pytest.mark.parametrize("recipe", ["int4", "int4:sym", "int4 exact", "int8-block", "int8", "fp8-e4m3"])
@pytest.mark.parametrize("width", [80, 200])
def test_a_width_of_no_whole_blocks(tmp_path, rng, recipe, width):
    layer = layer_of(rng, recipe, width=width)
    x = rng.standard_normal((3, width)).astype(np.float32)
    (y,) = linear(tmp_path, recipe, layer)(x)
    exact = x @ effective_weight(layer).T
    assert np.linalg.norm(y - exact) < ROUNDED * np.linalg.norm(exact)


def test_a_static_step_rounds_the_activations_as_it_says(tmp_path, rng):
    step = 0.05
    layer = layer_of(rng, "int8-static", step=step)
    x = rng.standard_normal((4, WIDTH)).astype(np.float32)
    x[0, 0] = 100  # beyond the largest step
    (y,) = linear(tmp_path, "int8-static", layer)(x)
    rounded = np.clip(np.rint(x / step), -128, 127) * step
    assert np.abs(y - rounded @ effective_weight(layer).T).max() < 1e-3


def test_layers_of_one_model_may_differ(tmp_path, rng):
    recipes = ("fp32", "int8", "int4", "int4:b64:sym", "fp8-e4m3")
    layers = [layer_of(rng, recipe) for recipe in recipes]
    x = rng.standard_normal((2, WIDTH)).astype(np.float32)
    for y, layer in zip(linear(tmp_path, "int4", *layers)(x), layers, strict=True):
        exact = x @ effective_weight(layer).T
        assert np.linalg.norm(y - exact) < ROUNDED * np.linalg.norm(exact)


def test_a_shift_is_exact_where_it_must_be(tmp_path, rng):
    """x of one value a block is rounded without an error, so that only the weights' are left."""
    layer = layer_of(rng, "int4")
    x = np.repeat(rng.standard_normal((3, WIDTH // 32)), 32, axis=1).astype(np.float32)
    exact = x @ effective_weight(layer).T
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    (kept,), (rounded,) = linear(tmp_path / "a", "int4 exact", layer)(x), linear(tmp_path / "b", "int4", layer)(x)
    assert np.abs(kept - exact).max() < 1e-5 * np.abs(exact).max()
    assert np.abs(rounded - exact).max() > np.abs(kept - exact).max()


def test_what_a_runtime_folds_leaves_no_node(tmp_path, rng):
    """16-bit scales, minima, low-rank factors and 8-bit floats are made 32 bits wide once, when the graph is loaded."""
    for number, recipe in enumerate(("int4", "int4 exact", "int4:b64:sym", "fp8-e4m3")):
        folder = tmp_path / str(number)
        folder.mkdir()
        linear(folder, recipe, layer_of(rng, recipe, **features_of(rng, "low_rank")))
        options = ort.SessionOptions()
        options.optimized_model_filepath = str(folder / "folded.onnx")
        options.log_severity_level = 3
        ort.InferenceSession(folder / "w.onnx", options, providers=["CPUExecutionProvider"])
        kinds = {node.op_type for node in onnx.load(folder / "folded.onnx").graph.node}
        assert not kinds & {"Cast", "Mul", "Transpose"}, recipe


@pytest.mark.parametrize(
    ("recipe", "bytes_each"),
    [
        ("fp32", 4), ("fp16", 2), ("int8", 1.01), ("int8-block", 1.07), ("fp8-e4m3", 1.01), ("int4:b32:sym", 0.563),
        ("int4:b64:sym", 0.532), ("int4:b64:asym", 0.541), ("int4", 0.64),
        ("int4:b64", 0.563), ("int4:b128", 0.532), ("int4 exact", 0.627), ("int3", 4),
    ],
)  # fmt: skip
def test_sizes(tmp_path, rng, recipe, bytes_each):
    width, outputs = 1536, 2048
    layer = layer_of(rng, recipe, width=width, outputs=outputs)
    linear(tmp_path, recipe, layer)
    sums = 2 * width * 64 if recipe.startswith("int4") and layer.weight.grid.kind == "affine" else 0
    size = (tmp_path / "w.onnx_data").stat().st_size - sums
    assert size <= 1.001 * bytes_each * width * outputs


@pytest.mark.parametrize("recipe", [*RECIPES, "int4:sym:head4", "int4:head4", "int4:head32", "int8:head8"])
@pytest.mark.parametrize("hidden", [64, 80])
def test_both_ends_of_a_tied_matrix(tmp_path, rng, recipe, hidden):
    form = form_of(recipe)
    layer = layer_of(rng, recipe, width=hidden, outputs=100, name=EMBEDDING, bias=np.ones(100, np.float32))

    def build(graph, weights):
        vocabulary = Vocabulary(form.dtype, exact=recipe.endswith("exact"))
        vocabulary.store(weights, EMBEDDING, layer)
        graph.op("Identity", vocabulary.embed(graph, "ids"), name="rows")
        graph.op("Identity", vocabulary.logits(graph, "x"), name="logits")
        graph.output("rows", form.dtype, [1, "S", hidden])
        graph.output("logits", form.dtype, ["R", 100])

    inputs = {"ids": ("int64", [1, "S"]), "x": (form.dtype, ["R", hidden])}
    found = session(tmp_path, recipe, build, inputs)
    x, ids = rng.standard_normal((3, hidden)).astype(np.float32), np.array([[7, 99, 0, 7]])
    rows, logits = found.run(None, {"ids": ids, "x": x.astype(form.dtype)})
    matrix = effective_weight(layer)
    assert np.abs(rows.astype(np.float32) - matrix[ids]).max() < (1e-5 if form.dtype == "float32" else 4e-3)
    exact = x @ matrix.T + 1
    assert np.linalg.norm(logits.astype(np.float32) - exact) < ROUNDED * np.linalg.norm(exact)
    initialisers = onnx.load(tmp_path / "w.onnx", load_external_data=False).graph.initializer
    places = [tuple((entry.key, entry.value) for entry in tensor.external_data) for tensor in initialisers]
    large = [place for tensor, place in zip(initialisers, places, strict=True) if "table" not in tensor.name and place]
    assert len(set(large)) == len(large)
