"""Deadlines on the real model, while another process loads a core: late by a pass at most, and no token lost."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from time import perf_counter

import pytest

from specedge.runtime.engine import Engine
from specedge.runtime.events import Token

pytestmark = pytest.mark.model

SLACK_MS = 20.0
SHORTEST_MS, LONGEST_MS = 50.0, 5000.0
IN_TIME = 0.995


@pytest.fixture(scope="module")
def engine(model_bundle):
    with Engine(model_bundle, verify=False) as engine:
        yield engine


@pytest.fixture
def load():
    """A process that keeps a core busy."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        yield
        busy.kill()


def late(engine, ids, deadline_ms):
    """By how many milliseconds more than one pass a reply ended late; its tokens."""
    engine.reset()
    began, seen = perf_counter(), []
    for event in engine.generate(ids, deadline_ms=deadline_ms, max_tokens=400):
        if isinstance(event, Token):
            seen.append(event.id)
    took = 1e3 * (perf_counter() - began)
    assert tuple(seen) == event.ids
    assert event.reason in ("deadline", "stop", "length")
    costs = engine.drafting.costs
    # A prompt is run in pieces of 32 tokens: that is the longest pass a reply with a deadline makes.
    longest = max(costs.pass_ms(1 + 16), costs.pass_ms(32) if costs.known else 0.0)
    return took - deadline_ms - longest, event


def run(engine, dev_prompts, requests, compared, longest=LONGEST_MS):
    rng, lateness, reasons = random.Random(5), [], set()
    chats = [engine.text.chat_prompt([{"role": "user", "content": each["turns"][0]}]) for each in dev_prompts]
    chats = [ids for ids in chats if len(ids) < 700]
    plain: dict[tuple[int, ...], tuple[int, ...]] = {}
    late(engine, chats[0], 3000)  # what passes take is learnt here
    for _ in range(requests):
        ids = rng.choice(chats)
        over, finish = late(engine, ids, math.exp(rng.uniform(math.log(SHORTEST_MS), math.log(longest))))
        lateness.append(over)
        reasons.add(finish.reason)
        if len(plain) < compared:
            key = tuple(ids)
            if key not in plain:
                *_, whole = engine.generate(ids, method="none", max_tokens=400)
                plain[key] = whole.ids
            assert finish.ids == plain[key][: len(finish.ids)]
    share = sum(over <= SLACK_MS for over in lateness) / len(lateness)
    print(f"{len(lateness)} requests, {share:.4f} in time; latest {max(lateness):.1f} ms beyond a pass; {reasons}")
    return share, reasons


def test_a_few_deadlines_while_another_process_works(engine, dev_prompts, load):
    share, reasons = run(engine, dev_prompts, 10, compared=3, longest=1500.0)
    assert share >= 0.9
    assert "deadline" in reasons


@pytest.mark.long
def test_five_hundred_deadlines_while_another_process_works(engine, dev_prompts, load):
    share, reasons = run(engine, dev_prompts, 500, compared=20)
    assert share >= IN_TIME
    assert reasons >= {"deadline", "stop"}


def test_a_deadline_that_a_prompt_uses_up_gives_no_token_and_leaves_the_engine_well(engine, dev_prompts):
    ids = engine.text.chat_prompt([{"role": "user", "content": "word " * 600}])
    _, finish = late(engine, ids, 60.0)
    assert (finish.reason, finish.ids, finish.text) == ("deadline", (), "")
    *_, whole = engine.generate(ids, max_tokens=4)  # what was run of the prompt stays in the cache
    assert 0 < whole.stats.cached_tokens < len(ids)
    *_, plain = engine.generate(ids, method="none", max_tokens=4)
    assert whole.ids == plain.ids != ()


def test_steps_stay_within_their_limit(engine, dev_prompts):
    """A limit between a plain pass and what drafts of eight take."""
    ids = engine.text.chat_prompt([{"role": "user", "content": dev_prompts[0]["turns"][0]}])
    *_, free = engine.generate(ids, method="draft:self-int8", draft_length=8, max_tokens=96)
    limit = 0.6 * free.stats.step_ms[0]
    *_, held = engine.generate(ids, method="draft:self-int8", draft_length=8, max_step_ms=limit, max_tokens=96)
    assert held.ids == free.ids
    assert held.stats.step_ms[0] <= limit < free.stats.step_ms[0]
    assert held.stats.proposed / held.stats.passes < 8
