"""The methods that "auto" stands for: of a short list, those whose draft diverges least on text that was held out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from specedge.export.agreement import TargetLogits
from specedge.export.checkpoint import Checkpoint
from specedge.export.memory import release_memory
from specedge.export.prepare import PreparedCalibration
from specedge.export.recipes import write_recipe
from specedge.quant.recipe import Method, Recipe, parse_methods
from specedge.runtime.graph import Decoder

__all__ = ["CANDIDATES", "choose"]

Counter = Callable[[int, int], None]
"""Told how many candidates are measured, of how many."""

CANDIDATES: tuple[tuple[Method, ...], ...] = (
    (),
    *(parse_methods(text) for text in ("scale", "gptq", "scale+gptq", "scale+gptq+bias")),
)
"""What is tried, the cheapest first; none costs an operator when the model runs, but for the additions of "bias"."""

_TOKENS = 1024  # held out


def choose(
    checkpoint: Checkpoint,
    recipe: Recipe,
    calibration: PreparedCalibration,
    *,
    capacity: int,
    device: str = "cpu",
    draft: bool = True,
    threads: int | None = None,
    candidates: Sequence[tuple[Method, ...]] = CANDIDATES,
    progress: Counter = lambda *_: None,
) -> Recipe:
    """Replaces a recipe's methods by the best of some candidates.

    Each is written to a folder for temporary files and compared, teacher-forced, with the checkpoint in
    fp32 on texts of another seed than the calibration's. The measure is the mean KL(p||q).

    Args:
        checkpoint: The model.
        recipe: Its format; its methods do not matter.
        calibration: Of this checkpoint.
        capacity: Most rows of a text.
        device, draft: As `write_decoder`; the device must be there.
        threads: To compute with; None: all.
        candidates: What is tried.
        progress: Told of the candidates.

    Raises:
        SpecEdgeError: As `write_recipe` and `measure`.
    """
    found: list[float] = []
    with TemporaryDirectory(prefix="specedge-") as name:
        with calibration.target() as target:
            texts = calibration.held_out(target, _TOKENS)
            logits = TargetLogits.record(target, texts, Path(name))
        for number, methods in enumerate(candidates):
            progress(number, len(candidates))
            tried, folder = replace(recipe, methods=methods), Path(name, str(number))
            spec = write_recipe(
                checkpoint, folder, tried, calibration, stem="draft", capacity=capacity, device=device, draft=draft
            )
            graph = Decoder(folder / spec.file, spec, device=device, threads=threads)
            found.append(logits.measure(graph).kl)
            graph.close()
            release_memory()
            for path in folder.iterdir():
                path.unlink()
        progress(len(candidates), len(candidates))
    return replace(recipe, methods=candidates[found.index(min(found))])
