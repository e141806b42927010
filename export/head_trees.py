"""From what heads guessed on held-out text to the trees that are worth their nodes.

A row of ranks says where, among the guesses of each head, the token stood that came. A path of
ranks is right as often as the rows begin with it, and the tree of n nodes whose expected accepted
length, the sum of that over its nodes, is largest holds the n paths that are right most often: a
path is never right more often than its parent, so the parent is among them. (Medusa, arXiv
2401.10774, multiplies the heads' shares in place of counting paths, as if they were independent.)
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from specedge.runtime.calibration import HeadCalibration

__all__ = ["MOST_NODES", "calibration_of"]

MOST_NODES = 64


def calibration_of(ranks: NDArray[np.int64], guesses: int, text: str) -> HeadCalibration:
    """What ranks say of heads.

    Args:
        ranks: [rows, heads], the place of the right token among a head's guesses; `guesses` or more: not among them.
        guesses: Of each head.
        text: What the text was.

    Returns:
        Shares and the best paths, at most 64; paths that were never right follow the others where these are fewer.
    """
    rows, heads = ranks.shape
    if not rows:
        raise ValueError("there are no rows to calibrate on")
    top = [[float((ranks[:, head] <= rank).mean()) for rank in range(guesses)] for head in range(heads)]
    counts: Counter[tuple[int, ...]] = Counter()
    for row in ranks.tolist():
        for depth in range(1, heads + 1):
            if row[depth - 1] >= guesses:
                break
            counts[tuple(row[:depth])] += 1
    for rank in range(guesses):  # so that there is a tree, however few rows there are
        counts[rank,] += 0
    best = sorted(counts, key=lambda path: (-counts[path], len(path), path))[:MOST_NODES]
    return HeadCalibration(
        text=text,
        positions=rows,
        top=tuple(map(tuple, top)),
        paths=tuple(best),
        values=tuple(counts[path] / rows for path in best),
    )
