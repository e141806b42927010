"""How drafters fare on prompts: each alone, at one draft length, every round on record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from specedge.runtime.contracts import Round, Verifier
from specedge.runtime.costs import Costs
from specedge.runtime.director import Director
from specedge.runtime.drafters.guard import GuardedDrafter
from specedge.runtime.drafters.registry import LOOKUP
from specedge.runtime.engine import Engine
from specedge.runtime.loop import generate
from specedge.runtime.options import Options
from specedge.runtime.policy import Fixed, Plan, View
from specedge.runtime.sampler import NumpySampler
from specedge.runtime.stopping import StopRule
from specedge.runtime.verifiers import Greedy

__all__ = ["Survey", "survey"]

_MOST_MATCH = 4


@dataclass
class Survey:
    """Rounds of one method.

    Attributes:
        rounds: All but those that run a prompt, with how many tokens prompt lookup had found again before each.
        ms: What they took.
        tokens: What they committed.
    """

    rounds: list[tuple[int, Round]] = field(default_factory=list)
    ms: float = 0.0
    tokens: int = 0

    @property
    def ms_per_token(self) -> float:
        """Milliseconds a committed token."""
        return self.ms / max(self.tokens, 1)

    def draft_times(self) -> list[tuple[int, float]]:
        """Tokens and milliseconds of every draft."""
        return [(len(each.draft.tokens), each.draft_ms) for _, each in self.rounds if each.draft.tokens]

    def shares(self, matched: Collection[int] | None = None) -> tuple[float, ...]:
        """Share of nodes that stood, by depth, where all before them did.

        Args:
            matched: Only rounds in which lookup had found one of these numbers of tokens; None: all.
        """
        tested: list[int] = []
        stood: list[int] = []
        for found, each in self.rounds:
            if (matched is not None and found not in matched) or each.finish is not None:
                continue
            for depth in range(min(len(each.draft.tokens), each.accepted + 1)):
                if depth == len(tested):
                    tested.append(0)
                    stood.append(0)
                tested[depth] += 1
                stood[depth] += depth < each.accepted
        # A depth that few rounds reached is drawn towards the others, so that it promises no certainty.
        pooled = (sum(stood) + 1) / (sum(tested) + 2)
        return tuple((right + pooled) / (of + 1) for right, of in zip(stood, tested, strict=True))

    def matches(self) -> dict[int, float]:
        """Share of rounds by how many tokens lookup had found."""
        return {found: count / len(self.rounds) for found, count in sorted(Counter(m for m, _ in self.rounds).items())}

    @property
    def drafted(self) -> float:
        """Share of rounds that had a draft."""
        return sum(bool(each.draft.tokens) for _, each in self.rounds) / max(len(self.rounds), 1)


class _Recorder(Fixed):
    """A fixed length, with lookup asked beside it where that is open."""

    def __init__(self, method: str, length: int, peeks: Sequence[str], into: Survey) -> None:
        super().__init__(method, length)
        self.peeks = peeks
        self._into, self._matched = into, 0

    def plan(self, view: View) -> Plan:
        """See `policy.Policy`."""
        self._matched = min(view.matched, _MOST_MATCH)
        return super().plan(view)

    def record(self, plan: Plan, outcome: Round) -> None:
        """See `policy.Policy`."""
        self._into.rounds.append((self._matched, outcome))
        self._into.ms += outcome.draft_ms + outcome.verify_ms + outcome.host_ms
        self._into.tokens += len(outcome.tokens)


def survey(
    engine: Engine,
    method: str,
    length: int,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    options: Options | None = None,
    verifier: Verifier | None = None,
    into: Survey | None = None,
) -> Survey:
    """Answers prompts by one method.

    Args:
        engine: Its replies are ended and its caches emptied.
        method, length: As `Fixed` takes them.
        prompts: Token ids.
        tokens: Most tokens of an answer.
        options: Of sampling; None: greedy.
        verifier: None: greedy.
        into: A survey to go on with.
    """
    into = Survey() if into is None else into
    options = options or Options(method=method)
    peeks = (LOOKUP,) if method != LOOKUP and LOOKUP in engine.methods else ()
    drafters = {name: engine.drafting.drafter(name) for name in (method, *peeks)}
    for ids in prompts:
        engine.reset()
        director = Director(
            {name: GuardedDrafter(drafter) for name, drafter in drafters.items()},
            _Recorder(method, length, (*peeks, *([LOOKUP] if method == LOOKUP else [])), into),
            Costs({1: 1.0}, {}),
        )
        stop = StopRule(engine.manifest.eos_token_ids, tokens, lambda token: ("", False))
        sampler = NumpySampler(options, len(ids), 0)
        for _ in generate(engine.target, director, verifier or Greedy(), sampler, list(ids), stop):
            pass
        engine.reset()
    return into
