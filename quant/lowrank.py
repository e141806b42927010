"""Low-rank correction: the part of the rounding's error that costs most is added back by two small products.

    y = What x + B (A x),   B A nearest to E = W - What for the activations:
    minimise tr((E - B A) H (E - B A)^T),   H the mean of x x^T

LQER (Zhang and others, arXiv 2402.02446) weights the error's columns by the activations' size;
EoRA (Liu and others, arXiv 2410.21271) by all of H = Q L Q^T, and takes the singular value
decomposition E Q L^1/2 = U S V^T, B = U S, A = V^T (Q L^1/2)^-1. Since U_r U_r^T is what projects
E Q L^1/2 onto its best rank r, and leaves L^1/2 Q^T where it stands,

    B = U_r,   A = U_r^T E

is the same correction without the inverse, which inputs that were never seen do not have. U_r are
the first eigenvectors of E H E^T, or come from those of (E R)^T (E R) with H = R R^T, whichever is
the smaller matrix.

Invariants: what is left is the sum of the eigenvalues from r on, so it falls with the rank; rank
min(out, in) leaves nothing; rank 0 is no correction.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specedge.quant.layer import LowRank

__all__ = ["correct_low_rank"]

Matrix = NDArray[np.float32]


def correct_low_rank(missed: Matrix, second: Matrix, rank: int) -> LowRank | None:
    """The correction of a rank that leaves the least error of the output; None for rank 0.

    Args:
        missed: E = W - What, [out, in].
        second: H, [in, in], the mean of x x^T.
        rank: Its rank.

    Raises:
        ValueError: The rank is negative, or larger than the matrix.
    """
    most = min(missed.shape)
    if not 0 <= rank <= most:
        raise ValueError(f"a low-rank correction of rank {rank} for a matrix {list(missed.shape)}: give 0 to {most}")
    if rank == 0:
        return None
    if rank == most:  # exact on every input, also those that were never seen
        eye = np.eye(most, dtype=np.float32)
        return LowRank(missed, eye) if len(missed) == most else LowRank(eye, missed)
    up = _left_vectors(missed.astype(np.float64), second.astype(np.float64), rank)
    return LowRank((up.T @ missed).astype(np.float32), up.astype(np.float32))


def _left_vectors(missed: NDArray[np.float64], second: NDArray[np.float64], rank: int) -> NDArray[np.float64]:
    """The first left singular vectors of E H^1/2, [out, rank]."""
    outputs, inputs = missed.shape
    if outputs <= inputs:
        _, vectors = np.linalg.eigh(missed @ second @ missed.T)
        return _signed(vectors[:, : -rank - 1 : -1])
    values, vectors = np.linalg.eigh(second)
    weighted = missed @ (vectors * np.sqrt(np.maximum(values, 0)))
    _, right = np.linalg.eigh(weighted.T @ weighted)
    left, _ = np.linalg.qr(weighted @ right[:, : -rank - 1 : -1])
    return _signed(left)


def _signed(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    """The largest entry of each column is positive, whatever the library's choice."""
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(0)[None], 0)
    return vectors * np.where(largest < 0, -1.0, 1.0)
