"""How far two computations of the same logits may lie apart: one row a precision, for checks and tests alike.

Where the weights stay what the checkpoint says (fp32, fp16) the graph is held to
PyTorch's logits. Where they were rounded (int8, int4) no bound on a logit would mean
anything: the mean divergence from PyTorch's law is reported, and bounded only so that
a broken graph (an echo of its input, permuted heads) cannot pass as rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DRAFT_MAX_KL", "TOLERANCES", "Tolerance"]


@dataclass(frozen=True)
class Tolerance:
    """What one precision is held to.

    Attributes:
        graph: Largest absolute difference of a logit between two ways of running the same weights:
            one pass, pieces, a tree, the standard graph.
        pytorch: Largest absolute difference of a logit from PyTorch in fp32; None where weights were rounded.
        max_kl: Largest mean KL(p||q) from PyTorch, in nats; None where `pytorch` bounds more tightly.
    """

    graph: float
    pytorch: float | None = None
    max_kl: float | None = None


TOLERANCES: dict[str, Tolerance] = {
    "fp32": Tolerance(graph=2e-3, pytorch=2e-3),
    "fp16": Tolerance(graph=0.15, pytorch=0.15),
    "int8": Tolerance(graph=0.5, max_kl=0.25),
    "int4": Tolerance(graph=0.5, max_kl=2.0),
}
"""By precision. int8 and int4 quantise activations too, row by row: a last-bit difference before
the rounding can move a whole step after it, so their graph bound is wide and KL carries the check."""

DRAFT_MAX_KL = 4.0
"""Largest mean KL(target||draft): a draft may be poor, since the target decides, but a draft that
guesses no better than chance means that its graph is broken (ln 49152 is 10.8)."""
