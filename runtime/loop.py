"""The loop: draft, verify, commit. Everything else of the runtime serves these lines."""

from __future__ import annotations

from collections.abc import Generator
from time import perf_counter
from typing import Protocol

from specedge.runtime.contracts import EMPTY_DRAFT, Context, Director, Draft, Round, Rows, Sampler, Target, Verifier
from specedge.runtime.stats import trim

__all__ = ["PIECE", "Stop", "generate"]

PIECE = 256
"""Most tokens of a prompt in one pass."""


class Stop(Protocol):
    """Decides where a reply ends."""

    def room(self) -> int:
        """How many more tokens the reply may have; at least 1 while it goes on."""
        ...

    def cut(self, tokens: list[int]) -> tuple[int, str | None]:
        """How many of a round's tokens stay, and why the reply ends with them (None: it goes on)."""
        ...

    def over(self) -> bool:
        """Whether there is no time for another pass."""
        ...


def generate(
    target: Target,
    director: Director,
    verifier: Verifier,
    sampler: Sampler,
    tokens: list[int],
    stop: Stop,
    piece: int = PIECE,
) -> Generator[Round, None, None]:
    """Extends `tokens` in place, a round at a time, with text that has the verifier's law.

    The cache holds every committed token but the newest, so a round always runs what the cache lacks, then
    the draft. The prompt is no special case: it is what the first round's cache lacks, a piece at a time.

    Args:
        target: The model; its cache holds a prefix of `tokens`.
        director: Proposes; its drafters too may know a prefix of `tokens`, or nothing.
        verifier, sampler: Decide, and draw.
        tokens: All committed tokens, at least one.
        stop: Cuts each round's tokens before any bookkeeping, and calls time.
        piece: Most tokens of a prompt in one pass.

    Yields:
        Each round after it is committed: closing the generator leaves nothing half done.
    """
    rows: Rows | None = None
    finish: str | None = None
    started = perf_counter()
    _run_pieces(target, tokens, stop, piece)
    while finish is None and not stop.over():
        context = Context(tokens, rows, sampler)
        most = min(stop.room() - 1, target.capacity - len(tokens))
        draft = director.propose(context, most) if rows is not None and most > 0 else EMPTY_DRAFT
        drafted = perf_counter() if rows is not None else started
        passed = target.forward(tokens[target.length :], draft)
        verified = perf_counter()
        verdict = verifier.judge(draft, passed.logits, context)
        proposed = [*(draft.tokens[node] for node in verdict.path), verdict.token]
        kept, finish = stop.cut(proposed)
        target.commit(verdict.path[: kept - 1])
        tokens.extend(proposed[:kept])
        rows = _keep(passed, verdict.path[: kept - 1])
        director.rewind(len(tokens) - 1)
        director.observe(Context(tokens, rows, sampler), verdict)

        outcome = Round(
            tokens=tuple(proposed),
            accepted=len(verdict.path),
            draft=draft,
            evaluated=verdict.evaluated,
            corrected=_rejected(draft, verdict.path),
            draft_ms=1e3 * (drafted - started),
            verify_ms=1e3 * (verified - drafted),
            host_ms=1e3 * (perf_counter() - verified),
            prefill=context.rows is None,
            finish=finish,
        )
        director.record(outcome := trim(outcome, kept))
        yield outcome
        started = perf_counter()


def _run_pieces(target: Target, tokens: list[int], stop: Stop, piece: int) -> None:
    """Runs all but the last piece of a long prompt; between pieces time can be called."""
    while len(tokens) - target.length > piece and not stop.over():
        target.forward(tokens[target.length : target.length + piece])


def _keep(rows: Rows, path: tuple[int, ...]) -> Rows:
    """Rows of the newest committed token and the accepted path. A chain's are a view."""
    index: slice | list[int] = [0, *(node + 1 for node in path)]
    if path == tuple(range(len(path))):
        index = slice(0, len(path) + 1)
    hidden, inner = (None if part is None else part[index] for part in (rows.hidden, rows.inner))
    return Rows(rows.logits[index], hidden, inner)


def _rejected(draft: Draft, path: tuple[int, ...]) -> bool:
    """Whether a drafted node stood where the target put a token of its own."""
    return (path[-1] if path else -1) in draft.parents
