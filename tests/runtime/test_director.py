"""Directors: whoever drafts, however much, whatever fails and whenever, the text is plain decoding's."""

from __future__ import annotations

import random
from time import perf_counter

import pytest

from specedge.runtime.contracts import Draft
from specedge.runtime.costs import Costs
from specedge.runtime.deadline import Deadline
from specedge.runtime.director import Director
from specedge.runtime.drafters.guard import GuardedDrafter
from specedge.runtime.drafters.model import ModelDrafter
from specedge.runtime.drafters.ngram import NgramDrafter
from specedge.runtime.drafters.none import NoDrafter
from specedge.runtime.loop import generate
from specedge.runtime.options import Options
from specedge.runtime.policy import Fixed, Plan
from specedge.runtime.sampler import NumpySampler
from specedge.runtime.stopping import StopRule
from specedge.runtime.verifiers import verifier_for
from specedge.tests.fakes import Anything, BrokenDrafter, FakeTarget, FunctionDrafter, directing, fuzzy, random_tree

VOCAB = 24
PROMPT = [3, 1, 4, 1, 5]
TARGET = fuzzy(VOCAB, seed=1)
CLOSE = fuzzy(VOCAB, seed=2, like=TARGET, noise=0.4)


def decode(director, options, *, limit=120, rounds=None, over=lambda: False, piece=256, prompt=PROMPT):
    target, tokens = FakeTarget(TARGET, VOCAB, 512), list(prompt)
    sampler = NumpySampler(options, len(prompt), 7)
    stop = StopRule((), limit, lambda token: ("", False), over)
    for item in generate(target, director, verifier_for(options), sampler, tokens, stop, piece):
        assert target.tokens == tokens[:-1]
        if rounds is not None:
            rounds.append(item)
    return tokens[len(prompt) :]


def pool(seed):
    """A drafter of every kind, and one that fails in every way there is."""
    rng = random.Random(seed)
    drafters = {
        "draft:close": ModelDrafter("draft:close", FakeTarget(CLOSE, VOCAB, 512)),
        "draft:short": ModelDrafter("draft:short", FakeTarget(CLOSE, VOCAB, 40)),
        "ngram": NgramDrafter(),
        "trees": FunctionDrafter(lambda tokens, budget: random_tree(rng, rng.randint(0, budget), VOCAB)),
    }
    drafters |= {f"broken-{way}": BrokenDrafter(way, rng.randint(0, 6)) for way in BrokenDrafter.WAYS}
    return drafters


@pytest.mark.parametrize(
    "options", [Options(), Options(temperature=0.9, repetition_penalty=1.1)], ids=["greedy", "drawn"]
)
@pytest.mark.parametrize("seed", range(12))
def test_switching_every_round_with_failures_of_every_kind_changes_no_token(options, seed):
    plain = decode(directing(NoDrafter(), 1), options)
    drafters = pool(seed)
    policy = Anything(list(drafters), seed, peeks=("ngram",) if seed % 2 else ())
    director = Director({name: GuardedDrafter(each) for name, each in drafters.items()}, policy, Costs({1: 1.0}, {}))
    rounds = []
    assert decode(director, options, rounds=rounds) == plain
    drafted = {item.draft.by for item in rounds if item.draft.tokens}
    assert drafted <= set(drafters) and len(drafted) >= 3
    assert len(policy.recorded) == len(rounds) - 1
    assert sum("failed" in notice for notice in director.notices) >= 2
    assert all("\n" not in notice for notice in director.notices)


@pytest.mark.parametrize("way", BrokenDrafter.WAYS)
def test_a_drafter_that_fails_rests_is_tried_again_twice_and_is_left_out(way):
    broken = BrokenDrafter(way, 0)
    director = directing(broken, 4)
    decode(director, Options(), limit=200)
    assert 1 <= len(director.notices) <= 3
    assert "next try in 16 rounds" in director.notices[0]
    if len(director.notices) == 3:
        assert "left out for this reply" in director.notices[2]


def test_a_drafter_that_recovers_drafts_again():
    failures = iter(range(10))

    def propose(tokens, budget):
        if next(failures, 99) == 0:
            raise MemoryError("no memory for the draft")
        return Draft.chain([1])

    rounds = []
    director = directing(FunctionDrafter(propose), 2)
    decode(director, Options(), limit=60, rounds=rounds)
    assert director.notices == [
        "drafter function failed, decoding plainly: MemoryError: no memory for the draft; next try in 16 rounds"
    ]
    drafted = [bool(item.draft.tokens) for item in rounds[1:]]
    assert not any(drafted[:16]) and all(drafted[16:-1])


