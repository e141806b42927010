"""The loop on fakes: its text is plain decoding's whatever drafts it, and every cut comes before bookkeeping."""

from __future__ import annotations

import random

import pytest

from specedge.runtime.contracts import Draft
from specedge.runtime.drafters.guard import GuardedDrafter
from specedge.runtime.drafters.model import ModelDrafter
from specedge.runtime.drafters.ngram import NgramDrafter
from specedge.runtime.drafters.none import NoDrafter
from specedge.runtime.loop import generate
from specedge.runtime.options import Options
from specedge.runtime.sampler import NumpySampler
from specedge.runtime.stopping import StopRule
from specedge.runtime.verifiers import verifier_for
from specedge.tests.fakes import BrokenDrafter, FakeTarget, FunctionDrafter, directing, fuzzy, random_tree

VOCAB = 24
PROMPT = [3, 1, 4, 1, 5]
TARGET = fuzzy(VOCAB, seed=1)
CLOSE = fuzzy(VOCAB, seed=2, like=TARGET, noise=0.4)


def silent(token):
    return "", False


def run(drafter, *, options=None, limit=60, eos=(), capacity=256, draft_length=4, push=silent, seed=7, rounds=None):
    """One reply; returns its tokens, the target, and why it ended."""
    options = options or Options(seed=seed)
    target = FakeTarget(TARGET, VOCAB, capacity)
    tokens = list(PROMPT)
    stop = StopRule(eos, min(limit, capacity - len(PROMPT)), push)
    sampler = NumpySampler(options, len(PROMPT), seed)
    finish = None
    for item in generate(target, directing(drafter, draft_length), verifier_for(options), sampler, tokens, stop):
        assert target.tokens == tokens[:-1], "the cache holds every committed token but the newest"
        finish = item.finish
        if rounds is not None:
            rounds.append(item)
    return tokens[len(PROMPT) :], target, finish


def model(law=CLOSE, capacity=256):
    return ModelDrafter("draft:close", FakeTarget(law, VOCAB, capacity))


def trees(seed):
    rng = random.Random(seed)

    def propose(tokens, budget):
        return random_tree(rng, rng.randint(0, budget), VOCAB)

    return FunctionDrafter(propose)


def oracle_trees(answer, seed):
    """Random trees in which the right continuation is hidden now and then."""
    rng = random.Random(seed)

    def propose(tokens, budget):
        draft = random_tree(rng, budget, VOCAB)
        known = answer[len(tokens) - len(PROMPT) :]
        node, depth, named = -1, 0, list(draft.tokens)
        for child in range(budget):
            if draft.parents[child] == node and depth < len(known) and rng.random() < 0.7:
                siblings = [c for c in range(child) if draft.parents[c] == node]
                if all(named[c] != known[depth] for c in siblings):
                    named[child] = known[depth]
                    node, depth = child, depth + 1
        return Draft(tuple(named), draft.parents)

    return FunctionDrafter(propose)


