"""Joins a recipe, a checkpoint and its calibration into what `Decoder.store` asks for: tensors, and how each is stored.

Nothing is computed before it is asked for, and one layer at a time, but for distillation, which
needs all layers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specedge.export.checkpoint import Checkpoint, ReplacedTensors, Tensors
from specedge.export.folding import FoldedTensors
from specedge.export.layers import Decoder, linear_layers
from specedge.export.texts import Text
from specedge.models import find_family, read_dimensions
from specedge.quant.compensate import automatic, compensate
from specedge.quant.formats import EMBEDDING, HEAD, grid_for
from specedge.quant.grid import round_nearest
from specedge.quant.layer import Layer, Quantiser
from specedge.quant.moments import Calibration, divided
from specedge.quant.recipe import Method, Recipe

__all__ = ["TextCalibration", "compensated"]

Matrix = NDArray[np.float32]
Counter = Callable[[int, int], None]
"""Told how many steps of distillation are done, of how many."""


class TextCalibration(Calibration, Protocol):
    """Moments, and the texts that they were taken on."""

    @property
    def texts(self) -> tuple[Text, ...]: ...


def compensated(
    decoder: Decoder,
    tensors: Tensors,
    recipe: Recipe,
    calibration: TextCalibration,
    *,
    target: Checkpoint | None = None,
    seed: int = 0,
    steps: int | None = None,
    progress: Counter = lambda *_: None,
) -> tuple[Tensors, Quantiser]:
    """What to give to `Decoder.store`, so that a model is stored as a recipe says.

    Args:
        decoder: The model, in the recipe's number format.
        tensors: The checkpoint's.
        recipe: Format and methods.
        calibration: Of this checkpoint; read when a layer is asked for.
        target: What a draft is distilled from, where that is another checkpoint.
        seed: Of distillation.
        steps: Of distillation; None: its default.
        progress: Told of steps of distillation.

    Returns:
        The tensors, with scales folded in where "scale" is among the methods, and how each linear layer is
        stored. The quantiser takes the weights of these tensors, not the checkpoint's own.

    Raises:
        SpecEdgeError: A calibration that is damaged or cannot be made.
    """
    recipe = replace(recipe, methods=_resolved(recipe))
    folded = None
    if _has(recipe.methods, "scale"):
        folded = FoldedTensors(decoder, tensors, calibration, second_order=_has(recipe.methods, "gptq"))
    quantise = _Compensating(decoder, folded, recipe, calibration)
    if not _has(recipe.methods, "distil"):
        return (tensors if folded is None else folded), quantise
    from specedge.export.distil import Settings, Teacher, distil

    teacher = Teacher(decoder.family, decoder.dimensions, tensors)
    if target is not None:
        family = find_family(target.config.get("model_type"))
        teacher = Teacher(family, read_dimensions(family, target.config), target.tensors)
    given: Tensors = tensors if folded is None else folded
    settings = Settings(seed=seed) if steps is None else Settings(seed=seed, steps=steps)
    distilled = distil(
        decoder.family,
        decoder.dimensions,
        decoder.form,
        given,
        {
            name: quantise(name, weight, bias)
            for name, weight, bias in linear_layers(decoder.family, decoder.dimensions, given)
        },
        [text for text in calibration.texts if text.prompt and text.answer],
        teacher=teacher,
        settings=settings,
        progress=progress,
    )
    return ReplacedTensors(given, distilled.norms), _Stored(distilled.layers)


class _Compensating:
    """Rounds and compensates each layer as it is asked for."""

    def __init__(
        self, decoder: Decoder, folded: FoldedTensors | None, recipe: Recipe, calibration: Calibration
    ) -> None:
        self._decoder = decoder
        self._folded = folded
        self._methods = tuple(method for method in recipe.methods if method.name != "distil")
        self._calibration = calibration

    def __call__(self, name: str, weight: Matrix, bias: Matrix | None) -> Layer:
        form, sizes = self._decoder.form, self._decoder.dimensions
        grid = grid_for(form, name, sizes.layers)
        if grid is None:
            return Layer(weight, bias)
        used = HEAD if name == EMBEDDING and sizes.tied else name
        if used not in self._calibration:  # an embedding that is only looked up has no input
            return Layer(round_nearest(weight, grid), bias)
        moments = self._calibration[used]
        scale = None if self._folded is None else self._folded.scale(used)
        if scale is not None:
            moments = divided(moments, scale)
        return compensate(weight, bias, grid, moments, self._methods, static=form.static)


class _Stored:
    """Layers that are there already."""

    def __init__(self, layers: Mapping[str, Layer]) -> None:
        self._layers = layers

    def __call__(self, name: str, weight: Matrix, bias: Matrix | None) -> Layer:
        return self._layers[name]


def _resolved(recipe: Recipe) -> tuple[Method, ...]:
    """The methods, "auto" replaced by what it stands for."""
    if not _has(recipe.methods, "auto"):
        return recipe.methods
    assert recipe.form.grid is not None  # a recipe without a grid has no methods
    return automatic(recipe.form.grid)


def _has(methods: Sequence[Method], name: str) -> bool:
    return any(method.name == name for method in methods)