def test_a_sudden_fall_of_acceptance_lets_the_drafter_rest():
    right = ModelDrafter("model", FakeTarget(TARGET, VOCAB, 512))
    wrong = ModelDrafter("model", FakeTarget(fuzzy(VOCAB, seed=9), VOCAB, 512))

    class Turning:
        name = "model"

        def propose(self, context, budget):
            return (right if len(context.tokens) < 160 else wrong).propose(context, budget)

        def observe(self, context, verdict):
            for each in (right, wrong):
                each.observe(context, verdict)

        def rewind(self, length):
            for each in (right, wrong):
                each.rewind(length)

    rounds = []
    director = directing(Turning(), 4)
    plain = decode(directing(NoDrafter(), 1), Options(), limit=300)
    assert decode(director, Options(), limit=300, rounds=rounds) == plain
    told = [notice for notice in director.notices if "acceptance fell from" in notice]
    assert len(told) == 1 and told[0].startswith("drafter model rests for 32 rounds")
    first = next(index for index, item in enumerate(rounds[1:], 1) if not item.draft.tokens)
    assert not any(item.draft.tokens for item in rounds[first : first + 32])
    assert rounds[first + 33].draft.tokens


def test_baseline_rounds_are_plain_and_timed():
    rounds = []
    guard = GuardedDrafter(ModelDrafter("model", FakeTarget(TARGET, VOCAB, 512)))
    director = Director({"model": guard}, Fixed("model", 2), Costs({1: 1.0}, {}), baseline=True)
    decode(director, Options(), rounds=rounds)
    plain = [index for index, item in enumerate(rounds[1:], 1) if not item.draft.tokens]
    assert plain[:3] == [12, 24, 36]
    assert len(director.baseline_ms) >= 3


# ---- deadlines ------------------------------------------------------------------------------


def test_time_is_called_between_the_pieces_of_a_prompt_and_between_rounds():
    asked = iter(range(100))
    prompt = [index % VOCAB for index in range(100)]
    assert decode(directing(NoDrafter(), 1), Options(), over=lambda: next(asked) >= 2, piece=32, prompt=prompt) == []
    asked = iter(range(100))
    plain = decode(directing(NoDrafter(), 1), Options(), piece=32, prompt=prompt, limit=9)
    some = decode(directing(NoDrafter(), 1), Options(), over=lambda: next(asked) >= 7, piece=32, prompt=prompt, limit=9)
    assert some == plain[:4]  # three pieces, then rounds


def test_a_wrong_idea_of_passes_is_given_up():
    costs = Costs({1: 1000.0}, {}, measured=True)
    for _ in range(200):
        deadline = Deadline(perf_counter(), 50, None, costs)
        deadline.over()
        if not deadline.over():
            break
    assert costs.pass_ms(1) <= 50


def test_a_plan_that_a_deadline_cuts_to_nothing_is_a_plain_round():
    costs = Costs({1: 10.0, 11: 20.0}, {"model": (0.0, 5.0)}, measured=True)
    policy = Anything(["model"], 1)
    policy.plan = lambda view: Plan("model", 8, tokens=5.0, ms=9.0)
    guard = GuardedDrafter(ModelDrafter("model", FakeTarget(TARGET, VOCAB, 512)))
    director = Director({"model": guard}, policy, costs, deadline=Deadline(perf_counter(), None, 11.0, costs))
    rounds = []
    decode(director, Options(), limit=5, rounds=rounds)
    assert all(plan.method == "none" for plan, _ in policy.recorded)
    assert not any(item.draft.tokens for item in rounds) and director.forecast.speedup is None


def test_a_deadline_by_what_passes_take():
    costs = Costs({1: 10.0, 11: 20.0}, {"model": (0.0, 5.0)}, measured=True)
    now = perf_counter()
    assert not Deadline(now, None, None, costs).over()
    assert not Deadline(now, 1000, None, costs).over()
    short = Deadline(now, 500, None, Costs({1: 1000.0}, {}, measured=True))
    assert [short.over() for _ in range(3)] == [False, True, True]  # the first pass is made while there is time
    assert Deadline(now - 1, 1000, None, costs).over()
    assert Deadline(now, None, None, costs).affordable("model", 8) == 8
    # 3 tokens: 15 + 13 + .15, with a margin of a few per cent; 4 would take 34
    assert Deadline(now, None, 32.0, costs).affordable("model", 8) == 3
    assert Deadline(now, None, 1.0, costs).affordable("model", 8) == 0
    assert Deadline(now, 32, None, costs).affordable("model", 8) in (2, 3)
    unknown = Costs({1: 1.0}, {})
    assert not Deadline(now, 1000, None, unknown).over()
    assert Deadline(now, 1000, None, unknown).affordable("model", 8) == 0