OPTIONS = [
    Options(),
    Options(repetition_penalty=1.3, no_repeat_ngram=3),
    Options(presence_penalty=0.5, frequency_penalty=0.3),
    Options(temperature=0.8),
    Options(temperature=1.3, top_k=10, top_p=0.9, repetition_penalty=1.1),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("draft_length", [1, 2, 4, 8, 31])
def test_every_drafter_gives_the_text_of_plain_decoding(options, draft_length):
    plain, *_ = run(NoDrafter(), options=options)
    assert len(plain) == 60
    drafters = [model(), model(TARGET), NgramDrafter(), trees(draft_length), oracle_trees(plain, draft_length)]
    for drafter in drafters:
        rounds = []
        text, target, finish = run(drafter, options=options, draft_length=draft_length, rounds=rounds)
        assert text == plain
        assert finish == "length"
        assert target.largest <= len(PROMPT) + 60 + draft_length
    # The oracle drafts something right: a test in which nothing is ever accepted would prove little.
    assert sum(item.accepted for item in rounds) > 5


def test_a_draft_that_is_the_target_is_accepted_whole():
    rounds = []
    run(model(TARGET), rounds=rounds, limit=61)
    decoding = [item for item in rounds if not item.prefill]
    assert all(item.accepted == len(item.draft.tokens) and not item.corrected for item in decoding)
    assert len(decoding) == 60 / 5


def test_switching_drafters_every_round_changes_nothing():
    plain, *_ = run(NoDrafter())
    pool = [model(), NgramDrafter(), trees(3), NoDrafter()]
    turn = random.Random(5)

    class Switching:
        name = "switching"

        def propose(self, context, budget):
            return turn.choice(pool).propose(context, budget)

        def observe(self, context, verdict):
            for drafter in pool:
                drafter.observe(context, verdict)

        def rewind(self, length):
            for drafter in pool:
                drafter.rewind(length)

    assert run(Switching())[0] == plain


@pytest.mark.parametrize("way", BrokenDrafter.WAYS)
@pytest.mark.parametrize("after", [0, 3])
def test_a_drafter_that_fails_in_any_way_leaves_the_text_alone(way, after):
    plain, *_ = run(NoDrafter())
    guard = GuardedDrafter(BrokenDrafter(way, after))
    assert run(guard)[0] == plain
    assert guard.failure is not None
    assert "\n" not in guard.failure


@pytest.mark.parametrize("draft_length", [1, 4, 8])
def test_an_end_of_text_token_is_the_last_one(draft_length):
    plain, *_ = run(NoDrafter())
    eos = plain[20]
    expected = plain[: plain.index(eos) + 1]
    for drafter in (NoDrafter(), model(), model(TARGET), oracle_trees(plain, 1)):
        text, target, finish = run(drafter, eos={eos, 999}, draft_length=draft_length)
        assert (text, finish) == (expected, "stop")
        assert target.tokens == [*PROMPT, *expected[:-1]]


@pytest.mark.parametrize("at", [1, 2, 7, 19])
def test_a_stop_text_completed_inside_an_accepted_draft_drops_the_rest(at):
    plain, *_ = run(NoDrafter())
    count = 0

    def push(token):
        nonlocal count
        count += 1
        return "x", count == at

    for drafter in (NoDrafter(), model(TARGET), oracle_trees(plain, 2)):
        count, rounds = 0, []
        text, target, finish = run(drafter, push=push, draft_length=8, rounds=rounds)
        assert (text, finish) == (plain[:at], "stop")
        assert target.length == len(PROMPT) + at - 1
        assert sum(len(item.tokens) for item in rounds) == at
        assert all(item.accepted <= item.evaluated for item in rounds)


@pytest.mark.parametrize("limit", [1, 2, 3, 17])
def test_max_tokens_is_kept_exactly_and_nothing_is_drafted_past_it(limit):
    plain, *_ = run(NoDrafter())
    for drafter in (NoDrafter(), model(TARGET), NgramDrafter()):
        rounds = []
        text, _, finish = run(drafter, limit=limit, draft_length=8, rounds=rounds)
        assert (text, finish) == (plain[:limit], "length")
        left = limit
        for item in rounds:
            assert len(item.draft.tokens) <= left - 1
            left -= len(item.tokens)


@pytest.mark.parametrize("capacity", [6, 7, 12, 30])
def test_a_full_context_ends_the_reply_and_no_cache_overflows(capacity):
    plain, *_ = run(NoDrafter())
    for drafter in (NoDrafter(), model(TARGET), oracle_trees(plain, 4)):
        text, target, finish = run(drafter, capacity=capacity, draft_length=8)
        assert (text, finish) == (plain[: capacity - len(PROMPT)], "length")
        assert target.largest <= capacity


@pytest.mark.parametrize("capacity", [5, 6, 9, 20])
def test_a_draft_model_with_less_room_than_the_target_stops_drafting(capacity):
    plain, *_ = run(NoDrafter())
    drafter = model(TARGET, capacity=capacity)
    guard = GuardedDrafter(drafter)
    assert run(guard, draft_length=8)[0] == plain
    assert guard.failure is None


def test_the_first_round_runs_the_prompt_and_drafts_nothing():
    rounds = []
    run(model(), rounds=rounds)
    assert rounds[0].prefill
    assert rounds[0].draft.tokens == ()
    assert not any(item.prefill for item in rounds[1:])


def test_a_seed_gives_the_same_text_however_a_reply_is_cut_and_resumed():
    options = Options(temperature=1.0)
    whole, *_ = run(NoDrafter(), options=options)
    for drafter in (NoDrafter(), model()):
        target, tokens = FakeTarget(TARGET, VOCAB), list(PROMPT)
        sampler = NumpySampler(options, len(PROMPT), 7)
        for piece in (1, 9, 20, 30):
            stop = StopRule((), piece, silent)
            for _ in generate(target, directing(drafter, 4), verifier_for(options), sampler, tokens, stop):
                pass
        assert tokens[len(PROMPT) :] == whole


def test_rejection_sampling_runs_through_the_loop():
    options = Options(temperature=1.0, accept="rejection")
    drafter = model()
    drafter.sample = True
    rounds = []
    text, _, finish = run(drafter, options=options, rounds=rounds)
    assert len(text) == 60
    assert finish == "length"
    assert sum(item.accepted for item in rounds) > 10
    assert any(item.corrected for item in rounds)
