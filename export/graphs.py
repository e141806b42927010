"""Writes the graphs of a bundle: by the builder of the model's family, or through Optimum where there is none."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specedge.export.checkpoint import Checkpoint
from specedge.export.drafts import DraftPlan
from specedge.export.gguf_blocks import kept_bytes, rounded_tensors
from specedge.export.heads_choice import find_heads
from specedge.export.heads_file import Heads
from specedge.export.interop import STANDARD_GRAPH
from specedge.export.layer_draft import check_layers
from specedge.export.memory import Estimate, count_parameters, estimate, stored_bytes
from specedge.export.options import ExportOptions, Progress
from specedge.export.storage import Storage
from specedge.models import find_family, read_dimensions
from specedge.quant.recipe import Recipe, parse_recipe
from specedge.runtime.bundle import GraphSpec, HeadsSpec
from specedge.runtime.errors import MissingExtraError, UnsupportedModelError, UsageError

if TYPE_CHECKING:
    from specedge.export.prepare import PreparedCalibration

__all__ = ["Graphs", "Plan", "check_recipes", "make_plan"]

MEDUSA = "medusa"
_DEFAULT_CAPACITY = 4096
_COMPILED_CAPACITY = 2048  # an engine reads the whole cache in every pass, however full it is
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")

_log = logging.getLogger("specedge.export")


@dataclass(frozen=True)
class Graphs:
    """What was written.

    Attributes:
        family: Which builder wrote it, or "optimum".
        target: The graph that verifies.
        drafts: Draft models by name.
        standard: Path of the standard graph.
        heads: Heads by name.
    """

    family: str
    target: GraphSpec
    drafts: Mapping[str, GraphSpec]
    standard: str = STANDARD_GRAPH
    heads: Mapping[str, HeadsSpec] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """What will be written.

    Attributes:
        family: Which builder writes it; None: Optimum.
        target: How the target is stored.
        drafts: The drafts.
        models: Checkpoints of the drafts that are other models, by the drafts' names.
        capacity: Rows of the target's cache.
        estimate: Disk and memory it takes.
        options: What was asked for.
        calibration: Statistics of the target's activations and the texts they are of; None: nothing needs them.
        heads: Heads to put in; None: none.
    """

    checkpoint: Checkpoint
    family: str | None
    target: Recipe
    drafts: tuple[DraftPlan, ...]
    models: Mapping[str, Checkpoint]
    capacity: int
    estimate: Estimate
    options: ExportOptions
    calibration: PreparedCalibration | None
    heads: Heads | None = None

    def write(self, folder: Path, report: Progress) -> Graphs:
        """Writes the graphs into the folder of the bundle."""
        if self.family is None:
            from specedge.export.optimum import write_through_optimum

            report("write target", 0, 1)
            target = write_through_optimum(self.checkpoint, folder, capacity=self.capacity)
            report("write target", 1, 1)
            return Graphs("optimum", target, {})
        with self.calibration or nullcontext():
            return self._write(self.family, folder, report)

    def _write(self, family: str, folder: Path, report: Progress) -> Graphs:
        written = _counter(report, "write target", self.estimate.target)
        taps = self.heads.config.taps if self.heads is not None else ()
        asked = self.options
        store = Storage(
            self.checkpoint,
            asked.device,
            self.capacity,
            asked.seed,
            report,
            written,
            taps,
            asked.attention,
            asked.draft_device,
        )
        target = store.target(folder, self.target, self.calibration)
        report("write target", target.weight_bytes, target.weight_bytes)
        if self.calibration is not None:
            self.calibration.use(folder, target)
        store = replace(store, on_tensor=_counter(report, "write drafts", self.estimate.drafts))
        drafts = {}
        for plan in self.drafts:
            model = self.models.get(plan.name)
            drafts[plan.name] = store.draft(folder, plan, target, model, self.calibration)
        total = sum(draft.weight_bytes for draft in drafts.values())
        report("write drafts", total, total)
        heads = {} if self.heads is None else {MEDUSA: self._write_heads(self.heads, folder, target, report)}
        return Graphs(family, target, drafts, heads=heads)

    def _write_heads(self, heads: Heads, folder: Path, target: GraphSpec, report: Progress) -> HeadsSpec:
        from specedge.export.heads import write_heads
        from specedge.export.heads_calibration import write_calibration

        report("write heads", 0, 2)
        spec = write_heads(heads, self.checkpoint, folder, self.options.heads_recipe, self.options.device)
        report("write heads", 1, 2)
        write_calibration(folder, MEDUSA, heads, target, spec, self.calibration)
        report("write heads", 2, 2)
        return spec


def make_plan(checkpoint: Checkpoint, options: ExportOptions, *, torch: bool, report: Progress | None = None) -> Plan:
    """Decides who writes the graphs, and how large everything becomes.

    Args:
        checkpoint: The model.
        options: What was asked for.
        torch: Whether PyTorch will be run to check.
        report: Told of downloads and, later, of calibration.

    Raises:
        UsageError: The model or its builder has no such precision, draft, rank, prompt or capacity.
        CheckpointError: The checkpoint is broken.
        DownloadError: A draft model cannot be fetched.
    """
    family = _find_builder(checkpoint)
    capacity = _capacity(checkpoint, options)
    target, drafts = options.target, options.draft_plans
    if family is None:
        if options.precision not in (None, "fp32") or options.device != "cpu":
            raise UsageError(
                f"precision {target.name!r} on {options.device!r}: {_model_type(checkpoint)} has no builder and goes "
                "through Optimum, which writes fp32 for the CPU; leave --precision and --device out"
            )
        target, drafts = parse_recipe("fp32"), ()
        if options.heads not in (None, "none"):
            raise UsageError(
                f"heads {options.heads!r}: {_model_type(checkpoint)} goes through Optimum, which gives no "
                "rows for heads to read; leave --heads out"
            )
    elif options.drafts not in (None, ("none",)) and len(drafts) < len(set(options.drafts)):
        _log.info("a draft in the target's own precision, %s, would save nothing and is left out", target.name)
    own = [target, *(plan.recipe for plan in drafts if plan.kind != "model")]
    if family is not None:
        check_recipes(checkpoint, own)
        _check_packages([target, *(plan.recipe for plan in drafts)])
    models = {plan.name: _draft_model(plan, checkpoint, options, report) for plan in drafts if plan.kind == "model"}
    for plan in drafts:
        if plan.kind == "layers":
            check_layers(checkpoint, plan.layers)
    heads = None if family is None else find_heads(checkpoint, options.heads)
    calibrated = target.calibrated or any(plan.calibrated for plan in drafts)
    calibrated = calibrated or (heads is not None and heads.calibration is None)
    calibration = _prepared(checkpoint, options, capacity, report) if calibrated else None
    estimated = _estimate(checkpoint, target, drafts, models, options, torch=torch and options.verify)
    if heads is not None:
        estimated = replace(estimated, disk=estimated.disk + heads.most_bytes)
    return Plan(checkpoint, family, target, drafts, models, capacity, estimated, options, calibration, heads)


def _check_packages(recipes: Sequence[Recipe]) -> None:
    """What is missing is told before minutes of work."""
    distils = any(method.name == "distil" for recipe in recipes for method in recipe.methods)
    if distils and importlib.util.find_spec("torch") is None:
        raise MissingExtraError("torch", "train")


def _prepared(
    checkpoint: Checkpoint, options: ExportOptions, capacity: int, report: Progress | None
) -> PreparedCalibration:
    from specedge.export.prepare import prepare_calibration

    return prepare_calibration(
        checkpoint,
        capacity=capacity,
        prompts=options.calibration_prompts,
        folder=options.calibration,
        seed=options.seed,
        progress=report,
    )


def _draft_model(plan: DraftPlan, target: Checkpoint, options: ExportOptions, report: Progress | None) -> Checkpoint:
    from specedge.export.draft_model import resolve_draft

    checkpoint = resolve_draft(plan.model, target, plan.recipe.form, offline=options.offline, progress=report)
    check_recipes(checkpoint, [plan.recipe])
    return checkpoint


def _estimate(
    checkpoint: Checkpoint,
    target: Recipe,
    drafts: Sequence[DraftPlan],
    models: Mapping[str, Checkpoint],
    options: ExportOptions,
    *,
    torch: bool,
) -> Estimate:
    parameters, largest = count_parameters(checkpoint.tensors, _tied_head(checkpoint))
    return estimate(
        parameters,
        largest,
        _stored(checkpoint, target),
        [_stored(models.get(plan.name, checkpoint), plan.recipe, plan.layers) for plan in drafts],
        check=options.verify,
        torch=torch,
    )


def _stored(checkpoint: Checkpoint, recipe: Recipe, layers: int = 0) -> int:
    """Bytes of a model's weights; of so many layers of it and both ends of its vocabulary, unless 0."""
    tied = _tied_head(checkpoint)
    if recipe.form.name == "gguf":
        return kept_bytes(rounded_tensors(checkpoint.tensors, checkpoint.name), tied)
    parameters, largest = count_parameters(checkpoint.tensors, tied)
    if layers:
        sizes = read_dimensions(find_family(checkpoint.config.get("model_type")), checkpoint.config)
        ends = largest if sizes.tied else 2 * largest
        parameters = ends + (parameters - ends) * layers // sizes.layers
    return stored_bytes(parameters, largest, recipe.form)


