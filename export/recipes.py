"""Writes a model as a recipe says: rounded to the nearest, or compensated with what calibration measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specedge.export.checkpoint import Checkpoint
from specedge.export.decoder import write_decoder
from specedge.export.layers import read_decoder
from specedge.quant.recipe import Recipe
from specedge.runtime.bundle import GraphSpec

if TYPE_CHECKING:
    from specedge.export.compensate import TextCalibration

__all__ = ["write_recipe"]


def write_recipe(
    checkpoint: Checkpoint,
    folder: Path,
    recipe: Recipe,
    calibration: TextCalibration | None,
    *,
    stem: str,
    capacity: int,
    device: str = "cpu",
    attention: str | None = None,
    draft: bool = False,
    taps: Sequence[int] = (),
    target: Checkpoint | None = None,
    seed: int = 0,
    on_tensor: Callable[[int], None] | None = None,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> GraphSpec:
    """Writes the speculative graph of a recipe and its weights; beside a target also the standard graph.

    Args:
        checkpoint: The model.
        folder: Where to write.
        recipe: Format and methods.
        calibration: Of this checkpoint; None where the recipe needs none.
        stem: "target" or "draft".
        capacity, device, attention, draft, taps, on_tensor: As `write_decoder`.
        target: What a draft is distilled from, where that is another checkpoint.
        seed: Of distillation.
        progress: Told of steps of distillation.

    Raises:
        SpecEdgeError: As `compensated` and `write_decoder`.
    """
    tensors = quantise = None
    if recipe.calibrated:
        from specedge.export.compensate import compensated

        assert calibration is not None
        decoder = read_decoder(checkpoint, recipe.form, capacity)
        tensors, quantise = compensated(
            decoder, checkpoint.tensors, recipe, calibration, target=target, seed=seed, progress=progress
        )
    return write_decoder(
        checkpoint,
        folder,
        stem=stem,
        precision=recipe.name,
        capacity=capacity,
        device=device,
        attention=attention,
        standard=stem == "target",
        draft=draft,
        taps=taps,
        quantise=quantise,
        tensors=tensors,
        on_tensor=on_tensor,
    )
