"""What a caller may ask of a comparison, checked when it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specedge.quant.recipe import Recipe, parse_recipe
from specedge.runtime.errors import UsageError
from specedge.runtime.prompts import Prompt, spread

__all__ = ["FORMATS", "METHODS", "CompareOptions"]

FORMATS = (
    "int8-rows", "int8-static", "int8-block", "int4", "int4:b32:sym", "int4:b64:sym", "int4:b64:asym",
    "fp8-e4m3", "fp8-e5m2", "int3",
)  # fmt: skip
METHODS = (
    "none", "bias", "scale", "gptq", "lowrank:16", "scale+gptq", "scale+gptq+lowrank:16+bias", "scale+gptq+distil",
)  # fmt: skip


@dataclass(frozen=True)
class CompareOptions:
    """What to compare.

    Attributes:
        formats, methods: Each format, as a draft's recipe names it, is tried with each method ("none": with none).
        precision: Of the target; None: fp32 on a CPU.
        count: Prompts, spread over the categories.
        max_tokens: Most tokens of an answer.
        time_best: How many drafts are timed as they decode, the most promising ones.
        threads: Of all models; None: all processors.
        calibration_prompts: What compensation is calibrated on; None: what the target writes by itself.
        calibration: A folder to keep what calibration measured in, or that holds it; None: it is not kept.
        revision, offline: Of the model, as `ExportOptions`.
    """

    formats: tuple[str, ...] = FORMATS
    methods: tuple[str, ...] = METHODS
    precision: str | None = None
    count: int = 48
    max_tokens: int = 128
    time_best: int = 4
    threads: int | None = None
    calibration_prompts: tuple[Prompt, ...] | None = None
    calibration: Path | None = None
    revision: str | None = None
    offline: bool = False

    def __post_init__(self) -> None:
        if not self.formats or not self.methods:
            raise UsageError("nothing to compare: give at least one format and one method")
        for name in ("count", "max_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}: give 1 or more")
        for form in self.formats:
            if parse_recipe(form, draft=True).form.grid is None:
                raise UsageError(f"format {form!r} rounds nothing, so there is nothing to compare; leave it out")
        _ = self.recipes  # each is known

    def choose(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts to measure on.

        Raises:
            UsageError: One of them stands among the calibration prompts: what a draft was calibrated
                on says little about how it does elsewhere.
        """
        chosen = spread(prompts, self.count)
        known = {_plainly(prompt.text) for prompt in self.calibration_prompts or ()}
        for prompt in chosen:
            if _plainly(prompt.text) in known:
                raise UsageError(
                    f"prompt {prompt.question_id} ({prompt.category}) stands among the calibration prompts too; "
                    "measure on prompts that calibration does not use"
                )
        return chosen

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """Formats times methods, each once."""
        pairs = [(form, method) for form in self.formats for method in self.methods]
        names = dict.fromkeys(form if method == "none" else f"{form}+{method}" for form, method in pairs)
        return tuple(parse_recipe(name, draft=True) for name in names)


def _plainly(text: str) -> str:
    """A text without what makes no difference to what it asks."""
    return " ".join(text.split()).casefold()
