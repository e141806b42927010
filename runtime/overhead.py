"""What the loop adds to the graph: plain decoding against bare passes, and host time of a wide round."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from specedge.runtime.contracts import Context, Draft, Verdict
from specedge.runtime.costs import Costs
from specedge.runtime.director import Director
from specedge.runtime.drafters.guard import GuardedDrafter
from specedge.runtime.graph import Decoder
from specedge.runtime.loop import generate
from specedge.runtime.options import Options
from specedge.runtime.policy import Fixed
from specedge.runtime.sampler import NumpySampler
from specedge.runtime.stopping import StopRule
from specedge.runtime.verifiers import Greedy

if TYPE_CHECKING:
    from specedge.runtime.engine import Engine

__all__ = ["PAST", "WIDTH", "loop_cost"]

PAST = 256
WIDTH = 8
_ROUNDS = 64


class _Echo:
    """Proposes the tokens of an answer that is known, so that every round is a wide one."""

    name = "echo"

    def __init__(self, answer: Sequence[int]) -> None:
        self._answer = answer

    def propose(self, context: Context, budget: int) -> Draft:
        at = len(context.tokens)
        return Draft.chain(self._answer[at : at + budget])

    def observe(self, context: Context, verdict: Verdict) -> None:
        pass

    def rewind(self, length: int) -> None:
        pass


def loop_cost(engine: Engine) -> dict[str, Any] | None:
    """Measures the loop on an engine whose caches may be emptied.

    Bare passes and rounds of the loop take turns, one row each, from `PAST` tokens of past on; the
    bare pass runs the same session over the same bound buffers and looks at nothing.

    Returns:
        "bare_ms" and "loop_ms" of a token, "ratio" (the median of pairs), and "host_ms", what a
        greedy round of `WIDTH` rows takes beside drafting and the pass. None where the graph is
        not a speculative one or its cache is too small.
    """
    target = engine.target
    if not isinstance(target, Decoder) or target.capacity <= PAST + 3 * _ROUNDS:
        return None
    engine.reset()
    tokens = [index % target.spec.vocab_size for index in range(PAST)]
    bare: list[float] = []
    loop: list[float] = []
    for number, item in enumerate(_rounds(target, tokens, _Echo(()), 1, _ROUNDS)):
        if number < 2:
            continue
        loop.append(item)
        begun = perf_counter()
        target.repeat()
        bare.append(1e3 * (perf_counter() - begun))
    answer = list(tokens)
    engine.reset()
    wide = generate(target, _director(_Echo(answer), WIDTH - 1), Greedy(), _sampler(), answer[:PAST], _stop(_ROUNDS))
    hosts = [item.host_ms for item in wide if not item.prefill and len(item.draft.tokens) == WIDTH - 1]
    engine.reset()
    return {
        "bare_ms": round(median(bare), 3),
        "loop_ms": round(median(loop), 3),
        "ratio": round(median(one / other for one, other in zip(loop, bare, strict=True)), 4),
        "host_ms": round(median(hosts), 3) if hosts else None,
    }


def _rounds(target: Decoder, tokens: list[int], drafter: _Echo, length: int, count: int) -> Any:
    """Times of a loop's rounds, as its caller sees them, milliseconds."""
    running = generate(target, _director(drafter, length), Greedy(), _sampler(), tokens, _stop(count))
    while True:
        begun = perf_counter()
        if next(running, None) is None:
            return
        yield 1e3 * (perf_counter() - begun)


def _director(drafter: _Echo, length: int) -> Director:
    """One drafter at one length, as a reply with a fixed policy has it."""
    return Director({drafter.name: GuardedDrafter(drafter)}, Fixed(drafter.name, length), Costs({1: 1.0}, {}))


def _sampler() -> NumpySampler:
    return NumpySampler(Options(), PAST, 0)


def _stop(count: int) -> StopRule:
    return StopRule((), count, lambda token: ("", False))
