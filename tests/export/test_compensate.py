"""What recipes make of a model, from its own text to the graph: methods lower what rounding costs."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from specedge.export.compensate import compensated
from specedge.export.decoder import write_decoder
from specedge.export.layers import linear_layers, read_decoder
from specedge.export.prepare import prepare_calibration
from specedge.quant.formats import nearest
from specedge.quant.grid import Rounded
from specedge.quant.layer import effective_weight
from specedge.quant.recipe import parse_recipe
from specedge.runtime.contracts import Draft
from specedge.runtime.graph import Decoder
from specedge.tests.export.chats import chat_checkpoint
from specedge.tests.reference import forward

RECIPES = (
    "int4:b64:sym+gptq",
    "int4:b64:sym+scale",
    "int4:b64:sym+bias",
    "int4:b64:sym+lowrank:8",
    "int4:b64:sym+scale+gptq+lowrank:8+bias",
    "int4:b64:sym+auto",
    "int8+scale+gptq",
    "int8-static+scale",
    "int8-static",
)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request):
    """A tiny model with a tokenizer, and its calibration on text that it wrote."""
    checkpoint = chat_checkpoint(tie_word_embeddings=request.param, attention_bias=not request.param)
    with prepare_calibration(checkpoint, capacity=128, tokens=2000, threads=1) as calibration:
        yield checkpoint, calibration


def drafted(checkpoint, folder, recipe, calibration, tokens):
    """Logits of a written graph, teacher-forced."""
    decoder = read_decoder(checkpoint, parse_recipe(recipe).form, 64)
    tensors, quantise = compensated(decoder, checkpoint.tensors, parse_recipe(recipe), calibration)
    spec = write_decoder(
        checkpoint, folder, stem="draft", precision=recipe, capacity=64, quantise=quantise, tensors=tensors
    )
    graph = Decoder(folder / spec.file, spec, threads=1)
    logits = graph.forward(tokens[:1], Draft.chain(tokens[1:])).logits.copy()
    graph.close()
    return logits


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_becomes_a_graph(model, tmp_path, recipe):
    """Its logits stay near the checkpoint's: a scale that is not undone, or is undone twice, is far off."""
    checkpoint, calibration = model
    tokens = list(calibration.texts[0].tokens[:40])
    reference, _ = forward(checkpoint, np.array(tokens))
    found = drafted(checkpoint, tmp_path, recipe, calibration, tokens)
    error = np.sqrt(np.square(found - reference).mean() / np.square(reference).mean())
    assert error < (0.05 if recipe.startswith("int8") else 0.35)


@pytest.mark.parametrize("recipe", ["int8+scale", "int8-static+scale+gptq", "int4:b32:sym+scale", "int4+scale+gptq"])
def test_the_cache_holds_the_checkpoints_own_keys_and_values(model, tmp_path, recipe):
    """A draft works in its target's cache: whatever is scaled, it may not be what the other reads there."""
    checkpoint, calibration = model
    tokens = list(calibration.texts[0].tokens[:40])
    pools = []
    for name in ("fp32", recipe):
        asked = parse_recipe(name)
        parts = {}
        if asked.methods:
            decoder = read_decoder(checkpoint, asked.form, 64)
            parts["tensors"], parts["quantise"] = compensated(decoder, checkpoint.tensors, asked, calibration)
        folder = tmp_path / name.replace(":", "-")
        graph = Decoder(
            folder / "draft.onnx", write_decoder(checkpoint, folder, stem="draft", precision=name, capacity=64, **parts)
        )
        graph.forward(tokens)
        pools.append(graph.pool[:, :, :, :40].copy())
        graph.close()
    whole, rounded = pools
    for plain, other in zip(whole, rounded, strict=True):  # keys and values of each layer
        size = (plain * plain).sum()
        assert abs((plain * other).sum() / size - 1) < 0.1
        assert np.square(plain - other).sum() < (0.02 if recipe.startswith("int8") else 0.2) * size
        gains = (plain * other).sum((0, 2)) / np.square(plain).sum((0, 2))  # of each channel of each head
        assert gains.min() > 0.5 and gains.max() < 1.5


