"""Trees of heads' guesses: a set of paths of ranks.

(0, 1) is the second likeliest token of head 2 behind the likeliest of head 1. The paths stand in
the order in which a calibration found them worth a node, parents first, so that a budget takes the
first of them.
"""

from __future__ import annotations

import heapq
import itertools
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass

from specedge.runtime.contracts import Draft
from specedge.runtime.errors import UsageError

__all__ = ["Tree", "dense_tree", "grow", "is_shape"]

_SHAPE = re.compile(r"[1-9][0-9]?(x[1-9][0-9]?)*")
_MOST_NODES = 256


@dataclass(frozen=True)
class Tree:
    """Paths of ranks, parents first, none twice.

    Attributes:
        paths: The paths.
        parents: Place of each path's parent among them; -1 for those of one rank.
    """

    paths: tuple[tuple[int, ...], ...]
    parents: tuple[int, ...]

    @classmethod
    def of(cls, paths: Sequence[Sequence[int]]) -> Tree:
        """A tree of these paths.

        Raises:
            ValueError: One is empty, stands twice, or stands before its parent.
        """
        places: dict[tuple[int, ...], int] = {(): -1}
        parents = []
        for place, raw in enumerate(paths):
            path = tuple(raw)
            if not path or path in places or path[:-1] not in places:
                raise ValueError(f"path {list(path)} is empty, stands twice, or its parent is missing")
            parents.append(places[path[:-1]])
            places[path] = place
        return cls(tuple(tuple(path) for path in paths), tuple(parents))

    def draft(self, guesses: Sequence[Sequence[int]], budget: int) -> Draft:
        """The first `budget` nodes with the tokens of their ranks.

        Args:
            guesses: Tokens of each head, the likeliest first.
            budget: Most nodes.
        """
        tokens = tuple(int(guesses[len(path) - 1][path[-1]]) for path in self.paths[:budget])
        return Draft(tokens, self.parents[:budget])


def grow(
    guesses: Sequence[Sequence[int]], chances: Sequence[Sequence[float]], budget: int, least: float, *, chain: bool
) -> Draft:
    """The tree of the nodes that are likeliest to stand, for this very row (EAGLE-2, arXiv 2406.16858).

    A node stands with the product of the chances along its path, so a parent is never less likely
    than its child, and taking the likeliest node that is left, again and again, gives the best tree.

    Args:
        guesses: Tokens of each head, the likeliest first.
        chances: How likely each is where the ones before it stand.
        budget: Most nodes.
        least: No node less likely than this.
        chain: Only the likeliest guess of each head.
    """
    tokens: list[int] = []
    parents: list[int] = []
    ranks = 1 if chain else len(guesses[0])
    # (less the node's likelihood, depth, rank, parent, the parent's likelihood)
    waiting = [(-chances[0][0], 0, 0, -1, 1.0)]
    while waiting and len(tokens) < budget:
        less, depth, rank, parent, before = heapq.heappop(waiting)
        if -less < least:
            break
        tokens.append(int(guesses[depth][rank]))
        parents.append(parent)
        if rank + 1 < ranks:
            heapq.heappush(waiting, (-before * chances[depth][rank + 1], depth, rank + 1, parent, before))
        if depth + 1 < len(guesses):
            heapq.heappush(waiting, (less * chances[depth + 1][0], depth + 1, 0, len(tokens) - 1, -less))
    return Draft(tuple(tokens), tuple(parents))


def dense_tree(shape: str, heads: int, guesses: int) -> Tree:
    """The Cartesian tree "2x3": two guesses of head 1, behind each three of head 2; six paths, eight nodes.

    Raises:
        UsageError: It is no shape, or heads lack so many guesses.
    """
    sizes = [int(size) for size in shape.split("x")] if is_shape(shape) else []
    if not sizes or len(sizes) > heads or max(sizes) > guesses:
        raise UsageError(
            f"tree {shape!r}: give a number of guesses for each depth, as in 2x3, "
            f"for at most {heads} heads of {guesses} guesses"
        )
    count = sum(itertools.accumulate(sizes, operator.mul))
    if count > _MOST_NODES:
        raise UsageError(f"tree {shape!r} has {count} nodes; give one of at most {_MOST_NODES}")
    levels = [list(itertools.product(*map(range, sizes[:depth]))) for depth in range(1, len(sizes) + 1)]
    return Tree.of([path for level in levels for path in level])


def is_shape(text: str) -> bool:
    """Whether a text is written as `dense_tree` reads it."""
    return _SHAPE.fullmatch(text) is not None
