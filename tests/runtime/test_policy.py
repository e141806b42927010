"""What rounds cost, what drafts bring, and what policies make of it; numbers by hand or from published code."""

from __future__ import annotations

import random

import pytest

from specedge.runtime.contracts import EMPTY_DRAFT, Draft, Round
from specedge.runtime.costs import Costs, shape_of
from specedge.runtime.gains import ChainGain, TreeGain
from specedge.runtime.options import PLAIN
from specedge.runtime.policy import Candidate, Fixed, Plan, Speed, Steps, Thresholds, View
from specedge.runtime.tune import best_length
from specedge.runtime.watch import Watch, likely_cause


def made(nodes=0, accepted=0, *, by="model", verify=10.0, draft=0.0, host=0.1, **more):
    """A round of a chain."""
    proposed = Draft.chain(list(range(nodes))) if nodes else EMPTY_DRAFT
    proposed = Draft(proposed.tokens, proposed.parents, by=by if nodes else "")
    tokens = tuple(range(accepted + 1))
    evaluated = min(nodes, accepted + 1)
    return Round(tokens, accepted, proposed, evaluated, accepted < nodes, draft, verify, host, **more)


# ---- costs ----------------------------------------------------------------------------------


def test_the_first_pass_sets_the_scale_and_the_shape_the_rest():
    costs = Costs({1: 1.0, 5: 1.4}, {"model": (0.0, 0.25)})
    assert not costs.known
    costs.record(made(verify=20.0))
    assert costs.known
    assert costs.pass_ms(1) == pytest.approx(20)
    assert costs.pass_ms(3) == pytest.approx(24)
    assert costs.pass_ms(9) == pytest.approx(36)
    assert costs.draft_ms("model", 4) == pytest.approx(20)
    assert costs.draft_ms("nobody", 4) == costs.draft_ms("model", 0) == 0
    assert costs.round_ms("model", 4) == pytest.approx(20 + 28 + costs.host_ms)


def test_a_measured_shape_is_milliseconds():
    costs = Costs({1: 8.0, 3: 9.0}, {"heads": (1.5, 0.0)}, measured=True)
    assert costs.known and costs.pass_ms(2) == pytest.approx(8.5)
    assert costs.draft_ms("heads", 1) == costs.draft_ms("heads", 9) == 1.5


def test_costs_follow_what_is_measured():
    costs = Costs({1: 1.0, 9: 1.8}, {"model": (0.0, 0.5)})
    rng = random.Random(1)
    for _ in range(150):
        nodes = rng.choice([0, 4])
        costs.record(made(nodes, nodes, verify=10 if nodes == 0 else 16, draft=3 * nodes))
    assert costs.pass_ms(1) == pytest.approx(10, rel=0.05)
    assert costs.pass_ms(5) == pytest.approx(16, rel=0.05)
    assert costs.draft_ms("model", 4) == pytest.approx(12, rel=0.02)
    for _ in range(40):  # the machine is slower now: widths that are not run follow
        costs.record(made(4, 4, verify=32, draft=24))
    assert costs.pass_ms(1) == pytest.approx(20, rel=0.15)
    assert costs.draft_ms("model", 4) == pytest.approx(24, rel=0.05)


def test_an_outlier_counts_for_little_and_a_prompt_for_nothing():
    costs = Costs({1: 1.0}, {})
    costs.record(made(verify=10))
    costs.record(made(verify=1e4))
    assert costs.pass_ms(1) < 13
    before = costs.pass_ms(1)
    costs.record(made(verify=900, prefill=True))
    assert costs.pass_ms(1) == before
    assert costs.high(10) > 10


def test_a_first_draft_may_have_run_a_prompt_and_says_nothing():
    costs = Costs({1: 1.0}, {"model": (0.0, 0.5), "heads": (0.1, 0.0)})
    costs.record(made(verify=10))
    costs.record(made(4, 4, draft=900))
    assert costs.draft_ms("model", 4) == pytest.approx(20, rel=0.3)
    for _ in range(3):
        costs.record(made(4, 4, draft=8))
    assert costs.draft_ms("model", 4) == pytest.approx(8, rel=0.05)
    costs.record(made(2, 2, by="heads", draft=1))
    costs.record(made(4, 4, draft=900))  # it caught up
    assert costs.draft_ms("model", 4) == pytest.approx(8, rel=0.05)


