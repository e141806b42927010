"""Distillation: a rounded draft comes nearer to its target on texts it did not see, or stays what it was."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import numpy as np
import pytest

from specedge.export import distil as module
from specedge.export.distil import RATES, Settings, Teacher, distil
from specedge.export.texts import Text
from specedge.export.torch_decoder import NORM, plain_layers
from specedge.export.torch_layer import BIAS, DOWN, SCALE, SHIFT, UP
from specedge.models import find_family, read_dimensions
from specedge.quant.formats import Format, grid_for
from specedge.quant.grid import round_nearest
from specedge.quant.layer import Layer, LowRank
from specedge.quant.recipe import parse_recipe
from specedge.runtime.errors import MissingExtraError, NumericError, UsageError
from specedge.tests.reference import forward, memory_checkpoint

torch = pytest.importorskip("torch")

QUICK = Settings(steps=40, batch=8, bfloat16=False)


def parts(recipe="int4:b32:sym:head4", **changes):
    """What `distil` takes but the texts, for a tiny model rounded to nearest."""
    checkpoint = memory_checkpoint(**changes)
    family = find_family("llama")
    sizes = read_dimensions(family, checkpoint.config)
    form = parse_recipe(recipe).form
    layers = {}
    for name, layer in plain_layers(family, sizes, checkpoint.tensors).items():
        grid = grid_for(form, name, sizes.layers)
        layers[name] = Layer(round_nearest(layer.weight, grid), layer.bias, step=0.05 if form.static else None)
    return family, sizes, form, checkpoint.tensors, layers


def texts_of(count=120, length=24, seed=1):
    """Texts of random tokens: what matters is that the target has a law after each."""
    rng = np.random.default_rng(seed)
    return [
        Text(tuple(rng.integers(0, 160, 3).tolist()), tuple(rng.integers(0, 160, length).tolist()))
        for _ in range(count)
    ]


def run(given, texts, settings=QUICK, **more):
    return distil(*given, texts, teacher=Teacher(given[0], given[1], given[3]), settings=settings, **more)


@pytest.mark.parametrize(
    "recipe", ["int4:b32:sym:head4", "int4", "int4:b64:asym", "int8", "int8-static", "fp8", "int3"]
)
def test_the_draft_comes_nearer_on_texts_it_did_not_see(recipe):
    result = run(parts(recipe), texts_of())
    assert result.after < 0.998 * result.before
    assert result.steps > 0
    assert result.norms


def test_a_teacher_may_be_another_model():
    """More layers, and a vocabulary that is padded to another width: the divergence is over the tokens of both."""
    draft, target = parts(num_hidden_layers=1, vocab_size=176), memory_checkpoint()
    family = find_family("llama")
    teacher = Teacher(family, read_dimensions(family, target.config), target.tensors)
    result = distil(*draft, texts_of(), teacher=teacher, settings=QUICK)
    alone = run(draft, texts_of())
    assert result.after < 0.99 * result.before
    assert result.before > 2 * alone.before, "its own fp32 model is nearer to it"


@pytest.mark.parametrize("kind", [SCALE, SHIFT, NORM, BIAS, UP])
def test_each_kind_of_number_helps_alone(kind):
    given = parts("int4:b32:affine:head4" if kind == SHIFT else "int4:b32:sym:head4", attention_bias=True)
    if kind == UP:
        rng = np.random.default_rng(0)
        for name, layer in given[4].items():
            outputs, inputs = len(layer.weight.codes), layer.weight.width
            down = rng.standard_normal((4, inputs)).astype(np.float32) * inputs**-0.5
            given[4][name] = replace(layer, low_rank=LowRank(down, np.zeros((outputs, 4), np.float32)))
    rates = {**RATES, UP: 3e-3, BIAS: 3e-3, NORM: 5e-3}
    result = run(given, texts_of(), replace(QUICK, free=(kind,), rates=rates))
    assert result.after < result.before
    assert bool(result.norms) == (kind == NORM)


def test_codes_stay():
    given = parts("int4:b64:asym")
    result = run(given, texts_of())
    for name, layer in given[4].items():
        assert result.layers[name].weight.codes is layer.weight.codes
        assert result.layers[name].weight.group.zero is layer.weight.group.zero


def test_scales_are_such_as_the_grid_stores():
    for layer in run(parts(), texts_of()).layers.values():
        scale = layer.weight.group.scale
        assert np.array_equal(scale, scale.astype(np.float16).astype(np.float32))


def test_a_seed_gives_the_same_layers():
    one, same, other = (run(parts(), texts_of(), replace(QUICK, steps=4, seed=seed)) for seed in (1, 1, 2))
    for name, layer in one.layers.items():
        assert np.array_equal(layer.weight.group.scale, same.layers[name].weight.group.scale)
    assert (one.before, one.after) == (same.before, same.after)
    assert one.before != other.before  # other texts are held out


def test_what_came_out_worse_is_not_returned():
    given = parts()
    result = run(given, texts_of(), replace(QUICK, rates=dict.fromkeys(RATES, 1e4)))
    assert (result.norms, result.steps) == ({}, 0)
    assert result.layers == given[4]
    assert result.after == result.before


def test_the_best_check_is_returned_not_the_last(monkeypatch):
    scores = iter([1.0, 0.5, 0.8, 0.7, 0.9, 0.6, 0.5])
    monkeypatch.setattr(module._Judge, "score", lambda *_: next(scores))
    result = run(parts(), texts_of(), replace(QUICK, steps=12))
    assert (result.before, result.after, result.steps) == (1.0, 0.5, 2)


def test_divergence_is_that_of_the_reference():
    """KL(p || q) over the rows that predict an answer, from two numpy models."""
    checkpoint, other = memory_checkpoint(0), memory_checkpoint(0)
    rng = np.random.default_rng(3)
    for tensor in other.tensors.values():
        if tensor.ndim == 2:
            tensor += 0.02 * rng.standard_normal(tensor.shape).astype(np.float32)
    family = find_family("llama")
    sizes = read_dimensions(family, checkpoint.config)
    texts = [Text((5, 6, 7), (8, 9, 10, 11)), Text((1,), tuple(range(20, 29)))]
    models = module._Models(
        family, sizes, Format("fp32", "float32"), other.tensors, Teacher(family, sizes, checkpoint.tensors)
    )
    judge = module._Judge(models, [module._Batch.of(texts)])
    total, count = 0.0, 0
    for text in texts:
        rows = slice(len(text.prompt) - 1, len(text.tokens) - 1)
        log_p, log_q = (
            z - np.log(np.exp(z).sum(-1, keepdims=True))
            for z in (forward(model, np.array(text.tokens))[0][rows] for model in (checkpoint, other))
        )
        total += (np.exp(log_p) * (log_p - log_q)).sum()
        count += len(text.answer)
    assert judge.score({}, plain_layers(family, sizes, other.tensors)) == pytest.approx(total / count, rel=1e-3)


def test_steps_are_told_and_time_ends_them():
    told = []
    result = run(parts(), texts_of(), progress=lambda done, steps: told.append((done, steps)))
    assert told == [(step, 40) for step in range(41)]
    told.clear()
    run(parts(), texts_of(), replace(QUICK, seconds=1e-9), progress=lambda done, steps: told.append(done))
    assert told == [0, 40]
    assert 0 < result.steps <= 40


def test_products_in_bfloat16_do_as_well():
    exact, short = (run(parts(), texts_of(), replace(QUICK, bfloat16=way)) for way in (False, True))
    assert short.before == pytest.approx(exact.before, rel=1e-6)
    assert short.before - short.after > 0.7 * (exact.before - exact.after)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "0 texts"),
        (texts_of(count=1), "1 texts"),
        ([*texts_of(count=2), Text((), (1, 2))], "text 3: its prompt is empty"),
        ([Text((1,), ()), *texts_of(count=2)], "text 1: its answer is empty"),
    ],
)
def test_texts_that_teach_nothing_are_refused(texts, message):
    with pytest.raises(UsageError, match=message):
        run(parts(), texts)


def test_a_draft_in_floats_has_nothing_to_learn():
    family, sizes, _, tensors, _ = parts()
    layers = plain_layers(family, sizes, tensors)
    with pytest.raises(UsageError, match="rounded format"):
        run((family, sizes, Format("fp32", "float32"), tensors, layers), texts_of(), replace(QUICK, free=(SCALE, DOWN)))


def test_nan_is_refused():
    given = parts()
    given[3]["model.norm.weight"] = given[3]["model.norm.weight"] * np.nan
    with pytest.raises(NumericError):
        run(given, texts_of())


@pytest.mark.parametrize("changes", [{"steps": 0}, {"batch": 0}])
def test_settings_out_of_range_are_refused(changes):
    with pytest.raises(UsageError, match=next(iter(changes))):
        Settings(**changes)


def test_without_torch_the_extra_is_named(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "torch" else found(name, *rest)
    )
    with pytest.raises(MissingExtraError, match=r"specedge\[train\]"):
        run(parts(), texts_of())
