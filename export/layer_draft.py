"""A draft that is some of the target's layers, with its embedding and head: which, and as a checkpoint of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specedge.export.checkpoint import Checkpoint, RoundedTensors, Tensors
from specedge.export.layer_choice import choose_layers
from specedge.export.layer_scores import LayerScorer
from specedge.export.texts import Text
from specedge.models import find_family
from specedge.quant.grid import Grid, Rounded
from specedge.runtime.bundle import GraphSpec
from specedge.runtime.errors import UsageError

__all__ = ["BUDGET", "check_layers", "find_layers", "keep_layers"]

BUDGET = 4
"""Choices that a search measures for each layer of the target."""

_COUNT = "num_hidden_layers"


def check_layers(checkpoint: Checkpoint, keep: int) -> None:
    """Whether a draft can keep so many of a model's layers.

    Raises:
        UsageError: It would keep none, or all.
    """
    layers = checkpoint.config.get(_COUNT)
    if not isinstance(layers, int) or not 0 < keep < layers:
        raise UsageError(f"draft layers-{keep}: {checkpoint.name} has {layers} layers, so give fewer, and at least one")


def find_layers(
    folder: Path,
    spec: GraphSpec,
    texts: Sequence[Text],
    keep: int,
    *,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[int, ...]:
    """Searches the layers that a draft in the target's cache does best with.

    Args:
        folder: Of the bundle.
        spec: The target's graph, written already.
        texts: What the target wrote.
        keep: Layers of the draft.
        threads: Threads to compute with; None takes all.
        progress: Told how many choices are measured, of how many at most.

    Raises:
        UsageError: The texts hold no answers, or `keep` is out of range.
        UnsupportedModelError: The target's layers cannot be told apart.
    """
    budget = BUDGET * spec.layers
    scorer = LayerScorer(folder / spec.file, spec, texts, threads=threads)

    def tell(done: int) -> None:
        if progress is not None:
            progress(min(done, budget), budget)

    try:
        return choose_layers(lambda kept: scorer(kept).kl, spec.layers, keep, budget, tell)
    finally:
        scorer.close()


def keep_layers(checkpoint: Checkpoint, kept: Sequence[int]) -> Checkpoint:
    """The checkpoint without its other layers; those that stay are numbered anew.

    Args:
        checkpoint: The target's.
        kept: Layers that stay, in order.
    """
    prefix = find_family(checkpoint.config.get("model_type")).layer
    source = checkpoint.tensors
    tensors: Tensors = _KeptTensors(source, prefix, kept)
    if isinstance(source, RoundedTensors):
        tensors = _KeptRoundedTensors(source, prefix, kept)
    return replace(checkpoint, config={**checkpoint.config, _COUNT: len(kept)}, tensors=tensors)


class _KeptTensors:
    """Tensors of some layers under new numbers, and all that belong to no layer."""

    def __init__(self, tensors: Tensors, prefix: str, kept: Sequence[int]) -> None:
        self._tensors = tensors
        begin, end = prefix.split("{layer}")
        self._names: dict[str, str] = {}
        numbers = {f"{begin}{old}{end}": f"{begin}{new}{end}" for new, old in enumerate(kept)}
        for name in tensors:
            if not name.startswith(begin):
                self._names[name] = name
                continue
            number, _, rest = name.removeprefix(begin).partition(end)
            old = f"{begin}{number}{end}"
            if old in numbers:
                self._names[numbers[old] + rest] = name

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        return self._tensors[self._names[name]]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors.shape(self._names[name])


class _KeptRoundedTensors(_KeptTensors):
    """The same, of a file that holds them rounded."""

    _tensors: RoundedTensors

    def grid(self, name: str) -> Grid | None:
        return self._tensors.grid(self._names[name])

    def rounded(self, name: str) -> Rounded | None:
        return self._tensors.rounded(self._names[name])
