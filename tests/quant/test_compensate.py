"""One layer, compensated: every method lowers the error of its output on rows that it never saw, on every grid."""

from __future__ import annotations

import numpy as np
import pytest

from specedge.quant.compensate import automatic, compensate
from specedge.quant.formats import find_format
from specedge.quant.grid import dequantise, round_nearest
from specedge.quant.layer import effective_weight
from specedge.quant.recipe import Method, parse_methods
from specedge.tests.activations import GRIDS, activations, moments_of

COMBINATIONS = (
    "bias",
    "scale",
    "gptq",
    "lowrank:8",
    "scale+gptq",
    "gptq+lowrank:8",
    "scale+gptq+lowrank:8+bias",
    "auto",
)


@pytest.fixture
def layer(rng):
    weight = rng.standard_normal((64, 128)).astype(np.float32)
    return weight, rng.standard_normal(64).astype(np.float32), *activations(rng, 128)


def error(layer, weight, bias, rows):
    found = rows @ effective_weight(layer).T + (0 if layer.bias is None else layer.bias)
    return np.square(found - rows @ weight.T - bias).sum()


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("methods", COMBINATIONS)
def test_the_error_falls_on_rows_it_never_saw(layer, methods, name):
    weight, bias, seen, unseen = layer
    moments = moments_of(seen)
    plain = compensate(weight, bias, GRIDS[name], moments, ())
    better = compensate(weight, bias, GRIDS[name], moments, parse_methods(methods))
    assert error(better, weight, bias, unseen) < error(plain, weight, bias, unseen)


@pytest.mark.parametrize("name", GRIDS)
def test_every_method_adds_to_those_before_it(layer, name):
    weight, bias, seen, _ = layer
    moments = moments_of(seen)
    errors = [
        error(compensate(weight, bias, GRIDS[name], moments, parse_methods(methods)), weight, bias, seen)
        for methods in ("none", "gptq", "gptq+lowrank:8", "gptq+lowrank:8+bias")
    ]
    assert (np.diff(errors) < 0).all()


def test_no_method_is_nearest_rounding(layer):
    weight, bias, seen, _ = layer
    for methods in ((), parse_methods("none"), (Method("lowrank", 0),), (Method("distil"),)):
        plain = compensate(weight, bias, GRIDS["int4-sym-b32"], moments_of(seen), methods)
        assert (dequantise(plain.weight) == dequantise(round_nearest(weight, GRIDS["int4-sym-b32"]))).all()
        assert plain.bias is bias
        assert plain.low_rank is None
        assert plain.step is None


def test_full_rank_is_exact(layer):
    weight, bias, seen, _ = layer
    exact = compensate(weight, bias, GRIDS["int3-sym-b32"], moments_of(seen), (Method("lowrank", 64),))
    assert np.allclose(effective_weight(exact), weight, atol=1e-5)
    with pytest.raises(ValueError, match="give 0 to 64"):
        compensate(weight, bias, GRIDS["int3-sym-b32"], moments_of(seen), (Method("lowrank", 65),))


def test_floats_miss_nothing(layer):
    weight, bias, seen, _ = layer
    kept = compensate(weight, bias, None, moments_of(seen), parse_methods("gptq+lowrank:4+bias"))
    assert kept.weight is weight
    assert kept.bias is bias
    assert kept.low_rank is None


def test_a_static_step_and_none_where_rows_have_their_own(layer):
    weight, bias, seen, _ = layer
    moments = moments_of(seen)
    assert compensate(weight, bias, GRIDS["int8-rows"], moments, ()).step is None
    step = compensate(weight, bias, GRIDS["int8-rows"], moments, (), static=True).step
    assert 0 < step <= moments.largest.max() / 127 * (1 + 1e-6)


def test_it_is_the_same_every_time_and_for_outputs_in_another_order(layer, rng):
    weight, bias, seen, _ = layer
    moments, methods, grid = moments_of(seen), parse_methods("scale+gptq+bias"), GRIDS["int4-sym-b32"]
    once, again = (compensate(weight, bias, grid, moments, methods) for _ in range(2))
    assert (once.weight.codes == again.weight.codes).all()
    assert (once.bias == again.bias).all()
    order = rng.permutation(len(weight))
    turned = compensate(weight[order], bias[order], grid, moments, methods)
    assert (turned.weight.codes == once.weight.codes[order]).mean() > 0.99  # a library may add in another order


def test_moments_of_another_layer(layer):
    weight, bias, seen, _ = layer
    with pytest.raises(ValueError, match="moments of 64 inputs for a weight of 128"):
        compensate(weight, bias, GRIDS["int8-rows"], moments_of(seen[:, :64]), ())


def test_few_rows_do_no_harm_to_others(rng):
    seen, unseen = activations(rng, 192)
    weight, grid = rng.standard_normal((48, 192)).astype(np.float32), GRIDS["int4-sym-b32"]
    moments, none = moments_of(seen[:150]), np.zeros(48, np.float32)
    plain = error(compensate(weight, None, grid, moments, ()), weight, none, unseen)
    better = error(compensate(weight, None, grid, moments, parse_methods("scale+gptq")), weight, none, unseen)
    assert better < 0.75 * plain


def test_auto_leaves_gptq_out_where_whole_rows_are_int8():
    names = {form: [method.name for method in automatic(find_format(form).grid)] for form in ("int8", "int8-static")}
    assert names == {"int8": ["scale"], "int8-static": ["scale"]}
    assert [method.name for method in automatic(find_format("int8-block").grid)] == ["scale", "gptq"]
    assert [method.name for method in automatic(find_format("int4").grid)] == ["scale", "gptq"]
