"""How far two computations of the same logits may lie apart: one row a precision, for checks and tests alike.

Where the weights stay what the checkpoint says (fp32, fp16) logits are held to a bound.
Where weights and activations are rounded (int8, int4, 8 bits of mantissa) none would mean anything: a
difference in the last bit can move a rounded activation by a whole step, and layers
amplify it (measured on SmolLM2-135M: up to 4 in a logit between one pass and pieces). There the
mean divergence of the laws is bounded, loosely for rounding and tightly enough that a
broken graph (an ignored mask, an echo of the input, permuted heads) cannot pass.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DRAFT_MAX_KL", "TOLERANCES", "Bound", "Tolerance", "tolerance_of"]


@dataclass(frozen=True)
class Bound:
    """What two arrays of logits are held to.

    Attributes:
        absolute: Largest difference of a logit; None: not bounded.
        kl: Largest mean KL(p||q), in nats.
    """

    absolute: float | None
    kl: float


@dataclass(frozen=True)
class Tolerance:
    """What one precision is held to.

    Attributes:
        graph: Two ways of running the same weights: one pass, pieces, a tree, the standard graph.
        pytorch: The graph and PyTorch in fp32.
    """

    graph: Bound
    pytorch: Bound


TOLERANCES: dict[str, Tolerance] = {
    "fp32": Tolerance(graph=Bound(2e-3, 1e-4), pytorch=Bound(2e-3, 1e-4)),
    "fp16": Tolerance(graph=Bound(0.25, 0.01), pytorch=Bound(0.4, 0.01)),
    "bf16": Tolerance(graph=Bound(None, 0.02), pytorch=Bound(None, 0.02)),
    "int8": Tolerance(graph=Bound(None, 0.25), pytorch=Bound(None, 0.25)),
    "int8-static": Tolerance(graph=Bound(None, 0.25), pytorch=Bound(None, 1.0)),
    "int8-block": Tolerance(graph=Bound(None, 0.25), pytorch=Bound(None, 0.25)),
    "int4": Tolerance(graph=Bound(None, 0.25), pytorch=Bound(None, 2.0)),
    "fp8-e4m3": Tolerance(graph=Bound(2e-3, 1e-4), pytorch=Bound(None, 0.25)),
    "fp8-e5m2": Tolerance(graph=Bound(2e-3, 1e-4), pytorch=Bound(None, 1.0)),
    "gguf": Tolerance(graph=Bound(None, 0.25), pytorch=Bound(None, 0.25)),
}
"""By precision. Measured on SmolLM2-135M, largest: fp32 8e-5 and 8e-5; fp16 0.10 and 0.16; mean KL of int8
0.03 and 0.06, of int4 0.01 and 0.5, of bf16 0.0017 and 0.0016 (PyTorch's own bfloat16 from its fp32: 0.0016, and up
to 3.1 in a logit)."""

ROUNDED = Tolerance(graph=Bound(None, 0.25), pytorch=Bound(None, 1.0))
"""Of graphs in 16 bits whose activations are rounded by a step that all rows share (TensorRT's int8 and FP8)."""

DRAFT_MAX_KL = 4.0
"""Largest mean KL(target||draft): a draft may be poor, since the target decides, but a draft that
guesses no better than chance means that its graph is broken (ln 49152 is 10.8)."""


def tolerance_of(precision: str, *, compiled: bool) -> Tolerance:
    """The row of a graph: of its precision, or, compiled and with activations rounded to 8 bits, `ROUNDED`."""
    return ROUNDED if compiled and precision not in ("fp32", "fp16") else TOLERANCES[precision]