def _tied_head(checkpoint: Checkpoint) -> str | None:
    """The tensor that repeats the embedding, if there is one."""
    return "lm_head.weight" if checkpoint.config.get("tie_word_embeddings") else None


def check_recipes(checkpoint: Checkpoint, recipes: Sequence[Recipe]) -> None:
    """Raises for what a recipe asks of a model that it does not have."""
    sizes = read_dimensions(find_family(checkpoint.config.get("model_type")), checkpoint.config)
    smallest = min(sizes.hidden_size, sizes.q_size, sizes.mlp_size, sizes.vocab_size)
    for recipe in recipes:
        if recipe.rank > smallest:
            raise UsageError(
                f"recipe {recipe.name!r}: rank {recipe.rank} is larger than the smallest matrix of {checkpoint.name}, "
                f"which has {smallest} inputs or outputs; give a smaller rank"
            )
        if recipe.form.name == "gguf":
            rounded_tensors(checkpoint.tensors, checkpoint.name)


def _find_builder(checkpoint: Checkpoint) -> str | None:
    """Name of the family whose builder computes this model; None where there is none."""
    from specedge.export.rope import inverse_frequencies

    try:
        family = find_family(checkpoint.config.get("model_type"))
        inverse_frequencies(read_dimensions(family, checkpoint.config))
    except UnsupportedModelError as error:
        _log.info("%s; trying Optimum", error)
        return None
    return family.name


def _capacity(checkpoint: Checkpoint, options: ExportOptions) -> int:
    wanted = options.capacity
    context = next((value for key in _CONTEXT_KEYS if isinstance(value := checkpoint.config.get(key), int)), None)
    if wanted is None:
        usual = _COMPILED_CAPACITY if options.device == "tensorrt" else _DEFAULT_CAPACITY
        return min(context or usual, usual)
    if context is not None and wanted > context:
        raise UsageError(f"capacity is {wanted}: the context of {checkpoint.name} ends at {context}; give at most that")
    return wanted


def _model_type(checkpoint: Checkpoint) -> Any:
    return f"model_type {checkpoint.config.get('model_type')!r}"


def _counter(report: Progress, phase: str, total: int) -> Callable[[int], None]:
    """Adds up bytes for a phase; the estimate is raised where it was too low."""
    done = 0
    report(phase, 0, total)

    def count(written: int) -> None:
        nonlocal done
        done += written
        report(phase, done, max(done, total))

    return count