def test_a_wider_pass_never_takes_less():
    costs = Costs({1: 10.0, 12: 30.0, 17: 20.0}, {}, measured=True)
    assert costs.pass_ms(17) == costs.pass_ms(12) == costs.pass_ms(64) == pytest.approx(30)


# ---- gains ----------------------------------------------------------------------------------


def test_a_chains_gain_is_the_sum_of_the_products_of_its_shares():
    gain = ChainGain(0.8)
    assert gain.expected(3) == pytest.approx([0, 0.8, 0.8 + 0.64, 0.8 + 0.64 + 0.512])
    assert ChainGain([0.5, 0.4], most=2).expected(9) == pytest.approx([0, 0.5, 0.7])


def test_a_chains_gain_learns_depth_by_depth():
    gain, rng = ChainGain(0.5), random.Random(0)
    for _ in range(400):
        accepted = 0
        while accepted < 4 and rng.random() < (0.9, 0.6, 0.6, 0.6)[accepted]:
            accepted += 1
        gain.record(made(4, accepted))
    first, second = gain.expected(1)[1], gain.expected(2)[2] - gain.expected(1)[1]
    assert first == pytest.approx(0.9, abs=0.1)
    assert second / first == pytest.approx(0.6, abs=0.15)
    before = gain.expected(1)[1]
    gain.fade(1.0)
    assert gain.expected(1)[1] == 0.5 != before


def test_what_was_expected_is_forgotten_like_what_is_seen_and_comes_back():
    gain = ChainGain(0.2, trust=8)
    assert gain.expected(1, hope=1.0)[1] == pytest.approx(0.2 + (0.2 * 0.8 / 8) ** 0.5)
    for _ in range(300):
        gain.record(made(1, 1))
    assert gain.expected(1)[1] == pytest.approx(1.0, abs=0.01)
    gain.fade(0.5)
    assert gain.expected(1)[1] == pytest.approx((33.3 + 8 * 0.2) / (33.3 + 8), abs=0.01)
    for _ in range(20):
        gain.fade(0.5)
    assert gain.expected(1)[1] == pytest.approx(0.2, abs=0.01)
    tree = TreeGain([0.5])
    assert tree.expected(1, hope=1.0)[1] > tree.expected(1)[1] == 0.5


def test_rows_that_are_run_anyhow_are_drafted():
    """Where passes of 5 to 8 rows take the same, a draft of 7 costs what one of 4 does."""
    passes = {1: 10.0, 2: 10.0, 4: 10.5, 8: 12.0, 16: 30.0}
    costs = Costs(passes, {}, measured=True, padded=lambda rows: next(each for each in passes if rows <= each))
    policy = Speed([Candidate("heads", lambda matched: ChainGain(0.8))], costs, 15, tried=True)
    assert policy.plan(View(15, ["heads"])).budget == 7


def test_a_depth_that_is_not_tested_any_more_is_taken_to_be_like_the_one_before_it():
    gain = ChainGain(0.5)
    gain.record(made(2, 1))  # depth 2 failed once, and is drafted no more
    second = gain.expected(2)[2] - gain.expected(1)[1]
    for _ in range(200):
        gain.record(made(1, 1))
    assert second < 0.3
    assert gain.expected(2)[2] == pytest.approx(2.0, abs=0.1)


def test_a_pass_is_known_by_the_rows_that_it_really_runs():
    """Plain decoding of a rounded target runs two rows, as a drafted token does: neither takes longer."""
    costs = Costs({2: 10.0, 4: 12.0}, {}, measured=True, padded=lambda rows: 2 if rows < 3 else 4)
    for _ in range(9):
        costs.record(made(0, 0, verify=8))
        costs.record(made(2, 0, verify=12))
    assert costs.pass_ms(1) == costs.pass_ms(2) < costs.pass_ms(3) == costs.pass_ms(4)


