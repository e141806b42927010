from __future__ import annotations

import logging
import random
import timeit

import numpy as np
import pytest

from specedge.runtime.contracts import EMPTY_DRAFT, Context, Draft, Drafter, Rows, Verdict, Verifier
from specedge.runtime.drafters.guard import GuardedDrafter
from specedge.runtime.drafters.model import ModelDrafter
from specedge.runtime.drafters.ngram import NgramDrafter
from specedge.runtime.options import Options
from specedge.runtime.sampler import NumpySampler
from specedge.runtime.verifiers import Exact, Greedy, Rejection
from specedge.tests.fakes import BrokenDrafter, FakeTarget, FunctionDrafter, LogitsOf, fuzzy

VOCAB = 8
NO_VERDICT = Verdict((), 0, 0)
TARGET = fuzzy(VOCAB, 1, order=2)
DRAFT = fuzzy(VOCAB, 2, like=TARGET, noise=0.7)


def context(tokens: list[int], options: Options | None = None, vocab: int = VOCAB) -> Context:
    return Context(tokens, Rows(np.zeros((1, vocab), np.float32)), NumpySampler(options or Options(), 2, 5))


def decode(
    drafter: Drafter,
    verifier: Verifier,
    options: Options,
    draft_length: int,
    count: int = 60,
    logits_of: LogitsOf = TARGET,
    seed: int = 5,
) -> tuple[list[int], int]:
    """A loop of the contract's own words. Returns the reply and how many drafted nodes stood."""
    target, sampler, tokens = FakeTarget(logits_of, VOCAB), NumpySampler(options, 2, seed), [1, 2]
    rows, accepted = None, 0
    while len(tokens) < count + 2:
        before = Context(tokens, rows, sampler)
        draft = drafter.propose(before, draft_length) if rows is not None and draft_length else EMPTY_DRAFT
        passed = target.forward(tokens[target.length :], draft)
        verdict = verifier.judge(draft, passed.logits, before)
        target.commit(verdict.path)
        tokens += [*(draft.tokens[node] for node in verdict.path), verdict.token]
        assert target.tokens == tokens[:-1]
        rows = Rows(passed.logits[[0, *(node + 1 for node in verdict.path)]])
        drafter.rewind(len(tokens) - 1)
        drafter.observe(Context(tokens, rows, sampler), verdict)
        accepted += len(verdict.path)
    return tokens[2 : count + 2], accepted


# ---- prompt lookup --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "budget", "expected"),
    [
        ([], 4, []),
        ([1], 4, []),
        ([1, 2, 3], 4, []),
        ([1, 2, 3, 1], 4, [2, 3, 1]),
        ([1, 2, 3, 1], 2, [2, 3]),
        ([1, 2, 3, 1], 0, []),
        ([5, 1, 2, 7, 7, 7, 2, 8, 8, 8, 1, 2], 3, [7, 7, 7]),  # the longest suffix before the latest match
        ([1, 4, 4, 4, 1, 5, 5, 5, 1], 3, [5, 5, 5]),  # the latest of two
        ([1, 4, 4, 4, 1, 5, 1], 3, [4, 4, 4]),  # unless too little follows it
        ([6, 6, 6, 6], 3, [6]),
    ],
)
def test_ngram(tokens: list[int], budget: int, expected: list[int]) -> None:
    assert NgramDrafter().propose(context(tokens), budget) == Draft.chain(expected)


def test_ngram_sizes() -> None:
    tokens = [1, 2, 9, 9, 2]
    assert NgramDrafter(3, 2).propose(context(tokens), 2) == EMPTY_DRAFT
    assert NgramDrafter(3, 1).propose(context(tokens), 2) == Draft.chain([9, 9])
    with pytest.raises(ValueError, match="no range"):
        NgramDrafter(1, 2)


@pytest.mark.parametrize("seed", range(10))
def test_ngram_after_any_history_drafts_like_a_new_one(seed: int) -> None:
    rng, drafter, tokens = random.Random(seed), NgramDrafter(), [0]
    for _ in range(200):
        if rng.random() < 0.3:
            del tokens[rng.randrange(1, len(tokens) + 1) :]
            drafter.rewind(len(tokens))
        tokens += [rng.randrange(3) for _ in range(rng.randrange(5))]
        if rng.random() < 0.5:
            drafter.observe(context(tokens), NO_VERDICT)
        budget = rng.randrange(6)
        draft = drafter.propose(context(tokens), budget)
        assert len(draft.tokens) <= budget
        assert draft == NgramDrafter().propose(context(tokens), budget)
        tokens.append(rng.randrange(3))


def test_ngram_costs_a_token_the_same_in_a_long_text() -> None:
    drafter, tokens = NgramDrafter(), [token % 97 for token in range(20_000)]
    drafter.propose(context(tokens), 4)

    def step() -> None:
        tokens.append(len(tokens) % 97)
        drafter.propose(context(tokens), 4)

    now = context(tokens)
    assert now.tokens is tokens
    assert min(timeit.repeat(step, number=1, repeat=200)) < 1e-3