def test_each_layer_is_compensated_on_its_own_moments(model):
    """The output error on the calibration's rows falls below nearest rounding's, layer by layer."""
    checkpoint, calibration = model
    recipe = parse_recipe("int4:b64:sym+gptq")
    decoder = read_decoder(checkpoint, recipe.form, 64)
    tensors, quantise = compensated(decoder, checkpoint.tensors, recipe, calibration)
    assert tensors is checkpoint.tensors
    plain = nearest(recipe.form, 2)
    for name, weight, bias in linear_layers(decoder.family, decoder.dimensions, tensors):
        layer, other = quantise(name, weight, bias), plain(name, weight, bias)
        assert isinstance(layer.weight, Rounded)
        tied = name == "model.embed_tokens" and decoder.dimensions.tied
        if name == "model.embed_tokens" and not tied:
            assert np.array_equal(effective_weight(layer), effective_weight(other))
            continue
        second = calibration["lm_head" if tied else name].second
        missed, before = (weight - effective_weight(each) for each in (layer, other))
        assert np.trace(missed @ second @ missed.T) < np.trace(before @ second @ before.T)


def test_static_steps_come_without_any_method(model):
    checkpoint, calibration = model
    recipe = parse_recipe("int8-static")
    decoder = read_decoder(checkpoint, recipe.form, 64)
    tensors, quantise = compensated(decoder, checkpoint.tensors, recipe, calibration)
    layers = linear_layers(decoder.family, decoder.dimensions, tensors)
    name, weight, bias = next(layer for layer in layers if layer[0].endswith("down_proj"))
    step = quantise(name, weight, bias).step
    assert step is not None
    assert 0 < step <= calibration[name].largest.max() / 127 * 1.01


def test_distillation_is_given_the_texts_and_all_layers(model, monkeypatch):
    checkpoint, calibration = model
    recipe = parse_recipe("int4:b64:sym+scale+distil")
    decoder = read_decoder(checkpoint, recipe.form, 64)
    seen = {}

    def distil(family, dimensions, form, tensors, layers, texts, **more):
        seen.update(more, layers=layers, texts=texts, tensors=tensors)
        return SimpleNamespace(norms={"model.norm.weight": tensors["model.norm.weight"] + 1}, layers=layers)

    monkeypatch.setattr("specedge.export.distil.distil", distil)
    tensors, quantise = compensated(decoder, checkpoint.tensors, recipe, calibration, seed=3, steps=5)
    names = [name for name, _, _ in linear_layers(decoder.family, decoder.dimensions, checkpoint.tensors)]
    assert list(seen["layers"]) == names
    assert seen["texts"] == list(calibration.texts)
    assert seen["teacher"].tensors is checkpoint.tensors
    assert (seen["settings"].seed, seen["settings"].steps) == (3, 5)
    assert np.array_equal(tensors["model.norm.weight"], checkpoint.tensors["model.norm.weight"] + 1)
    kept = "model.layers.0.input_layernorm.weight"
    assert np.array_equal(tensors[kept], seen["tensors"][kept])
    assert set(tensors) == set(checkpoint.tensors)
    assert quantise(names[0], None, None) is seen["layers"][names[0]]


def test_layers_and_other_models_are_distilled_from_the_target(model, monkeypatch):
    from specedge.export import distil as module
    from specedge.export.layer_draft import keep_layers

    checkpoint, calibration = model
    asked = []
    monkeypatch.setattr(
        module,
        "distil",
        lambda *given, teacher, **more: (asked.append(teacher), module.Distilled({}, given[4], 1.0, 1.0, 0))[1],
    )
    draft = keep_layers(checkpoint, (0,))
    recipe = parse_recipe("int4:b32:sym+distil")
    for target, layers in ((None, 1), (checkpoint, 2)):
        compensated(read_decoder(draft, recipe.form, 64), draft.tensors, recipe, calibration, target=target)
        assert asked[-1].sizes.layers == layers
    assert asked[-1].tensors is checkpoint.tensors
