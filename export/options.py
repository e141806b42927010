"""What a caller may ask of an export, checked when it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from specedge.export.dialects import find_dialect
from specedge.export.drafts import DraftPlan, parse_draft
from specedge.quant.formats import DEVICES, default_precision, is_row_invariant
from specedge.quant.recipe import Method, Recipe, parse_methods, parse_recipe
from specedge.runtime.errors import UsageError
from specedge.runtime.prompts import Prompt

__all__ = ["PHASES", "ExportOptions", "Progress"]

Progress = Callable[[str, int, int], None]
"""Called with the phase, and how much of it is done of how much in all (bytes, or steps where nothing is written)."""

PHASES = (
    "resolve",
    "calibrate",
    "write target",
    "write drafts",
    "write heads",
    "interop files",
    "self-check",
    "parity check",
    "finish",
)

# Measured on a CPU: 8 bits run as fast as 4 (SmolLM2-135M), and agree without the help of a 4-bit
# grid in the checkpoint. Not measured on a GPU, which should wait for memory, where 4 bits are half
# of it. A copy of an INT8 or INT4 target would save nothing. TensorRT's 8 bits have to be calibrated, which
# takes minutes and so waits until it is asked for.
_DEFAULT_DRAFTS: Mapping[str, tuple[str, ...]] = {"cpu": ("self-int8",), "cuda": ("self-int4",), "tensorrt": ()}

_WORTH_DRAFTING = ("fp32", "fp16", "bf16")

_DEFAULT_HEADS = {"cpu": "int8", "cuda": "int8", "tensorrt": "fp16"}

_SMALLEST_CAPACITY = 64
_LARGEST_SEED = 1 << 63


@dataclass(frozen=True)
class ExportOptions:
    """What to export.

    Attributes:
        precision: A recipe, as `parse_recipe` reads it; None: fp32 on a CPU, fp16 elsewhere.
        device: "cpu", "cuda" or "tensorrt".
        attention: Operators of the attention, as `find_dialect` reads it; None: the device's own.
        draft_device: Where drafts run; None: where the target does.
        drafts: Draft models to put in, as `parse_draft` reads them; ("none",) for none. None takes the
            device's default draft where the target is fp32 or fp16, else none.
        compensate: What compensates the rounding of the drafts, and of the target, whose recipes
            name no method; None: nothing does.
        heads: Medusa heads to put in: a file or folder, or "none". None takes those shipped for a built-in model.
        heads_precision: How they are stored, as `parse_recipe` reads it; None: int8, for TensorRT fp16.
        calibration: A folder to keep what calibration measures in, or that holds it; None: it is not kept.
        calibration_prompts: What to calibrate on; None: what the target writes by itself.
        seed: Of the text that the target writes, and of distillation.
        capacity: Rows of the cache; None: the model's own context up to 4096, since a cache is
            allocated whole, and most models' full context would take more memory than their weights.
        verify: Check the graphs against themselves and, where it is installed, PyTorch.
        revision: Revision of a hub id.
        offline: Fetch nothing.
        force: Replace a bundle of this name.
    """

    precision: str | None = None
    device: str = "cpu"
    attention: str | None = None
    draft_device: str | None = None
    drafts: tuple[str, ...] | None = None
    compensate: str | None = None
    heads: str | None = None
    heads_precision: str | None = None
    calibration: Path | None = None
    calibration_prompts: tuple[Prompt, ...] | None = None
    seed: int = 0
    capacity: int | None = None
    verify: bool = True
    revision: str | None = None
    offline: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        _ = self.target  # an unknown device is told first
        find_dialect(self.device, self.attention)
        for recipe in (self.target, *(plan.recipe for plan in self.draft_plans)):
            if recipe.form.emulated:
                raise UsageError(
                    f"precision {recipe.form.name!r} has no operator on any device; "
                    "it is there for compare-compensation alone, so choose int4"
                )
        _ = self.heads_recipe  # checked
        if not is_row_invariant(self.target.form):
            raise UsageError(
                f"precision {self.target.name!r}: in blocks as large as these, what a row gives depends on how many "
                "run with it, so that a target could not verify; give b32, or use this recipe for a draft"
            )
        self._check_calibration()
        if self.drafts is not None and "none" in self.drafts and len(set(self.drafts)) > 1:
            raise UsageError("draft none excludes other drafts: leave one out")
        capacity = self.capacity
        if capacity is not None and (isinstance(capacity, bool) or not _SMALLEST_CAPACITY <= capacity < 1 << 31):
            raise UsageError(f"capacity is {capacity!r}: give a number from {_SMALLEST_CAPACITY} up")
        if isinstance(self.seed, bool) or not 0 <= self.seed < _LARGEST_SEED:
            raise UsageError(f"seed is {self.seed!r}: give a whole number from 0 to {_LARGEST_SEED - 1}")

    def _check_calibration(self) -> None:
        """What would be passed over in silence is refused."""
        recipes = [self.target, *(plan.recipe for plan in self.draft_plans)]
        if self.methods and all(recipe.form.grid is None for recipe in recipes):
            raise UsageError(f"compensate {self.compensate!r}: nothing here is rounded; leave it out")
        calibrated = self.target.calibrated or any(plan.calibrated for plan in self.draft_plans)
        calibrated = calibrated or self.heads not in (None, "none")
        if not calibrated and (self.calibration is not None or self.calibration_prompts is not None):
            raise UsageError("nothing here needs a calibration: compensate, as in self-int4+gptq, or leave it out")

    @property
    def methods(self) -> tuple[Method, ...]:
        """What compensates where a recipe does not say."""
        return () if self.compensate is None else parse_methods(self.compensate)

    @property
    def target(self) -> Recipe:
        """How the target is stored."""
        precision = self.precision if self.precision is not None else default_precision(self.device)
        return parse_recipe(precision, self.device, default_methods=self.methods)

    @property
    def heads_recipe(self) -> Recipe:
        """How heads are stored: as a draft is, since they run one row."""
        precision = self.heads_precision if self.heads_precision is not None else _DEFAULT_HEADS[self.device]
        recipe = parse_recipe(precision, self.device, draft=True)
        if recipe.calibrated or recipe.form.name == "gguf":
            raise UsageError(f"heads precision {recipe.name!r}: heads are only rounded; give fp32, int8 or int4")
        if recipe.form.dtype == "bfloat16":
            raise UsageError(f"heads precision {recipe.name!r}: heads do not run in bfloat16; give fp16, int8 or int4")
        return recipe

    @property
    def draft_plans(self) -> tuple[DraftPlan, ...]:
        """Drafts to write, each once; one in the target's own recipe would save nothing."""
        drafts, device = self.drafts, self.draft_device or self.device
        if device not in DEVICES:
            raise UsageError(f"draft device is {device!r}: choose one of {', '.join(DEVICES)}")
        if drafts is None:
            drafts = _DEFAULT_DRAFTS[device] if self.target.form.name in _WORTH_DRAFTING else ()
            if drafts and device == self.device and self.target.form.dtype == "bfloat16":
                drafts = tuple(f"{draft}:bf16" for draft in drafts)  # else it could not work in the target's cache
        plans: dict[str, DraftPlan] = {}
        for text in dict.fromkeys(drafts):
            if text == "none":
                continue
            plan = parse_draft(text, device, self.methods)
            if plan.kind == "layers" and self.target.form.dtype == "bfloat16":
                raise UsageError(f"draft {text!r}: layers of a target in bfloat16 cannot be chosen here; give fp16")
            if plan.name in plans:
                raise UsageError(f"drafts {plans[plan.name].text!r} and {text!r} would have one name; leave one out")
            if plan.kind != "self" or (plan.recipe.form, plan.recipe.methods) != (
                self.target.form,
                self.target.methods,
            ):
                plans[plan.name] = plan
        return tuple(plans.values())
