"""Recipes: what they say, and what is said of those that make no sense."""

from __future__ import annotations

import pytest

from specedge.quant.formats import find_format, grid_for
from specedge.quant.recipe import Method, is_recipe, parse_methods, parse_recipe
from specedge.runtime.errors import UsageError


def head(text):
    return grid_for(parse_recipe(text).form, "lm_head", 2)


def test_a_format_alone_is_the_tables_row():
    recipe = parse_recipe("int4")
    assert (recipe.name, recipe.form, recipe.methods) == ("int4", find_format("int4"), ())
    assert not recipe.calibrated and recipe.rank == 0


def test_options_change_the_grid():
    grid = parse_recipe("int4:sym:b64").form.grid
    assert (grid.kind, grid.symmetric, grid.group) == ("integer", True, 64)
    grid = parse_recipe("int4:asym").form.grid
    assert (grid.kind, grid.symmetric, grid.group) == ("integer", False, 32)
    assert parse_recipe("int4:b128:affine").form.grid.kind == "affine"
    assert parse_recipe("int8", draft=True).form.grid.group == 64
    assert parse_recipe("int8:b32:asym", draft=True).form.grid.group == 32


def test_a_kept_head_follows_the_groups():
    assert (head("int4").bits, head("int4").group) == (8, 32)
    assert (head("int4:b64:sym").bits, head("int4:b64:sym").group) == (8, 64)
    assert (head("int4:head4:b128").bits, head("int4:head4:b128").group) == (4, 128)
    assert head("int4:head4").kind == "integer" and not head("int4:head4").symmetric
    assert head("int4:sym:head4").symmetric
    assert head("int8:head8").group == 32
    assert head("int4:head32") is None is head("fp8:head32")


def test_methods():
    recipe = parse_recipe("int4:b64:sym+gptq+lowrank:16+bias")
    assert recipe.methods == (Method("gptq"), Method("lowrank", 16), Method("bias"))
    assert recipe.calibrated and recipe.rank == 16
    assert [str(method) for method in recipe.methods] == ["gptq", "lowrank:16", "bias"]
    assert parse_methods("distill") == parse_methods("distil") == (Method("distil"),)
    assert parse_methods("lowrank")[0].argument > 0
    assert parse_methods("none") == parse_methods("lowrank:0") == ()


def test_methods_that_are_the_default():
    default = parse_methods("gptq")
    assert parse_recipe("int4", default_methods=default).methods == default
    assert parse_recipe("int4", default_methods=default).name == "int4+gptq"
    assert parse_recipe("int4+none").name == "int4"
    assert parse_recipe("int4:sym+distill+lowrank:8").name == "int4:sym+distil+lowrank:8"
    assert parse_recipe("int4+none", default_methods=default).methods == ()
    assert parse_recipe("int4+bias", default_methods=default).methods == (Method("bias"),)
    assert parse_recipe("fp16", default_methods=default).methods == ()
    assert parse_recipe("int8-static").calibrated


@pytest.mark.parametrize("text", ["int4", "fp8", "int8-static:head8", "gguf", "int4+gptq"])
def test_what_begins_as_a_recipe(text):
    assert is_recipe(text)
    assert not is_recipe(f"x{text}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "precision '' is not available"),
        ("int5", "precision 'int5' is not available on device 'cpu': choose one of fp32"),
        ("INT4", "precision 'INT4'"),
        ("int4:b48", "recipe 'int4:b48': option 'b48' is unknown; choose among b32, b64"),
        ("int4:", "option '' is unknown"),
        ("int4::sym", "option '' is unknown"),
        ("int4:b32:b64", "b32 and b64 exclude each other"),
        ("int4:sym:affine", "sym and affine exclude each other"),
        ("int4:head4:head8", "head4 and head8 exclude each other"),
        ("int4:sym:sym", "sym and sym exclude each other"),
        ("fp32:b32", "fp32 has no options; leave :b32 out"),
        ("gguf:head8", "gguf has no options"),
        ("int8:b32", "int8 has one scale for each output, so b32 means nothing"),
        ("fp8:sym", "fp8-e4m3 has one scale for each output"),
        ("int8-block:affine", "affine is for 4 bits and fewer"),
        ("int4+", "compensation '' is unknown: choose one of bias, scale, gptq, distil, auto, none, lowrank:RANK"),
        ("int4+gtpq", "compensation 'gtpq' is unknown"),
        ("int4+gptq:3", "gptq takes no argument"),
        ("int4+gptq+gptq", "gptq stands twice"),
        ("int4+auto+bias", "auto excludes other methods"),
        ("int4+bias+none", "none excludes other methods"),
        ("int4+lowrank:", "the rank is a whole number"),
        ("int4+lowrank:-1", "the rank is a whole number"),
        ("int4+lowrank:1.5", "the rank is a whole number"),
        ("int4+lowrank:٣", "the rank is a whole number"),
        ("int4+lowrank:99999", "the rank is a whole number"),
        ("fp16+gptq", "fp16 rounds no weight, so there is nothing to compensate"),
        ("gguf+bias", "gguf rounds no weight"),
    ],
)
def test_recipes_that_make_no_sense(text, message):
    with pytest.raises(UsageError, match=message.replace("+", r"\+")) as caught:
        parse_recipe(text)
    assert "\n" not in str(caught.value)