def test_a_trees_gain_is_its_calibration_times_how_right_that_was():
    gain = TreeGain([0.5, 0.25, 0.125])
    assert gain.expected(9) == [0, 0.5, 0.75, 0.875]
    for _ in range(300):
        gain.record(made(2, 1))
    assert gain.expected(2)[2] == pytest.approx(1.0, abs=0.05)
    assert gain.expected(1)[1] <= 1


# ---- policies -------------------------------------------------------------------------------


@pytest.mark.parametrize(("cost", "length"), [(0.01, 7), (0.02, 6), (0.05, 4), (0.1, 3)])
def test_the_closed_form_for_chains(cost, length):
    """Values of OSD's cost model for an acceptance of .6, where passes of all widths take the same."""
    found, tokens, rate = best_length(ChainGain(0.6), (0.0, cost), {1: 1.0, 17: 1.0}, 0.0)
    assert found == length
    assert tokens == pytest.approx((1 - 0.6 ** (length + 1)) / 0.4)
    assert rate == pytest.approx(tokens / (cost * length + 1))


def test_fixed_thresholds_and_steps():
    view = View(16, ["model"])
    assert Fixed("model", 4).plan(view) == Plan("model", 4)
    policy = Thresholds("model")
    for accepted, length in ((5, 5), (0, 1)):
        for _ in range(20):
            nodes = policy.plan(view).budget
            policy.record(policy.plan(view), made(nodes, min(accepted, nodes)))
        assert policy.plan(view).budget == length
    policy = Steps("model", 0.25, most=6)
    assert policy.plan(view).budget == 2  # log2(1 / c)
    seen = []
    for stands in (True, True, True, False, False, True):
        nodes = policy.plan(view).budget
        seen.append(nodes)
        policy.record(policy.plan(view), made(nodes, nodes if stands else 0))
    assert seen == [2, 4, 6, 6, 5, 4]
    assert Steps("model", 2.0).plan(view).budget == 1


def simulate(policy, costs, truth, rounds, offers=dict, seed=0):
    """Runs a policy against methods of known acceptance and cost; tokens, milliseconds, and rounds by method."""
    rng, used = random.Random(seed), {}
    tokens = ms = 0.0
    for _ in range(rounds):
        view = View(16, list(truth["alpha"]), offers())
        plan = policy.plan(view)
        accepted = 0
        while accepted < plan.budget and rng.random() < truth["alpha"].get(plan.method, 0):
            accepted += 1
        draft_ms = truth["draft"].get(plan.method, 0) * plan.budget
        verify = truth["pass"](1 + plan.budget) * rng.uniform(0.95, 1.05)
        outcome = made(plan.budget, accepted, by=plan.method, verify=verify, draft=draft_ms)
        costs.record(outcome)
        policy.record(plan, outcome)
        tokens, ms = tokens + accepted + 1, ms + draft_ms + verify
        used[plan.method] = used.get(plan.method, 0) + 1
    return tokens, ms, used


TRUTH = {"alpha": {"model": 0.9, "heads": 0.4}, "draft": {"model": 4.0, "heads": 0.3}, "pass": lambda w: 9.5 + 0.5 * w}


def speed(truth, priors=(0.5, 0.5)):
    costs = Costs(shape_of("fp32"), {method: (0.0, truth["draft"][method] / 10) for method in truth["draft"]})
    made_by = [
        Candidate(method, lambda matched, prior=prior: ChainGain(prior))
        for method, prior in zip(truth["alpha"], priors, strict=True)
    ]
    return Speed(made_by, costs), costs


def best_rate(truth):
    """Tokens a millisecond of the best method and length, acceptance and costs known."""
    rates = [1 / truth["pass"](1)]
    for method, alpha in truth["alpha"].items():
        for n in range(1, 17):
            tokens = (1 - alpha ** (n + 1)) / (1 - alpha)
            rates.append(tokens / (truth["draft"][method] * n + truth["pass"](1 + n)))
    return max(rates)


