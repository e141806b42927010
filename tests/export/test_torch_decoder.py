"""The decoder in PyTorch against the numpy reference, and its layers against the operators of the graphs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specedge.export.linear import Linears
from specedge.export.nodes import GraphBuilder
from specedge.export.rope import inverse_frequencies
from specedge.export.torch_decoder import TorchDecoder, norm_names, plain_layers
from specedge.export.torch_layer import BIAS, DOWN, SCALE, SHIFT, UP, TorchLayer
from specedge.export.weights import WeightFile
from specedge.models import find_family, read_dimensions
from specedge.quant.grid import Grid, round_nearest
from specedge.quant.layer import Layer, LowRank, effective_weight
from specedge.quant.recipe import parse_recipe
from specedge.tests.reference import LLAMA3, forward, memory_checkpoint, session

torch = pytest.importorskip("torch")

GRIDS = {
    "int8 rows": Grid("integer", 8, narrow=True),
    "int8 blocks": Grid("integer", 8, 32, scale_dtype="float16"),
    "int4 symmetric": Grid("integer", 4, 32, scale_dtype="float16"),
    "int4 zero points": Grid("integer", 4, 64, symmetric=False, scale_dtype="float16"),
    "int8 zero points": Grid("integer", 8, 32, symmetric=False, scale_dtype="float16"),
    "int4 affine": Grid("affine", 4, 32, scale_dtype="float16"),
    "int3": Grid("integer", 3, 32, scale_dtype="float16"),
    "e4m3": Grid("float8", 8, float_dtype="float8_e4m3fn"),
    "e5m2": Grid("float8", 8, float_dtype="float8_e5m2"),
}
EVERYTHING = (SCALE, SHIFT, BIAS, DOWN, UP)


def decoder_of(checkpoint):
    family = find_family(checkpoint.config["model_type"])
    sizes = read_dimensions(family, checkpoint.config)
    layers = {name: TorchLayer(layer) for name, layer in plain_layers(family, sizes, checkpoint.tensors).items()}
    return TorchDecoder.build(family, sizes, checkpoint.tensors, layers)


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": False}, {"attention_bias": True, "mlp_bias": True}, {"rope_scaling": LLAMA3}],
)
def test_logits_are_those_of_the_reference(changes):
    checkpoint = memory_checkpoint(**changes)
    decoder = decoder_of(checkpoint)
    ids = np.random.default_rng(1).integers(0, decoder.sizes.vocab_size, (3, 40))
    logits = decoder.logits(decoder.hidden(torch.from_numpy(ids))).numpy()
    for row, given in zip(ids, logits, strict=True):
        expected, _ = forward(checkpoint, row, frequencies=inverse_frequencies(decoder.sizes))
        np.testing.assert_allclose(given, expected, atol=2e-4)


def test_what_follows_a_text_does_not_change_it():
    decoder = decoder_of(memory_checkpoint())
    ids = torch.randint(0, 160, (2, 30))
    torch.testing.assert_close(decoder.hidden(ids)[:, :17], decoder.hidden(ids[:, :17]), atol=1e-5, rtol=1e-5)


def test_norms_have_a_name_each():
    checkpoint = memory_checkpoint()
    decoder = decoder_of(checkpoint)
    norms = norm_names(decoder.family, decoder.sizes)
    assert sorted(norms) == sorted(name for name in checkpoint.tensors if "norm" in name)


@pytest.mark.parametrize("free", [(), EVERYTHING])
@pytest.mark.parametrize("width", [192, 180])
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_a_layer_that_nothing_moved_is_the_layer_that_was_given(rng, grid, width, free):
    weight = rng.standard_normal((24, width)).astype(np.float32)
    low_rank = LowRank(
        rng.standard_normal((4, width)).astype(np.float32), rng.standard_normal((24, 4)).astype(np.float32)
    )
    layer = Layer(round_nearest(weight, grid), rng.standard_normal(24).astype(np.float32), low_rank)
    result = TorchLayer(layer, free=free).result()
    assert result.weight.codes.dtype == layer.weight.codes.dtype
    np.testing.assert_array_equal(result.weight.codes.view(np.uint8), layer.weight.codes.view(np.uint8))
    for given, back in (
        (layer.weight.group.scale, result.weight.group.scale),
        (layer.weight.group.zero, result.weight.group.zero),
        (layer.weight.group.shift, result.weight.group.shift),
        (layer.bias, result.bias),
        (low_rank.down, result.low_rank.down),
        (low_rank.up, result.low_rank.up),
    ):
        assert (given is None) == (back is None)
        assert given is None or np.array_equal(given, back)


@pytest.mark.parametrize("free", [(), EVERYTHING])
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_a_layer_multiplies_with_its_weight_and_looks_its_rows_up(rng, grid, free):
    weight = rng.standard_normal((24, 180)).astype(np.float32)
    layer = Layer(round_nearest(weight, grid), rng.standard_normal(24).astype(np.float32))
    made = TorchLayer(layer, free=free)  # no format: activations stay as they are
    x = rng.standard_normal((2, 5, 180)).astype(np.float32)
    with torch.no_grad():
        given, rows = made.apply(torch.from_numpy(x)).numpy(), made.look_up(torch.tensor([[3, 0], [23, 3]])).numpy()
    np.testing.assert_allclose(given, x @ effective_weight(layer).T + layer.bias, atol=1e-4)
    np.testing.assert_allclose(rows, effective_weight(layer)[[[3, 0], [23, 3]]], atol=1e-6)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_what_is_free_moves_and_can_be_stored(rng, grid):
    weight = rng.standard_normal((24, 192)).astype(np.float32)
    layer = Layer(round_nearest(weight, grid), np.zeros(24, np.float32))
    made = TorchLayer(layer, free=(SCALE, SHIFT, BIAS))
    made.apply(torch.randn(7, 192)).square().sum().backward()
    with torch.no_grad():
        for numbers in made.free.values():
            assert numbers.grad.abs().max() > 0
            numbers -= 0.01 * numbers.grad.sign()
        now = made.look_up(torch.arange(24)).numpy()
    result = made.result()
    scale = result.weight.group.scale
    assert np.array_equal(scale, scale.astype(grid.scale_dtype).astype(np.float32))
    assert (scale != layer.weight.group.scale).any()
    np.testing.assert_allclose(effective_weight(result), now, atol=2e-3 * np.abs(now).max())


@pytest.mark.parametrize(
    ("recipe", "step"),
    [("int8", None), ("int8-static", 0.02), ("int8-block", None), ("int4:sym", None), ("int3", None), ("fp8", None)],
)
def test_activations_are_rounded_as_the_operators_round_them(tmp_path, rng, recipe, step):
    """Far nearer to the graph than the graph is to a product with activations that are not rounded."""
    pytest.importorskip("onnx")
    form = parse_recipe(recipe).form
    weight = rng.standard_normal((48, 192)).astype(np.float32)
    layer = Layer(round_nearest(weight, form.grid), step=step)
    x = (rng.standard_normal((6, 192)) * np.exp(rng.standard_normal(192))).astype(np.float32)
    with WeightFile(tmp_path / "w.onnx_data") as weights:
        graph = GraphBuilder(weights, form.dtype)
        graph.input("x", form.dtype, ["rows", 192])
        linears = Linears(form.dtype)
        linears.store(weights, "layer", layer)
        graph.op("Identity", linears.apply(graph, "x", "layer"), name="y")
        graph.output("y", form.dtype, ["rows", 48])
        (tmp_path / "w.onnx").write_bytes(graph.model("layer").SerializeToString())
    (expected,) = session(tmp_path / "w.onnx").run(None, {"x": x})
    given = TorchLayer(layer, form).apply(torch.from_numpy(x)).numpy()
    plain = TorchLayer(layer).apply(torch.from_numpy(x)).numpy()
    missed = np.linalg.norm(given - expected)
    rounds = recipe not in ("int3", "fp8")
    assert missed < 2e-6 * np.linalg.norm(expected) * (1 if not rounds else 50)
    assert not rounds or missed < 0.02 * np.linalg.norm(plain - expected)


def test_the_gradient_passes_rounded_activations():
    form = parse_recipe("int8").form
    layer = Layer(round_nearest(np.random.default_rng(0).standard_normal((8, 32)).astype(np.float32), form.grid))
    x = torch.randn(3, 32, requires_grad=True)
    TorchLayer(layer, form).apply(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.from_numpy(effective_weight(layer).sum(0)).expand(3, -1))


def test_a_weight_in_floats_has_nothing_free_but_what_stands_beside_it():
    layer = Layer(np.ones((4, 8), np.float32), np.zeros(4, np.float32))
    made = TorchLayer(layer, free=EVERYTHING)
    assert set(made.free) == {BIAS}
    assert TorchLayer(replace(layer, bias=None), free=EVERYTHING).free == {}
