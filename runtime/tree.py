"""From a draft's topology to positions, visibility and paths. numpy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["ancestors", "depths", "path_to", "positions", "visibility"]


def depths(parents: Sequence[int]) -> NDArray[np.int64]:
    """Depth of each node, [nodes]; children of the newest committed token have depth 0."""
    depth = np.zeros(len(parents), np.int64)
    for node, parent in enumerate(parents):
        depth[node] = depth[parent] + 1 if parent >= 0 else 0
    return depth


def ancestors(parents: Sequence[int]) -> NDArray[np.bool_]:
    """[nodes, nodes]: entry (i, j) is true where node j is node i itself or an ancestor of it."""
    count = len(parents)
    above = np.zeros((count, count), np.bool_)
    for node, parent in enumerate(parents):
        if parent >= 0:
            above[node] = above[parent]
        above[node, node] = True
    return above


def positions(start: int, pending: int, parents: Sequence[int]) -> NDArray[np.int64]:
    """Position of every row of a pass, [pending + nodes].

    A node's position is its depth after the last pending token, never its slot in the pass.

    Args:
        start: Rows in the cache before the pass.
        pending: Committed tokens that are run first.
        parents: The draft's topology.
    """
    return np.concatenate([np.arange(start, start + pending), start + pending + depths(parents)])


def visibility(pending: int, parents: Sequence[int]) -> NDArray[np.bool_]:
    """[rows, rows] of a pass: whether row i may look at row j. All of them may look at the whole cache."""
    rows = pending + len(parents)
    sees = np.tri(rows, dtype=np.bool_)
    sees[pending:, pending:] = ancestors(parents)
    return sees


def path_to(parents: Sequence[int], node: int) -> tuple[int, ...]:
    """The nodes from the root down to `node`, itself included; () for -1."""
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return tuple(reversed(path))
