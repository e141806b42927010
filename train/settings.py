"""How heads are trained."""

from __future__ import annotations

from dataclasses import dataclass

from specedge.runtime.errors import UsageError

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """How to train.

    Attributes:
        epochs: Times that each row is trained on.
        segments: Pieces of answers, of 32 rows each, in a step and process.
        learning_rate: Of AdamW, at its highest.
        weight_decay: Of AdamW.
        decay: Lambda: head k weighs decay^k.
        seed: Of the first values and of the order.
        soft: How much of the loss is the cross-entropy against the target's law in place of its token.
        dropout: Share of what a block reads, and of its inside, that is left out in a step.
        gradient_checkpointing: Logits are computed twice in place of being kept.
    """

    epochs: float = 4.0
    segments: int = 16
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    decay: float = 0.8
    soft: float = 0.5
    dropout: float = 0.1
    seed: int = 0
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.epochs <= 1000:
            raise UsageError(f"epochs is {self.epochs}: give a number above 0")
        if self.segments < 1:
            raise UsageError(f"batch is {self.segments}: give 1 or more")
        if not 0 <= self.soft <= 1:
            raise UsageError(f"soft is {self.soft}: give a number from 0 to 1")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"dropout is {self.dropout}: give a number from 0 to below 1")
        if not 0 <= self.seed < 1 << 31:
            raise UsageError(f"seed is {self.seed}: give a whole number from 0 to {(1 << 31) - 1}")
        for name in ("learning_rate", "decay"):
            if not 0 < getattr(self, name) <= 1:
                raise UsageError(f"{name} is {getattr(self, name)}: give a number above 0, at most 1")
