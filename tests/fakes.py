"""Models, drafters and samplers small enough to reason about.

`FakeTarget` keeps its cache as a list of tokens and refuses every misuse of the contract.
`outcomes` runs a function once for every way its random decisions can fall, in Fractions.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any

import numpy as np

from specedge.runtime.contracts import EMPTY_DRAFT, Context, Draft, Drafter, Floats, Law, Round, Rows, Verdict
from specedge.runtime.costs import Costs
from specedge.runtime.director import Director
from specedge.runtime.drafters.guard import GuardedDrafter
from specedge.runtime.policy import Fixed, Plan, View

__all__ = [
    "Anything",
    "BrokenDrafter",
    "FakeTarget",
    "FunctionDrafter",
    "GridSampler",
    "LawOf",
    "LogitsOf",
    "ReplaySampler",
    "directing",
    "fuzzy",
    "outcomes",
    "random_tree",
    "toy_law",
    "toy_logits",
]

LogitsOf = Callable[[tuple[int, ...]], Floats]
LawOf = Callable[[tuple[int, ...]], Law]


# ---- laws -----------------------------------------------------------------------------------


def toy_law(vocab: int, seed: int = 0, order: int = 2, denominator: int = 0) -> LawOf:
    """A random law of Fractions that depends on the last `order` tokens; some tokens have none.

    Args:
        vocab: Tokens.
        seed: Two laws with different seeds differ.
        order: How far back it looks.
        denominator: Every probability is a multiple of 1 / denominator; 0: any.
    """

    @cache
    def law_of(tail: tuple[int, ...]) -> Law:
        rng = random.Random(f"{vocab} {seed} {tail}")
        weights = [rng.choice((0, 1, 2, 3, 5)) for _ in range(vocab)]
        weights[rng.randrange(vocab)] += 1
        if denominator:
            weights = [0] * vocab
            for _ in range(denominator):
                weights[rng.randrange(vocab)] += 1
        return np.array([Fraction(weight, sum(weights)) for weight in weights], dtype=object)

    return lambda prefix: law_of(tuple(prefix[-order:])).copy()


def toy_logits(law_of: LawOf) -> LogitsOf:
    """Logits whose softmax is a law."""

    def logits_of(prefix: tuple[int, ...]) -> Floats:
        with np.errstate(divide="ignore"):
            return np.log(law_of(prefix).astype(np.float64)).astype(np.float32)

    return logits_of


def fuzzy(vocab: int, seed: int = 0, order: int = 3, like: LogitsOf | None = None, noise: float = 2.0) -> LogitsOf:
    """Random float logits of the last `order` tokens; with `like`, those logits plus noise (a draft of them)."""

    @lru_cache(maxsize=4096)
    def logits_of(tail: tuple[int, ...]) -> Floats:
        rng = np.random.default_rng([vocab, seed, *tail])
        return (noise * rng.standard_normal(vocab)).astype(np.float32)

    def result(prefix: tuple[int, ...]) -> Floats:
        own = logits_of(tuple(prefix[-order:]))
        return own.copy() if like is None else like(prefix) + own

    return result


# ---- a model --------------------------------------------------------------------------------


class FakeTarget:
    """A `contracts.Target` over a function from prefixes to logits. Misuse is an AssertionError.

    Attributes:
        tokens: What the cache holds.
        passes: Passes run so far.
        largest: Most rows the cache ever held or was asked to.
    """

    def __init__(self, logits_of: LogitsOf, vocab: int, capacity: int = 256) -> None:
        self.tokens: list[int] = []
        self.passes = 0
        self.largest = 0
        self._logits_of = logits_of
        self._vocab = vocab
        self._capacity = capacity
        self._draft: Draft | None = None

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def capacity(self) -> int:
        return self._capacity

    def forward(self, pending: Sequence[int], draft: Draft = EMPTY_DRAFT) -> Rows:
        assert len(pending) > 0, "a pass needs a pending token"
        assert all(0 <= token < self._vocab for token in (*pending, *draft.tokens)), "token outside the vocabulary"
        self.largest = max(self.largest, self.length + len(pending) + len(draft.tokens))
        assert self.largest <= self._capacity, f"{self.largest} rows in a cache of {self._capacity}"
        self.passes += 1
        self.tokens.extend(pending)
        self._draft = draft
        prefixes = [tuple(self.tokens)]
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            prefixes.append((*prefixes[parent + 1], token))
        logits = np.stack([self._logits_of(prefix) for prefix in prefixes]).astype(np.float32)
        assert logits.shape == (1 + len(draft.tokens), self._vocab)
        return Rows(logits)

    def commit(self, path: Sequence[int]) -> None:
        assert self._draft is not None, "commit without a pass before it"
        parent = -1
        for node in path:
            assert self._draft.parents[node] == parent, f"{tuple(path)} is no path of {self._draft.parents}"
            self.tokens.append(self._draft.tokens[node])
            parent = node
        self._draft = None

    def rewind(self, length: int) -> None:
        assert 0 <= length <= self.length, f"rewind to {length} of {self.length}"
        del self.tokens[length:]
        self._draft = None


# ---- drafters -------------------------------------------------------------------------------


class FunctionDrafter:
    """Proposes what a function of the committed tokens and the budget says."""

    def __init__(self, function: Callable[[Sequence[int], int], Draft], name: str = "function") -> None:
        self.name = name
        self.observed: list[tuple[tuple[int, ...], Verdict]] = []
        self.rewound: list[int] = []
        self._function = function

    def propose(self, context: Context, budget: int) -> Draft:
        return self._function(context.tokens, budget)

    def observe(self, context: Context, verdict: Verdict) -> None:
        self.observed.append((tuple(context.tokens), verdict))

    def rewind(self, length: int) -> None:
        self.rewound.append(length)


class BrokenDrafter:
    """Drafts token 0 until it fails, in round `after`, in one of these ways."""

    WAYS = ("raise", "memory", "nan", "vocabulary", "negative", "budget", "shape", "type", "observe", "rewind")

    def __init__(self, way: str, after: int = 0) -> None:
        assert way in self.WAYS
        self.name = f"broken-{way}"
        self.calls = 0
        self._way = way
        self._after = after

    def propose(self, context: Context, budget: int) -> Draft:
        self.calls += 1
        if self.calls <= self._after:
            return Draft.chain([0] * budget)
        nodes = max(budget, 1)
        vocab = 4
        if self._way == "raise":
            raise RuntimeError("the drafter broke\nin two lines")
        if self._way == "memory":
            raise MemoryError
        if self._way == "type":
            return None  # type: ignore[return-value]
        probs = {"nan": np.full((nodes, vocab), np.nan), "shape": np.full((nodes + 1, vocab), 0.25)}.get(self._way)
        tokens = {"vocabulary": [10**6], "negative": [-1], "budget": [0] * (budget + 1)}.get(self._way, [0] * nodes)
        return Draft.chain(tokens, probs)

    def observe(self, context: Context, verdict: Verdict) -> None:
        if self._way == "observe" and self.calls > self._after:
            raise RuntimeError("observe broke")

    def rewind(self, length: int) -> None:
        if self._way == "rewind" and self.calls > self._after:
            raise RuntimeError("rewind broke")


def random_tree(rng: random.Random, nodes: int, vocab: int) -> Draft:
    """A deterministic tree of any shape; siblings have different tokens."""
    parents: list[int] = []
    tokens: list[int] = []
    while len(tokens) < nodes:
        parent = rng.randrange(-1, len(tokens))
        taken = {token for token, its in zip(tokens, parents, strict=True) if its == parent}
        if len(taken) < vocab:
            parents.append(parent)
            tokens.append(rng.choice([token for token in range(vocab) if token not in taken]))
    return Draft(tuple(tokens), tuple(parents))


# ---- every outcome --------------------------------------------------------------------------


class ReplaySampler:
    """A `contracts.Sampler` whose rows are laws already, and whose decisions are played from a list.

    Past the end of the list every decision takes its first option. `outcomes` then moves on to
    the next leaf of the tree of decisions.
    """

    def __init__(self, script: Sequence[int] = ()) -> None:
        self.weight = Fraction(1)
        self.choices: list[int] = []
        self.options: list[int] = []
        self._script = script

    def law(self, logits: Law, prefix: Sequence[int]) -> Law:
        return logits.copy()

    def token(self, logits: Law, prefix: Sequence[int]) -> int:
        return self.draw(self.law(logits, prefix), len(prefix))

    def draw(self, law: Law, position: int, stream: int = 0) -> int:
        assert sum(law) == 1, f"a law sums to {sum(law)}"
        return self._decide([(token, chance) for token, chance in enumerate(law) if chance > 0])

    def accept(self, probability: Any, position: int, trial: int = 0) -> bool:
        assert 0 <= probability <= 1
        both = ((True, Fraction(probability)), (False, 1 - Fraction(probability)))
        return self._decide([option for option in both if option[1] > 0])

    def _decide(self, options: Sequence[tuple[Any, Fraction]]) -> Any:
        turn = len(self.choices)
        choice = self._script[turn] if turn < len(self._script) else 0
        self.choices.append(choice)
        self.options.append(len(options))
        value, chance = options[choice]
        self.weight *= chance
        return value


class GridSampler(ReplaySampler):
    """Draws of stream 0 invert the law's distribution function at one of `cells` equally likely points.

    A point belongs to its position, so whoever draws there again, from whatever law, gets the
    same one: this is how a draft that shares the target's random numbers is enumerated.
    """

    def __init__(self, script: Sequence[int], cells: int) -> None:
        super().__init__(script)
        self._cells = cells
        self._points: dict[int, int] = {}

    def draw(self, law: Law, position: int, stream: int = 0) -> int:
        if stream != 0:
            return super().draw(law, position, stream)
        if position not in self._points:
            self._points[position] = self._decide([(cell, Fraction(1, self._cells)) for cell in range(self._cells)])
        counts = [chance * self._cells for chance in law]
        assert sum(counts) == self._cells and all(count.denominator == 1 for count in counts)
        table = [token for token, count in enumerate(counts) for _ in range(int(count))]
        return table[self._points[position]]


def outcomes(
    run: Callable[[ReplaySampler], Any], sampler: Callable[[Sequence[int]], ReplaySampler] = ReplaySampler
) -> dict[Any, Fraction]:
    """The exact law of what `run` returns, over every way its decisions can fall."""
    law: dict[Any, Fraction] = {}
    script: list[int] | None = []
    while script is not None:
        replay = sampler(script)
        value = run(replay)
        law[value] = law.get(value, Fraction(0)) + replay.weight
        choices, options = replay.choices, replay.options
        while choices and choices[-1] == options[-1] - 1:
            choices.pop()
            options.pop()
        script = [*choices[:-1], choices[-1] + 1] if choices else None
    assert sum(law.values()) == 1
    return law


def directing(drafter: Drafter, length: int) -> Director:
    """A director of one drafter at one draft length, as a reply with a fixed policy has it."""
    guard = drafter if isinstance(drafter, GuardedDrafter) else GuardedDrafter(drafter)
    return Director({guard.name: guard}, Fixed(guard.name, length), Costs({1: 1.0}, {}))


class Anything:
    """A policy that asks anyone for anything, and keeps what became of it."""

    def __init__(self, names: Sequence[str], seed: Any, peeks: Sequence[str] = ()) -> None:
        self._names, self._rng, self.peeks = names, random.Random(seed), peeks
        self.recorded: list[tuple[Plan, Round]] = []

    def begin(self) -> None:
        pass

    def plan(self, view: View) -> Plan:
        assert set(view.ready) <= set(self._names)
        return Plan(self._rng.choice([*self._names, "none", "nobody"]), self._rng.randint(0, 12))

    def record(self, plan: Plan, outcome: Round) -> None:
        self.recorded.append((plan, outcome))
