"""What a reply yields: tokens while it streams, notices of what went wrong, one finish at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Event", "Finish", "FinishReason", "Notice", "Origin", "Stats", "Token"]

Origin = Literal["draft", "correction", "bonus"]
FinishReason = Literal["stop", "length", "deadline", "cancelled"]


@dataclass(frozen=True)
class Token:
    """One committed token.

    Attributes:
        id: The token id.
        text: Text that became visible with it; may be empty (half of a character, a special token,
            a possible start of a stop string) and may hold what earlier tokens left open.
        origin: "draft": proposed and accepted; "correction": the target's own after a rejected
            draft node; "bonus": the target's own after everything drafted stood (or nothing was drafted).
    """

    id: int
    text: str
    origin: Origin


@dataclass(frozen=True)
class Notice:
    """Something happened to a drafter that leaves the reply as it is: it failed, or its acceptance fell.

    Attributes:
        text: What, and what follows, in one line.
    """

    text: str


@dataclass(frozen=True)
class Stats:
    """Statistics of one reply. Decoding excludes the first pass, which runs the prompt and gives the first token.

    Attributes:
        method: "auto", "none", "draft:NAME", "medusa", "medusa:2x3", "medusa+ngram" or "ngram".
        lossless: Whether the output has the target's own law.
        prompt_tokens: Length of the prompt.
        cached_tokens: How many of them were in the cache already.
        tokens: Tokens in the reply, an end-of-text token included.
        passes: Target passes of decoding.
        proposed, evaluated, accepted: Draft nodes proposed, tested, accepted and visible.
        ttft_ms: From the call to the first token.
        prefill_ms: The first target pass.
        decode_ms: From the first token to the last.
        draft_ms, verify_ms, host_ms: Where `decode_ms` went: drafting, target passes, everything else.
        peak_memory_bytes: Peak resident memory of the process.
        corrected, bonus: Rounds that ended with the target's own token in place of a rejected node; behind
            nodes that all stood, or where nothing was drafted.
        depths: For each depth of a draft how many rounds tested a node there, and in how many one stood.
        rounds: For each method that drafted, "none" for plain rounds, how many rounds.
        step_ms: Median, 95th and 99th percentile of the milliseconds between visible tokens, which is a round's.
        baseline_ms: Median of a plain round, where some were made to measure it.
        forecast: Expected speed-up over plain decoding, where a policy expects something.
        notes: What went wrong on the way without changing the reply, e.g. a drafter that failed.
    """

    method: str
    lossless: bool
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    passes: int
    proposed: int
    evaluated: int
    accepted: int
    ttft_ms: float
    prefill_ms: float
    decode_ms: float
    draft_ms: float
    verify_ms: float
    host_ms: float
    peak_memory_bytes: int
    corrected: int = 0
    bonus: int = 0
    depths: tuple[tuple[int, int], ...] = ()
    rounds: Mapping[str, int] = field(default_factory=dict)
    step_ms: tuple[float, float, float] | None = None
    baseline_ms: float | None = None
    forecast: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def discarded(self) -> int:
        """Draft nodes that did not stand, tested or not."""
        return self.proposed - self.accepted

    @property
    def speedup(self) -> float | None:
        """Over plain decoding as measured in this very reply; None where it was not."""
        if self.baseline_ms is None or not self.decoded or not self.decode_ms:
            return None
        return self.baseline_ms / (self.decode_ms / self.decoded)

    @property
    def decoded(self) -> int:
        """Tokens committed after the first."""
        return max(self.tokens - 1, 0)

    @property
    def tau(self) -> float | None:
        """Committed tokens per target pass, bonus included; None before a second token."""
        return self.decoded / self.passes if self.passes else None

    @property
    def alpha(self) -> float | None:
        """Accepted / evaluated; None where nothing was drafted."""
        return self.accepted / self.evaluated if self.evaluated else None

    @property
    def tokens_per_second(self) -> float | None:
        """Decoding speed."""
        return 1e3 * self.decoded / self.decode_ms if self.decode_ms and self.decoded else None


@dataclass(frozen=True)
class Finish:
    """The end of a reply.

    Attributes:
        reason: "stop" (end-of-text token or stop text), "length" (max_tokens or context full), "deadline",
            "cancelled".
        text: The whole visible text.
        prompt_ids: The prompt.
        ids: Tokens of the reply, an end-of-text token included.
        stats: Statistics.
    """

    reason: FinishReason
    text: str
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    stats: Stats = field(repr=False)


Event = Token | Notice | Finish
