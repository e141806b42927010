"""Writes the graphs of a bundle: by the builder of the model's family, or through Optimum where there is none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specedge.export.checkpoint import Checkpoint
from specedge.export.interop import STANDARD_GRAPH
from specedge.export.memory import Estimate, count_parameters, estimate
from specedge.export.options import DRAFTS, ExportOptions, Progress
from specedge.quant.formats import find_format
from specedge.runtime.bundle import GraphSpec
from specedge.runtime.errors import UnsupportedModelError, UsageError
from specedge.runtime.graph import cache_shape

__all__ = ["Graphs", "Plan", "make_plan"]

_DEFAULT_CAPACITY = 4096
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
    """

    family: str
    target: GraphSpec
    drafts: Mapping[str, GraphSpec]
    standard: str = STANDARD_GRAPH


@dataclass(frozen=True)
class Plan:
    """What will be written.

    Attributes:
        family: Which builder writes it; None: Optimum.
        precision: Of the target.
        drafts: Names of the drafts.
        capacity: Rows of the caches.
        estimate: Disk and memory it takes.
    """

    checkpoint: Checkpoint
    device: str
    family: str | None
    precision: str
    drafts: tuple[str, ...]
    capacity: int
    estimate: Estimate

    def write(self, folder: Path, report: Progress) -> Graphs:
        """Writes the graphs into the folder of the bundle."""
        if self.family is None:
            from specedge.export.optimum import write_through_optimum

            report("write target", 0, 1)
            target = write_through_optimum(self.checkpoint, folder, capacity=self.capacity)
            report("write target", 1, 1)
            return Graphs("optimum", target, {})
        target = self._decoder(
            folder, "onnx", "target", self.precision, _counter(report, "write target", self.estimate.target)
        )
        report("write target", target.weight_bytes, target.weight_bytes)
        drafted = _counter(report, "write drafts", self.estimate.drafts)
        drafts = {}
        for name in self.drafts:
            draft = self._decoder(folder, f"drafts/{name}", "draft", DRAFTS[name], drafted)
            drafts[name] = replace(draft, shares_cache=cache_shape(draft) == cache_shape(target))
        written = sum(draft.weight_bytes for draft in drafts.values())
        report("write drafts", written, written)
        return Graphs(self.family, target, drafts)

    def _decoder(
        self, folder: Path, where: str, stem: str, precision: str, on_tensor: Callable[[int], None]
    ) -> GraphSpec:
        from specedge.export.decoder import write_decoder

        spec = write_decoder(
            self.checkpoint,
            folder / where,
            stem=stem,
            precision=precision,
            capacity=self.capacity,
            device=self.device,
            standard=stem == "target",
            draft=stem == "draft",
            on_tensor=on_tensor,
        )
        return replace(spec, file=f"{where}/{spec.file}")


def make_plan(checkpoint: Checkpoint, options: ExportOptions, *, torch: bool) -> Plan:
    """Decides who writes the graphs, and how large everything becomes.

    Args:
        checkpoint: The model.
        options: What was asked for.
        torch: Whether PyTorch will be run to check.

    Raises:
        UsageError: The model or its builder has no such precision, draft or capacity.
        CheckpointError: The checkpoint is broken.
    """
    family = _find_builder(checkpoint)
    capacity = _capacity(checkpoint, options.capacity)
    precision, drafts = options.target_precision, options.draft_names
    if family is None:
        if options.precision not in (None, "fp32") or options.device != "cpu":
            raise UsageError(
                f"precision {precision!r} on {options.device!r}: {_model_type(checkpoint)} has no builder and goes "
                "through Optimum, which writes fp32 for the CPU; leave --precision and --device out"
            )
        precision, drafts = "fp32", ()
    elif options.drafts not in (None, ("none",)) and drafts != options.drafts:
        _log.info("a draft in the target's own precision, %s, would save nothing and is left out", precision)
    tied = "lm_head.weight" if checkpoint.config.get("tie_word_embeddings") else None
    parameters, largest = count_parameters(checkpoint.tensors, tied)
    estimated = estimate(
        parameters,
        largest,
        find_format(precision, options.device),
        [find_format(DRAFTS[name], options.device, draft=True) for name in drafts],
        check=options.verify,
        torch=torch and options.verify,
    )
    return Plan(checkpoint, options.device, family, precision, drafts, capacity, estimated)


def _find_builder(checkpoint: Checkpoint) -> str | None:
    """Name of the family whose builder computes this model; None where there is none."""
    from specedge.export.rope import inverse_frequencies
    from specedge.models import find_family, read_dimensions

    try:
        family = find_family(checkpoint.config.get("model_type"))
        inverse_frequencies(read_dimensions(family, checkpoint.config))
    except UnsupportedModelError as error:
        _log.info("%s; trying Optimum", error)
        return None
    return family.name


def _capacity(checkpoint: Checkpoint, wanted: int | None) -> int:
    context = next((value for key in _CONTEXT_KEYS if isinstance(value := checkpoint.config.get(key), int)), None)
    if wanted is None:
        return min(context or _DEFAULT_CAPACITY, _DEFAULT_CAPACITY)
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
