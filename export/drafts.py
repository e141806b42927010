"""What a draft's name says: the target itself in fewer bits, some of its layers, or a model of its own.

    self-RECIPE   layers-N[:RECIPE]   MODEL[:RECIPE]

A MODEL is whatever `specedge export` takes: a folder, a hub id, a GGUF file or a built-in name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

from specedge.quant.recipe import Method, Recipe, is_recipe, parse_recipe
from specedge.runtime.errors import UsageError

__all__ = ["Draft", "DraftPlan", "parse_draft"]

Draft = Literal["self", "layers", "model"]

_CHOICES = "self-RECIPE (as self-int8), layers-N[:RECIPE], a model or none"
_LAYERS = re.compile(r"layers-([0-9]+)(?::(.*))?")
_UNSAFE = re.compile(r"[^A-Za-z0-9._+:@=-]+")  # what the manifest takes in no name, and what separates names


@dataclass(frozen=True)
class DraftPlan:
    """One draft that was asked for.

    Attributes:
        text: As it was given.
        kind: "self": the target itself; "layers": some of its layers; "model": another model.
        recipe: How it is stored.
        layers: How many layers, where the kind is "layers".
        model: Which model, where the kind is "model".
    """

    text: str
    kind: Draft
    recipe: Recipe
    layers: int = 0
    model: str = ""

    @property
    def calibrated(self) -> bool:
        """Whether it needs texts of the target: to take statistics of, or to choose layers on."""
        return self.kind == "layers" or self.recipe.calibrated

    @property
    def name(self) -> str:
        """Its name in the bundle, and of its folder under drafts/: the text; of a model's path, the last part."""
        if self.kind != "model":
            return self.text
        rest = self.text[len(self.model) :]
        return (_UNSAFE.sub("-", PurePath(self.model).name).lstrip(".-") or "model") + rest


def parse_draft(text: str, device: str = "cpu", default_methods: tuple[Method, ...] = ()) -> DraftPlan:
    """Reads a draft's name.

    Args:
        text: The name.
        device: "cpu" or "cuda".
        default_methods: What compensates where a recipe names no method.

    Raises:
        UsageError: It is none, or its recipe makes no sense.
    """

    def recipe(words: str | None, default: str) -> Recipe:
        return parse_recipe(default if words is None else words, device, draft=True, default_methods=default_methods)

    if text.startswith("self-"):
        return DraftPlan(text, "self", recipe(text.removeprefix("self-"), ""))
    if text.startswith("layers-"):
        found = _LAYERS.fullmatch(text)
        if found is None or not int(found[1]):
            raise UsageError(f"draft is {text!r}: give a number of layers, as in layers-8 or layers-8:int4")
        return DraftPlan(text, "layers", recipe(found[2], "int8"), layers=int(found[1]))
    if is_recipe(text):
        raise UsageError(f"draft is {text!r}: did you mean self-{text}? Choose {_CHOICES}")
    model, words = _split(text)
    if not model.strip():
        raise UsageError(f"draft is {text!r}: choose {_CHOICES}")
    return DraftPlan(text, "model", recipe(words, "int8"), model=model)


def _split(text: str) -> tuple[str, str | None]:
    """A model and its recipe, which begins after the first colon that a number format follows."""
    for found in re.finditer(":", text):
        if is_recipe(text[found.end() :]):
            return text[: found.start()], text[found.end() :]
    return text, None
