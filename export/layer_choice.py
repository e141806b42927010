"""Which layers of a target a draft of it keeps: a search by how little its laws change without the others.

Leaving layers of the target out to draft is Zhang et al., Draft & Verify (arXiv 2309.08168). They
search by Bayesian optimisation over time; here layers go one at a time, the least missed first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence

from specedge.runtime.errors import UsageError

__all__ = ["choose_layers", "simple_choices"]

Kept = tuple[int, ...]


def choose_layers(
    loss: Callable[[Kept], float], layers: int, keep: int, budget: int, progress: Callable[[int], None] | None = None
) -> Kept:
    """Chooses layers by lazy greedy removal, and takes a simple choice where that is better.

    Every layer is missed by itself first; then they are removed, the least missed first, and
    whoever comes next is measured again without those that are gone. A layer that is still less
    missed than the next one's last measurement goes.

    Args:
        loss: How bad a draft that keeps these layers is; less is better.
        layers: Of the target.
        keep: Of the draft.
        budget: About how many choices to measure. Where it is used up, the last measurements decide.
        progress: Told after each measurement how many there were.

    Returns:
        The layers to keep, in order.

    Raises:
        UsageError: The draft would keep none or all.
    """
    if not 0 < keep < layers:
        raise UsageError(f"a draft of {keep} layers: the target has {layers}, so give a number from 1 to {layers - 1}")
    measured: dict[Kept, float] = {}

    def measure(kept: Kept) -> float:
        if kept not in measured:
            measured[kept] = loss(kept)
            if progress is not None:
                progress(len(measured))
        return measured[kept]

    simple = list(simple_choices(layers, keep))
    best = min(simple, key=measure)
    kept = tuple(range(layers))
    missed = [(measure(_without(kept, layer)) if len(measured) < budget else 0.0, layer, layers) for layer in kept]
    heapq.heapify(missed)
    while len(kept) > keep:
        _, layer, known = heapq.heappop(missed)
        if known != len(kept) and len(measured) < budget - 1:
            heapq.heappush(missed, (measure(_without(kept, layer)), layer, len(kept)))
            continue
        kept = _without(kept, layer)
    return min(best, kept, key=measure)


def simple_choices(layers: int, keep: int) -> Iterator[Kept]:
    """Choices that need no search: the first layers, the last, evenly spaced, and all but a block in the middle."""
    yield tuple(range(keep))
    yield tuple(range(layers - keep, layers))
    yield tuple(round(place * (layers - 1) / max(keep - 1, 1)) for place in range(keep))
    head = (keep + 1) // 2
    yield (*range(head), *range(layers - keep + head, layers))


def _without(kept: Sequence[int], layer: int) -> Kept:
    return tuple(other for other in kept if other != layer)
