"""Medusa heads: what they are, what their tensors are called, and which public layouts hold them.

Head k guesses the token k places behind the one that the target decides itself (Medusa, arXiv
2401.10774). In its plain form it reads the target's last hidden row h,

    z_k = h + SiLU(W h + b),   guess = vocabulary matrix z_k,

one or more such blocks. In the form that this project trains by default it is wider inside,

    z_k = z_(k-1) + W2 SiLU(W1 [norm(z_(k-1)), norm(e)] + b),   z_0 = h + F norm(inner rows),

and reads the embedding e of the token before the one it guesses: for head 1 that is the token that
the target has just decided, for head k what head k - 1 finds likeliest (sequential dependence as in
Hydra, arXiv 2402.05109, but all heads in one graph, along the likeliest guesses). Norms have no
weights: norm(x) = x / sqrt(mean(x^2) + 1e-6).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields

from specedge.runtime.errors import CheckpointError

__all__ = ["MOST_HEADS", "NORM_EPS", "HeadsConfig", "read_config", "tensor_shapes"]

NORM_EPS = 1e-6
MOST_HEADS = 16
_LISTED = 10
_LM_HEADS = ("shared", "own", "lowrank")


@dataclass(frozen=True)
class HeadsConfig:
    """What heads are made of.

    Attributes:
        heads: How many; head k guesses k places ahead.
        hidden_size: Width of the target's rows.
        vocab_size: Tokens of the target.
        blocks: Residual blocks of a head.
        width: Of a block inside; 0: the square block of the paper.
        chain: Each head reads the token before the one it guesses, and the state of the head before.
        taps: Layers of the target whose inputs the heads read as well.
        vocabulary: Guesses are among so many tokens, the most frequent; 0: all.
        lm_head: "shared": the target's vocabulary matrix; "own": one for each head; "lowrank": what each head adds
            to the shared one has this rank.
        rank: Of "lowrank".
    """

    heads: int
    hidden_size: int
    vocab_size: int
    blocks: int = 1
    width: int = 0
    chain: bool = False
    taps: tuple[int, ...] = ()
    vocabulary: int = 0
    lm_head: str = "shared"
    rank: int = 0

    def __post_init__(self) -> None:
        limits = {
            "heads": (1, MOST_HEADS),
            "hidden_size": (1, 1 << 20),
            "vocab_size": (1, 1 << 24),
            "blocks": (1, MOST_HEADS),
            "width": (0, 1 << 20),
            "vocabulary": (0, self.vocab_size),
            "rank": (0, self.hidden_size),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"{name} is {value!r}: give a whole number from {low} to {high}")
        if self.lm_head not in _LM_HEADS:
            raise ValueError(f"lm_head is {self.lm_head!r}: choose one of {', '.join(_LM_HEADS)}")
        if (self.lm_head == "lowrank") != bool(self.rank):
            raise ValueError("a rank goes with lm_head lowrank, and lowrank with a rank")
        if (self.chain or self.taps) and not self.width:
            raise ValueError("heads that read tokens or inner rows have a width")
        if any(type(tap) is not int or tap < 0 for tap in self.taps):
            raise ValueError(f"taps are {list(self.taps)}: give numbers of layers")

    @property
    def guesses(self) -> int:
        """Among how many tokens a head guesses."""
        return self.vocabulary or self.vocab_size

    @property
    def listed(self) -> int:
        """How many guesses of each head are given."""
        return min(_LISTED, self.guesses)

    def to_json(self) -> str:
        """For the metadata of a file of heads."""
        return json.dumps(asdict(self))


def read_config(text: str, where: str) -> HeadsConfig:
    """Reads what `HeadsConfig.to_json` wrote.

    Raises:
        CheckpointError: It is something else.
    """
    try:
        raw = json.loads(text)
        known = {item.name for item in fields(HeadsConfig)}
        if not isinstance(raw, dict) or set(raw) - known:
            raise ValueError("unknown keys")
        if not isinstance(raw.get("chain", False), bool) or not isinstance(raw.get("taps", []), list):
            raise ValueError("chain or taps of another type")
        return HeadsConfig(**{**raw, "taps": tuple(raw.get("taps", ()))})
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{where}: no description of heads ({error}); train them again") from None


def tensor_shapes(config: HeadsConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of every tensor of these heads, vocabulary ids excepted."""
    size, width = config.hidden_size, config.width
    if config.taps:
        yield "fuse.weight", (size, len(config.taps) * size)
    for head in range(config.heads):
        for block in range(config.blocks):
            prefix = f"heads.{head}.blocks.{block}"
            if not width:
                yield f"{prefix}.square.weight", (size, size)
                yield f"{prefix}.square.bias", (size,)
                continue
            inputs = size * (2 if config.chain and not block else 1)
            yield f"{prefix}.wide.weight", (width, inputs)
            yield f"{prefix}.wide.bias", (width,)
            yield f"{prefix}.narrow.weight", (size, width)
        if config.lm_head == "own":
            yield f"heads.{head}.lm_head.weight", (config.guesses, size)
        if config.lm_head == "lowrank":
            yield f"heads.{head}.lm_head.down", (config.rank, size)
            yield f"heads.{head}.lm_head.up", (config.guesses, config.rank)