# ---- a draft model --------------------------------------------------------------------------


def test_model_catches_up_in_one_pass_and_keeps_accepted_rows() -> None:
    model = FakeTarget(DRAFT, VOCAB)
    drafter = ModelDrafter("draft:fake", model)
    tokens = [1, 2, 3, 4, 5]
    draft = drafter.propose(context(tokens), 4)
    assert (model.passes, model.tokens) == (4, [*tokens, *draft.tokens[:3]])
    tokens += [draft.tokens[0], draft.tokens[1], (draft.tokens[2] + 1) % VOCAB]
    drafter.observe(context(tokens), Verdict((0, 1), tokens[-1], 3))
    assert model.tokens == tokens[:-1]
    drafter.propose(context(tokens), 1)
    assert (model.passes, model.tokens) == (5, tokens)


def test_model_keeps_all_rows_when_all_are_accepted() -> None:
    model = FakeTarget(DRAFT, VOCAB)
    drafter = ModelDrafter("draft:fake", model)
    tokens = [1, 2, 3]
    tokens += [*drafter.propose(context(tokens), 4).tokens, 6]
    drafter.observe(context(tokens), NO_VERDICT)
    assert model.tokens == tokens[:-2]  # its last token was drafted, not run
    drafter.propose(context(tokens), 1)
    assert (model.passes, model.tokens) == (5, tokens)


@pytest.mark.parametrize("rewind_first", [True, False])
def test_model_follows_a_text_that_was_cut_and_went_another_way(rewind_first: bool) -> None:
    model = FakeTarget(DRAFT, VOCAB)
    drafter = ModelDrafter("draft:fake", model)
    tokens = [1, 2, 3]
    drafted = drafter.propose(context(tokens), 4).tokens
    tokens = [1, 2, 3, drafted[0], (drafted[1] + 1) % VOCAB]
    if rewind_first:
        drafter.rewind(len(tokens) - 1)
    drafter.observe(context(tokens), NO_VERDICT)
    assert model.tokens == tokens[:-1]
    drafter.rewind(2)
    assert model.tokens == [1, 2]
    tokens = [1, 2, 7]
    drafter.propose(context(tokens), 2)
    assert model.tokens[:3] == tokens


@pytest.mark.parametrize(
    ("length", "budget", "nodes"), [(6, 4, 4), (7, 4, 4), (8, 4, 3), (10, 4, 1), (11, 4, 0), (12, 4, 0)]
)
def test_model_never_runs_past_its_capacity(length: int, budget: int, nodes: int) -> None:
    model = FakeTarget(DRAFT, VOCAB, capacity=10)
    drafter = ModelDrafter("draft:fake", model)
    assert len(drafter.propose(context([1] * length), budget).tokens) == nodes
    assert model.largest <= 10


def test_model_with_a_padded_vocabulary_drafts_only_tokens_of_the_target() -> None:
    wide = fuzzy(VOCAB + 8, 3)
    for sample in (False, True):
        drafter = ModelDrafter("draft:fake", FakeTarget(wide, VOCAB + 8), sample=sample)
        for start in range(8):
            drafter.rewind(0)
            draft = drafter.propose(context([1, start], Options(temperature=2.0)), 8)
            assert max(draft.tokens) < VOCAB


def test_model_drafts_with_the_laws_it_reports() -> None:
    options = Options(temperature=0.7, top_k=3, repetition_penalty=1.3)
    drafter = ModelDrafter("draft:fake", FakeTarget(DRAFT, VOCAB), sample=True)
    now = context([1, 2, 3], options)
    draft = drafter.propose(now, 5)
    assert draft.probs is not None and draft.probs.shape == (5, VOCAB)
    prefix = [1, 2, 3]
    for token, law in zip(draft.tokens, draft.probs, strict=True):
        assert np.array_equal(law, now.sampler.law(DRAFT(tuple(prefix)), prefix))
        assert token == now.sampler.draw(law, len(prefix), stream=1)
        prefix.append(token)


def test_a_model_that_is_the_target_is_always_right() -> None:
    """Penalties, filters and random numbers are the target's own, so nothing is rejected."""
    for options in (Options(repetition_penalty=1.3, no_repeat_ngram=4), Options(temperature=1.0, top_p=0.9)):
        drafter = ModelDrafter("draft:fake", FakeTarget(TARGET, VOCAB))
        _, accepted = decode(drafter, Exact(), options, 4, count=60)
        assert accepted == 48  # one token of the first round, then twelve rounds of five


