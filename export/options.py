"""What a caller may ask of an export, checked when it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from specedge.quant.formats import default_precision, find_format
from specedge.runtime.errors import UsageError

__all__ = ["DRAFTS", "PHASES", "ExportOptions", "Progress"]

Progress = Callable[[str, int, int], None]
"""Called with the phase, and how much of it is done of how much in all (bytes, or steps where nothing is written)."""

PHASES = (
    "resolve",
    "write target",
    "write drafts",
    "interop files",
    "self-check",
    "parity check",
    "finish",
)

DRAFTS: Mapping[str, str] = {"self-int4": "int4", "self-int8": "int8"}
"""Precision of each draft; all are the target itself in fewer bits."""

# Measured on a CPU: 8 bits run as fast as 4 (SmolLM2-135M), and agree without the help of a 4-bit
# grid in the checkpoint. Not measured on a GPU, which should wait for memory, where 4 bits are half
# of it. A copy of an INT8 or INT4 target would save nothing.
_DEFAULT_DRAFTS: Mapping[str, tuple[str, ...]] = {"cpu": ("self-int8",), "cuda": ("self-int4",)}
_WORTH_DRAFTING = ("fp32", "fp16")

_SMALLEST_CAPACITY = 64


@dataclass(frozen=True)
class ExportOptions:
    """What to export.

    Attributes:
        precision: "fp32", "fp16", "int8" or "int4"; None: fp32 on a CPU, fp16 on CUDA.
        device: "cpu" or "cuda".
        drafts: Draft models to put in: "self-int4", "self-int8"; ("none",) for none. None takes the
            device's default draft where the target is fp32 or fp16, else none.
        capacity: Rows of the cache; None: the model's own context up to 4096, since a cache is
            allocated whole, and most models' full context would take more memory than their weights.
        verify: Check the graphs against themselves and, where it is installed, PyTorch.
        revision: Revision of a hub id.
        offline: Fetch nothing.
        force: Replace a bundle of this name.
    """

    precision: str | None = None
    device: str = "cpu"
    drafts: tuple[str, ...] | None = None
    capacity: int | None = None
    verify: bool = True
    revision: str | None = None
    offline: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        find_format(self.target_precision, self.device)
        choices = (*DRAFTS, "none")
        for name in self.drafts or ():
            if name not in choices:
                raise UsageError(f"draft is {name!r}: choose one of {', '.join(choices)}")
        if self.drafts is not None and "none" in self.drafts and len(set(self.drafts)) > 1:
            raise UsageError("draft none excludes other drafts: leave one out")
        capacity = self.capacity
        if capacity is not None and (isinstance(capacity, bool) or not _SMALLEST_CAPACITY <= capacity < 1 << 31):
            raise UsageError(f"capacity is {capacity!r}: give a number from {_SMALLEST_CAPACITY} up")

    @property
    def target_precision(self) -> str:
        return self.precision if self.precision is not None else default_precision(self.device)

    @property
    def draft_names(self) -> tuple[str, ...]:
        """Drafts to write, each once; one in the target's own precision would save nothing."""
        if self.drafts is None:
            return _DEFAULT_DRAFTS[self.device] if self.target_precision in _WORTH_DRAFTING else ()
        names = dict.fromkeys(name for name in self.drafts if name != "none")
        return tuple(name for name in names if DRAFTS[name] != self.target_precision)
