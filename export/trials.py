"""Makes drafts of one model, one after the other, and measures each against the same target."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from specedge.export.agreement import DRAFT_LENGTHS, Agreement, TargetLogits
from specedge.export.memory import release_memory
from specedge.runtime.bundle import GraphSpec
from specedge.runtime.errors import SpecEdgeError
from specedge.runtime.graph import Decoder
from specedge.runtime.pass_times import pass_times

__all__ = ["Clock", "Trial", "opened", "run_trial"]

Write = Callable[[Path], GraphSpec]
"""Writes a draft into a folder that is not there yet; its spec's `file` is relative to that."""


@dataclass(frozen=True)
class Clock:
    """What decoding costs, from passes that were timed.

    Attributes:
        target: The model that verifies.
        past: Rows in the caches before a pass.
        threads: Of the models.
        verify: Milliseconds of a pass of the target by draft length; 0: without a draft.
    """

    target: Decoder
    past: int
    threads: int | None
    verify: Mapping[int, float]

    @classmethod
    def of(cls, target: Decoder, past: int, threads: int | None) -> Clock:
        """Times the target."""
        [times] = pass_times([target], [1, *(1 + length for length in DRAFT_LENGTHS)], past)
        return cls(target, past, threads, {width - 1: ms for width, ms in times.items()})

    def cost(self, other: Decoder) -> tuple[float, float]:
        """A pass of one row of another model: milliseconds, and over the target's, timed side by side."""
        own, others = pass_times([self.target, other], past=self.past)
        return others[1], others[1] / own[1]

    def estimate(self, tau: Mapping[int, float | None], cost: float) -> tuple[int, float]:
        """The best draft length, and the speed-up over plain decoding that it promises.

        tau(n) * t(0) / (n * cost * t(0) + t(n)), where t are the target's passes by draft length n
        and `cost` is a draft's pass over the target's: decoding that takes no time beside the passes.
        """
        plain = self.verify[0]
        promises = [
            (length, (rate or 0.0) * plain / (length * cost * plain + self.verify[length]))
            for length, rate in tau.items()
        ]
        return max(promises, key=lambda promise: promise[1])


@dataclass(frozen=True)
class Trial:
    """One recipe, and what became of it.

    Attributes:
        recipe: Its text.
        folder: Where the graph lies.
        spec: The graph, `file` relative to `folder`; None where there is none.
        numbers: For the table; None where `error` says, in a line, why there are none.
    """

    recipe: str
    folder: Path
    spec: GraphSpec | None = None
    numbers: Mapping[str, Any] | None = None
    error: str | None = None

    @property
    def promise(self) -> float:
        """The speed-up that was estimated; 0 where nothing was measured."""
        return 0.0 if self.numbers is None or "estimate" not in self.numbers else self.numbers["estimate"]["speedup"]

    def delete(self) -> None:
        """Removes the graph from the disk."""
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def opened(path: Path, spec: GraphSpec, capacity: int, threads: int | None) -> Iterator[Decoder]:
    """A graph with a cache; its memory is given back at the end."""
    model = Decoder(path, spec, capacity=capacity, threads=threads)
    try:
        yield model
    finally:
        model.close()
        release_memory()


def run_trial(
    recipe: str,
    write: Write,
    folder: Path,
    logits: TargetLogits,
    clock: Clock,
    *,
    emulated: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Trial:
    """Writes one draft and measures it.

    A recipe that the model, the device or this version cannot have, or whose graph computes NaN,
    is a result too: the trial says so, and no exception does.

    Args:
        recipe: Its text.
        write: Makes the graph.
        folder: Where it will lie.
        logits: The target's.
        clock: The target's.
        emulated: Its graph computes in floats what it stands for, so that its time says nothing.
        progress: Told of each text that was measured.
    """
    begun = perf_counter()
    try:
        spec = write(folder)
        written = perf_counter()
        with opened(folder / spec.file, spec, clock.target.capacity, clock.threads) as draft:
            found = logits.measure(draft, progress=progress)
            times = {} if emulated else _times(clock, draft, found)
    except SpecEdgeError as error:
        shutil.rmtree(folder, ignore_errors=True)
        return Trial(recipe, folder, error=str(error))
    numbers = {
        **_numbers(found),
        **times,
        "weight_bytes": spec.weight_bytes,
        "seconds": {"write": round(written - begun, 1), "measure": round(perf_counter() - written, 1)},
    }
    return Trial(recipe, folder, spec, numbers)


def _times(clock: Clock, draft: Decoder, found: Agreement) -> dict[str, Any]:
    draft_ms, cost = clock.cost(draft)
    length, speedup = clock.estimate(found.tau, cost)
    return {
        "draft_ms": round(draft_ms, 3),
        "cost": round(cost, 4),
        "estimate": {"draft_length": length, "speedup": round(speedup, 4)},
    }


def _numbers(found: Agreement) -> dict[str, Any]:
    return {
        "alpha": round(found.alpha, 5),
        "alpha_sampled": round(found.alpha_sampled, 5),
        "kl": round(found.kl, 6),
        "logit_error": round(found.logit_error, 5),
        "nll": round(found.nll, 5),
        "tau": {str(length): None if tau is None else round(tau, 4) for length, tau in found.tau.items()},
        "texts": [{"tokens": one.tokens, "alpha": round(one.alpha, 4), "kl": round(one.kl, 5)} for one in found.texts],
    }