@pytest.mark.parametrize("draft_length", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("method", ["model", "ngram", "alternating"])
@pytest.mark.parametrize(
    "options",
    [
        Options(),
        Options(repetition_penalty=1.2, frequency_penalty=0.4, no_repeat_ngram=4),
        Options(temperature=0.8),
        Options(temperature=1.3, top_k=5, top_p=0.9, min_p=0.05, presence_penalty=0.5),
    ],
    ids=["greedy", "greedy, penalties", "sampled", "sampled, filters"],
)
def test_text_does_not_depend_on_the_drafter(method: str, draft_length: int, options: Options) -> None:
    verifier = Greedy() if options.greedy else Exact()
    expected, _ = decode(FunctionDrafter(lambda tokens, budget: EMPTY_DRAFT), verifier, options, 0)
    model, ngram = ModelDrafter("draft:fake", FakeTarget(DRAFT, VOCAB)), NgramDrafter()
    drafter = {"model": model, "ngram": ngram, "alternating": Alternating([model, ngram])}[method]
    text, accepted = decode(drafter, verifier, options, draft_length)
    assert text == expected
    if draft_length and method == "model":
        assert accepted > 5


def test_sampled_drafts_are_accepted_by_rejection() -> None:
    drafter = ModelDrafter("draft:fake", FakeTarget(DRAFT, VOCAB), sample=True)
    text, accepted = decode(drafter, Rejection(), Options(temperature=1.0), 4)
    assert len(text) == 60 and accepted > 20


class Alternating:
    """Switches the drafter every round; the idle ones are told of every round."""

    name = "alternating"

    def __init__(self, drafters: list[Drafter]) -> None:
        self._drafters = drafters
        self._round = 0

    def propose(self, context: Context, budget: int) -> Draft:
        self._round += 1
        return self._drafters[self._round % len(self._drafters)].propose(context, budget)

    def observe(self, context: Context, verdict: Verdict) -> None:
        for drafter in self._drafters:
            drafter.observe(context, verdict)

    def rewind(self, length: int) -> None:
        for drafter in self._drafters:
            drafter.rewind(length)


# ---- failures -------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("way", BrokenDrafter.WAYS)
def test_a_drafter_that_breaks_leaves_the_text_alone(way: str, after: int, caplog: pytest.LogCaptureFixture) -> None:
    options = Options(temperature=0.9)
    expected, _ = decode(FunctionDrafter(lambda tokens, budget: EMPTY_DRAFT), Exact(), options, 0)
    broken = BrokenDrafter(way, after)
    guard = GuardedDrafter(broken)
    with caplog.at_level(logging.WARNING):
        text, _ = decode(guard, Exact(), options, 4)
    assert text == expected
    assert guard.failure is not None and "\n" not in guard.failure and broken.name in guard.failure
    assert [record.message for record in caplog.records] == [guard.failure]
    assert broken.calls <= after + 3
    assert 1 <= len(guard.notices) <= 3 and all(guard.failure in notice for notice in guard.notices)


def test_a_draft_model_that_gives_nan_is_switched_off() -> None:
    drafter = ModelDrafter("draft:fake", FakeTarget(lambda prefix: np.full(VOCAB, np.nan, np.float32), VOCAB))
    guard = GuardedDrafter(drafter)
    assert guard.propose(context([1, 2]), 4) == EMPTY_DRAFT
    assert guard.failure is not None and "not finite" in guard.failure


@pytest.mark.parametrize(
    "probs",
    [
        np.full((2, 4), np.inf),
        np.full((2, 4), 0.5),
        np.array([[1.5, -0.5, 0, 0]] * 2),
        np.array([[0.0, 0, 0, 1]] * 2),
        np.full((2, 0), 0.0),
        np.ones(2),
    ],
)
def test_guard_refuses_laws_that_are_none(probs: np.ndarray) -> None:
    guard = GuardedDrafter(FunctionDrafter(lambda tokens, budget: Draft.chain([0, 1], probs)))
    assert guard.propose(context([1]), 2) == EMPTY_DRAFT
    assert guard.failure is not None and guard.failure.startswith("drafter function failed, decoding plainly: Val")


def test_guard_passes_sound_drafts_on() -> None:
    draft = Draft((0, 1, 0), (-1, -1, 1), np.full((3, VOCAB), 1 / VOCAB))
    inner = FunctionDrafter(lambda tokens, budget: draft)
    guard = GuardedDrafter(inner)
    assert guard.propose(context([1]), 3) is draft
    guard.observe(context([1]), NO_VERDICT)
    guard.rewind(1)
    assert (guard.name, guard.failure, inner.rewound, len(inner.observed)) == ("function", None, [1], 1)


def test_an_interrupt_is_not_a_failure() -> None:
    def interrupt(tokens: object, budget: int) -> Draft:
        raise KeyboardInterrupt

    guard = GuardedDrafter(FunctionDrafter(interrupt))
    with pytest.raises(KeyboardInterrupt):
        guard.propose(context([1]), 2)
    assert guard.failure is None
