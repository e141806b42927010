"""Stores the graphs of one bundle: the target, and drafts that are the target itself, layers of it, or other models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from specedge.export.checkpoint import Checkpoint
from specedge.export.drafts import DraftPlan
from specedge.export.layers import read_decoder
from specedge.export.options import Progress
from specedge.export.recipes import write_recipe
from specedge.export.texts import Text
from specedge.quant.recipe import Method, Recipe
from specedge.runtime.bundle import GraphSpec
from specedge.runtime.graph import cache_shape

if TYPE_CHECKING:
    from specedge.export.compensate import TextCalibration
    from specedge.export.prepare import PreparedCalibration

__all__ = ["Storage"]


@dataclass(frozen=True)
class Storage:
    """Writes graphs of one target.

    Attributes:
        checkpoint: The target's.
        device: "cpu", "cuda" or "tensorrt".
        capacity: Rows of the target's cache.
        seed: Of distillation.
        report: Told how far calibration and the search of layers are.
        on_tensor: Told how many bytes were just written.
        taps: Layers whose inputs the target gives, for heads.
        attention: Operators of the attention; None: the device's own.
        draft_device: Where drafts run, if elsewhere.
    """

    checkpoint: Checkpoint
    device: str
    capacity: int
    seed: int
    report: Progress
    on_tensor: Callable[[int], None]
    taps: tuple[int, ...] = ()
    attention: str | None = None
    draft_device: str | None = None

    def target(self, folder: Path, recipe: Recipe, calibration: PreparedCalibration | None) -> GraphSpec:
        """Writes the target, and the standard graph beside it, into a bundle's folder."""
        return self._write(self.checkpoint, folder, "onnx", self._chosen(recipe, calibration, draft=False), calibration)

    def draft(
        self,
        folder: Path,
        plan: DraftPlan,
        target: GraphSpec,
        model: Checkpoint | None,
        calibration: PreparedCalibration | None,
    ) -> GraphSpec:
        """Writes one draft into the folder of a bundle whose target is there.

        Args:
            folder: The bundle's.
            plan: What was asked for.
            target: The target's graph.
            model: The draft's own checkpoint, where it is another model.
            calibration: Of the target.
        """
        if self.draft_device not in (None, self.device):
            # There it has a cache of its own: no two devices share one.
            attention = None if (self.draft_device, self.attention) == ("tensorrt", "gqa") else self.attention
            elsewhere = replace(self, device=self.draft_device, attention=attention, draft_device=None)
            draft = elsewhere.draft(folder, plan, target, model, calibration)
            return replace(draft, device=self.draft_device, shares_cache=False, cache_layers=())
        where = f"drafts/{plan.name}"
        if model is not None:
            from specedge.export.draft_model import draft_capacity

            store = replace(self, capacity=draft_capacity(model, self.capacity, plan.recipe.form))
            with store._own(model, plan.recipe, calibration) as own:
                return store._write(model, folder, where, plan.recipe, own)
        if plan.kind == "layers":
            return self._layers(folder, where, plan, target, calibration)
        recipe = self._chosen(plan.recipe, calibration, draft=True)
        draft = self._write(self.checkpoint, folder, where, recipe, calibration)
        return replace(draft, shares_cache=cache_shape(draft) == cache_shape(target))

    def _chosen(self, recipe: Recipe, calibration: PreparedCalibration | None, *, draft: bool) -> Recipe:
        """The recipe, with methods that were measured in the place of "auto" where the device is at hand."""
        if recipe.methods != (Method("auto"),) or self.device != "cpu":
            return recipe
        from specedge.export.choose import choose

        assert calibration is not None
        chosen = choose(
            self.checkpoint, recipe, calibration, capacity=self.capacity, draft=draft, progress=self._calibrating
        )
        return recipe.compensated(chosen.methods)

    def _layers(
        self, folder: Path, where: str, plan: DraftPlan, target: GraphSpec, calibration: PreparedCalibration | None
    ) -> GraphSpec:
        from specedge.export.layer_draft import find_layers, keep_layers

        assert calibration is not None  # its texts are what layers are chosen on
        kept = find_layers(folder, target, calibration.texts, plan.layers, progress=self._calibrating)
        checkpoint = keep_layers(self.checkpoint, kept)
        with self._own(checkpoint, plan.recipe, calibration) as own:
            draft = self._write(checkpoint, folder, where, plan.recipe, own)
        shares = cache_shape(draft)[1:] == cache_shape(target)[1:]
        return replace(draft, shares_cache=shares, cache_layers=kept if shares else ())

    def _write(
        self, checkpoint: Checkpoint, folder: Path, where: str, recipe: Recipe, calibration: TextCalibration | None
    ) -> GraphSpec:
        is_target = where == "onnx"
        spec = write_recipe(
            checkpoint,
            folder / where,
            recipe,
            calibration,
            stem="target" if is_target else "draft",
            capacity=self.capacity,
            device=self.device,
            attention=self.attention,
            draft=not is_target,
            taps=self.taps if is_target else (),
            target=None if checkpoint is self.checkpoint else self.checkpoint,
            seed=self.seed,
            on_tensor=self.on_tensor,
            progress=self._calibrating,
        )
        file, chains, compact = (f"{where}/{name}" if name else "" for name in (spec.file, spec.chains, spec.compact))
        return replace(spec, file=file, chains=chains, compact=compact)

    @contextmanager
    def _own(
        self, checkpoint: Checkpoint, recipe: Recipe, calibration: PreparedCalibration | None
    ) -> Iterator[TextCalibration | None]:
        """Statistics of a draft that is another model, over the target's texts: those it will see."""
        if not recipe.calibrated:
            yield None
            return
        from specedge.export.calibration import calibrate, fingerprint_of
        from specedge.export.reference import reference

        assert calibration is not None
        vocab_size = read_decoder(checkpoint, recipe.form, 1).dimensions.vocab_size
        texts = [cut for text in calibration.texts if (cut := _cut(text, vocab_size, self.capacity - 1)).tokens]
        longest = max(len(text.tokens) for text in texts)
        with TemporaryDirectory(prefix="specedge-") as name, reference(checkpoint, longest + 1) as model:
            source = fingerprint_of(checkpoint, None)
            yield calibrate(model, texts, Path(name) / "calibration", source, progress=self._calibrating)

    def _calibrating(self, done: int, total: int) -> None:
        self.report("calibrate", done, total)


def _cut(text: Text, vocab_size: int, length: int) -> Text:
    """As much of a text as a model with this vocabulary and capacity can read."""
    tokens = text.tokens[:length]
    known = next((place for place, token in enumerate(tokens) if token >= vocab_size), len(tokens))
    prompt = min(len(text.prompt), known)
    return Text(tokens[:prompt], tokens[prompt:known])
