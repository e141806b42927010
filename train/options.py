"""What a caller may ask of a training, checked when it is made."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from specedge.models import Dimensions
from specedge.models.medusa import HeadsConfig
from specedge.runtime.errors import UsageError
from specedge.train.settings import Settings

__all__ = ["SELF", "Progress", "TrainOptions"]

Progress = Callable[[str, int, int], None]
"""Told of the phase, and how much of it is done of how much in all."""

SELF = "self"
_SELF = re.compile(r"self(?::([1-9][0-9]{0,8}))?")
_SELF_TOKENS = 500_000
_FEWEST_LAYERS = 4
PRECISIONS = ("float16", "int8")


@dataclass(frozen=True)
class TrainOptions:
    """What to train, and on what.

    Attributes:
        data: Files of JSON lines, or "self" or "self:N": the target asks itself, a question for each 100 of N tokens.
        heads, width, blocks, vocabulary, rank: As in `HeadsConfig`; a rank means low-rank vocabulary matrices.
        chain: Whether heads read the token before the one they guess.
        inner: Whether they read inputs of inner layers (EAGLE-3's three, arXiv 2503.01840).
        own: Whether each head has a vocabulary matrix of its own.
        length: Most tokens of an answer.
        context: Most tokens of a prompt and its answer.
        temperatures: Each prompt is answered once at each.
        tokens: Enough answer tokens; None: every prompt is answered.
        rows: Folder for what the target gave, kept for the next training; None: beside the output.
        precision: Of the heads' file, "float16" or "int8".
        settings: How to train.
    """

    data: tuple[str, ...] = (SELF,)
    heads: int = 4
    width: int = 640
    blocks: int = 1
    vocabulary: int = 8192
    rank: int = 0
    chain: bool = True
    inner: bool = True
    own: bool = False
    length: int = 160
    context: int = 768
    temperatures: tuple[float, ...] = (0.0,)
    tokens: int | None = None
    rows: Path | None = None
    precision: str = "int8"
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        asked = [each for each in self.data if _SELF.fullmatch(each)]
        if not self.data or (asked and len(self.data) > 1):
            raise UsageError('data is "self" (or "self:N"), or one file or more: give one of the two')
        if self.own and self.rank:
            raise UsageError("heads have vocabulary matrices of their own, or low-rank ones: leave one out")
        if not self.width and (self.chain or self.inner):
            raise UsageError(
                "width is 0, the plain block: it reads neither tokens nor inner layers; add --no-chain --no-inner"
            )
        for name, low in (("length", 8), ("context", 16), ("width", 0), ("vocabulary", 0), ("rank", 0)):
            if getattr(self, name) < low:
                raise UsageError(f"{name} is {getattr(self, name)}: give {low} or more")
        if any(not 0 <= each <= 10 for each in self.temperatures) or not self.temperatures:
            raise UsageError(f"temperature is {self.temperatures}: give numbers from 0 to 10")
        if self.precision not in PRECISIONS:
            raise UsageError(f"precision is {self.precision!r}: choose one of {', '.join(PRECISIONS)}")
        if self.tokens is not None and self.tokens < 1:
            raise UsageError(f"tokens is {self.tokens}: give 1 or more")

    @property
    def self_tokens(self) -> int:
        """How many tokens the target shall answer to its own questions; 0: there is other data."""
        found = _SELF.fullmatch(self.data[0])
        return int(found[1] or _SELF_TOKENS) if found else 0

    def config(self, sizes: Dimensions) -> HeadsConfig:
        """The heads for a target.

        Raises:
            UsageError: It has no such heads.
        """
        taps = (2, sizes.layers // 2, sizes.layers - 3) if sizes.layers > 2 * _FEWEST_LAYERS else (sizes.layers // 2,)
        vocabulary = self.vocabulary if self.vocabulary < sizes.vocab_size else 0
        try:
            return HeadsConfig(
                heads=self.heads,
                hidden_size=sizes.hidden_size,
                vocab_size=sizes.vocab_size,
                blocks=self.blocks,
                width=self.width,
                chain=self.chain,
                taps=taps if self.inner else (),
                vocabulary=vocabulary,
                lm_head="lowrank" if self.rank else "own" if self.own else "shared",
                rank=self.rank,
            )
        except ValueError as error:
            raise UsageError(str(error)) from None