@pytest.mark.parametrize("alphas", [(0.9, 0.4), (0.3, 0.7), (0.05, 0.05), (0.6, 0.6)])
@pytest.mark.parametrize("draft", [(4.0, 0.3), (0.5, 3.0)])
def test_speed_comes_near_the_best_method_whichever_that_is(alphas, draft):
    names = ("model", "heads")
    truth = {**TRUTH, "alpha": dict(zip(names, alphas, strict=True)), "draft": dict(zip(names, draft, strict=True))}
    rates = []
    for seed in range(6):
        policy, costs = speed(truth)
        simulate(policy, costs, truth, 150, seed=seed)
        tokens, ms, _ = simulate(policy, costs, truth, 600, seed=100 + seed)
        rates.append(tokens / ms / best_rate(truth))
    assert sum(rates) / len(rates) > 0.95


def test_speed_begins_plainly_and_notices_that_the_text_has_changed():
    policy, costs = speed(TRUTH)
    assert policy.plan(View(16, ["model", "heads"])) == Plan(PLAIN, 0)
    *_, used = simulate(policy, costs, TRUTH, 200)
    assert max(used, key=used.get) == "model"
    changed = {**TRUTH, "alpha": {"model": 0.1, "heads": 0.8}}
    simulate(policy, costs, changed, 60)
    *_, used = simulate(policy, costs, changed, 100)
    assert used["heads"] > 80


def test_speed_leaves_out_who_is_not_ready_and_copies_only_what_is_offered():
    policy, costs = speed(TRUTH)
    simulate(policy, costs, TRUTH, 50)
    assert policy.plan(View(16, ["heads"])).method != "model"
    assert policy.plan(View(16, [])).method == PLAIN
    copies = Speed([Candidate("ngram", lambda matched: ChainGain(0.9), copies=1, free=True)], costs, tried=True)
    assert copies.peeks == ["ngram"]
    assert copies.plan(View(16, ["ngram"])).method == PLAIN
    offered = copies.plan(View(16, ["ngram"], {"ngram": Draft.chain([1, 2, 3])}, matched=3))
    assert offered.method == "ngram" and offered.budget == 3


def test_a_drafter_that_tells_is_given_more_room_and_a_price():
    costs = Costs({1: 10.0, 17: 18.0}, {"heads": (0.3, 0.0)}, measured=True)
    tells = Speed([Candidate("heads", lambda matched: ChainGain(0.6, 4), tells=True)], costs, tried=True)
    plan = tells.plan(View(16, ["heads"]))
    assert plan.method == "heads" and 0 < plan.least < 1
    # A node is worth its time where the chance to stand is above what its row costs, in tokens.
    assert plan.least == pytest.approx(plan.tokens / plan.ms * 0.5)


# ---- health ---------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.2, 0.5, 0.95])
def test_steady_acceptance_is_no_fall(alpha):
    watch, rng, falls = Watch(), random.Random(4), 0
    for _ in range(4000):
        accepted = 0
        while accepted < 4 and rng.random() < alpha:
            accepted += 1
        falls += watch.record(made(4, accepted)) is not None
    assert falls <= 2


def test_a_fall_is_told_once():
    watch, falls = Watch(), []
    for accepted in (*[4] * 60, *[0] * 60):
        fall = watch.record(made(4, accepted))
        if fall is not None:
            falls.append(fall)
    assert len(falls) == 1
    before, after = falls[0]
    assert before > 0.8 and after < 0.7


def test_likely_causes():
    assert likely_cause([1, 2, 3] * 40, 0.0) == "the reply repeats itself"
    varied = [index * index % 997 for index in range(200)]
    assert "temperature 1.3" in likely_cause(varied, 1.3)
    assert "distribution shift" in likely_cause(varied, 0.0)
    assert "distribution shift" in likely_cause([], 0.0)
