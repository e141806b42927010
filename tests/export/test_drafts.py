"""Names of drafts: the target itself, some of its layers, or another model."""

from __future__ import annotations

import pytest

from specedge.export.drafts import parse_draft
from specedge.quant.recipe import parse_methods
from specedge.runtime.errors import UsageError


def test_the_target_itself():
    plan = parse_draft("self-int4:b64:sym+gptq")
    assert (plan.kind, plan.name, plan.recipe.name) == ("self", "self-int4:b64:sym+gptq", "int4:b64:sym+gptq")
    assert parse_draft("self-int8").recipe.form.grid.group == 64
    plan = parse_draft("self-int4", default_methods=parse_methods("gptq"))
    assert (plan.name, plan.recipe.name) == ("self-int4", "int4+gptq")


@pytest.mark.parametrize(("text", "recipe"), [("layers-8", "int8-block"), ("layers-8:int4:b64+bias", "int4:b64+bias")])
def test_some_layers(text, recipe):
    plan = parse_draft(text)
    assert (plan.kind, plan.layers, plan.name, plan.recipe.name) == ("layers", 8, text, recipe)


@pytest.mark.parametrize(
    ("text", "model", "recipe", "name"),
    [
        ("smollm2-135m", "smollm2-135m", "int8-block", "smollm2-135m"),
        ("org/small:int4:sym+gptq", "org/small", "int4:sym+gptq", "small:int4:sym+gptq"),
        ("models/a b/x y.gguf:gguf", "models/a b/x y.gguf", "gguf", "x-y.gguf:gguf"),
        ("C:/models/tiny", "C:/models/tiny", "int8-block", "tiny"),
        ("../:int4", "../", "int4", "model:int4"),
        ("./.hidden", "./.hidden", "int8-block", "hidden"),
        ("./a,b", "./a,b", "int8-block", "a-b"),
    ],
)
def test_another_model(text, model, recipe, name):
    plan = parse_draft(text)
    assert (plan.kind, plan.model, plan.recipe.name, plan.name) == ("model", model, recipe, name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("self-", "precision '' is not available"),
        ("self-int5", "precision 'int5'"),
        ("self-int4:b65", "option 'b65' is unknown"),
        ("layers-", "give a number of layers, as in layers-8"),
        ("layers-0", "give a number of layers"),
        ("layers-x:int4", "give a number of layers"),
        ("layers-8:x", "precision 'x'"),
        ("int4", "did you mean self-int4"),
        ("", "draft is ''"),
        (":int4", "draft is ':int4'"),
        ("org/small:int4:b65", "option 'b65' is unknown"),
    ],
)
def test_names_that_are_none(text, message):
    with pytest.raises(UsageError, match=message) as caught:
        parse_draft(text)
    assert "\n" not in str(caught.value)
