"""The queue in front of an engine: who goes first, what is dropped, and that going on later changes no token."""

from __future__ import annotations

import threading
import time

import pytest

from specedge.runtime.engine import Engine
from specedge.runtime.errors import PromptError, UsageError
from specedge.runtime.events import Finish, Token
from specedge.runtime.options import Options
from specedge.runtime.scheduler import Scheduler

PROMPT = [5, 6, 7, 8]
OTHER = [9, 10, 11]
LONG = Options(max_tokens=60, method="ngram", temperature=0.9, seed=3)


@pytest.fixture(scope="module")
def engine(tiny_bundle):
    with Engine(tiny_bundle, threads=1) as engine:
        yield engine


class _Gate:
    """Holds the engine's target in its n-th pass until it is opened."""

    def __init__(self, engine, monkeypatch, at):
        self.reached, self.open = threading.Event(), threading.Event()
        forward, passes = engine.target.forward, iter(range(1 << 30))

        def held(pending, *draft):
            if next(passes) == at:
                self.reached.set()
                assert self.open.wait(20)
            return forward(pending, *draft)

        monkeypatch.setattr(engine.target, "forward", held)


def test_equals_are_answered_in_order_and_higher_priorities_first(engine, monkeypatch):
    gate, ended = _Gate(engine, monkeypatch, 2), []
    with Scheduler(engine) as queue:
        first = queue.submit(PROMPT, max_tokens=8)
        assert gate.reached.wait(20)
        requests = {
            name: queue.submit(OTHER, max_tokens=2, priority=priority)
            for name, priority in (("low", -1), ("a", 0), ("b", 0))
        }
        for name, request in requests.items():
            end = request._end
            request._end = lambda *given, name=name, end=end: (ended.append(name), end(*given))
        gate.open.set()
        for request in requests.values():
            assert request.result(20).reason == "length"
    assert first.done
    assert ended == ["a", "b", "low"]


def test_of_a_topic_only_the_latest_is_answered(engine, monkeypatch):
    gate = _Gate(engine, monkeypatch, 3)
    with Scheduler(engine) as queue:
        running = queue.submit(PROMPT, LONG, topic="camera")
        assert gate.reached.wait(20)
        waiting = queue.submit(PROMPT, LONG, topic="camera")
        latest = queue.submit(OTHER, max_tokens=5, topic="camera")
        gate.open.set()
        assert latest.result(20).reason == "length"
        old, dropped = running.result(20), waiting.result(20)
    assert old.reason == "cancelled" and 0 < len(old.ids) < 60
    assert dropped.reason == "cancelled" and dropped.ids == ()


@pytest.mark.parametrize("options", [LONG, Options(max_tokens=60, method="draft", presence_penalty=0.4)])
def test_a_reply_that_was_put_back_goes_on_with_the_tokens_it_would_have_had(engine, monkeypatch, options):
    *_, alone = engine.generate(PROMPT, options)
    gate = _Gate(engine, monkeypatch, 3)
    with Scheduler(engine) as queue:
        low = queue.submit(PROMPT, options)
        assert gate.reached.wait(20)
        urgent = queue.submit(OTHER, max_tokens=4, priority=5)
        gate.open.set()
        assert urgent.result(20).reason == "length"
        events = list(low)
    assert isinstance(events[-1], Finish)
    assert events[-1].ids == alone.ids and events[-1].text == alone.text
    assert tuple(event.id for event in events if isinstance(event, Token)) == alone.ids


def test_errors_reach_who_waits_and_the_queue_goes_on(engine):
    with Scheduler(engine, most=3) as queue:
        wrong = queue.submit([])
        with pytest.raises(PromptError, match="the prompt is empty"):
            wrong.result(20)
        with pytest.raises(PromptError, match="the prompt is empty"):
            list(queue.submit([]))
        assert queue.submit(PROMPT, max_tokens=3).result(20).reason == "length"
        with pytest.raises(UsageError, match="draft_length is 0"):
            queue.submit(PROMPT, draft_length=0)
    with pytest.raises(UsageError, match="closed"):
        queue.submit(PROMPT)


def test_what_waits_is_ended_at_once_and_makes_room(engine, monkeypatch):
    gate = _Gate(engine, monkeypatch, 2)
    with Scheduler(engine, most=2) as queue:
        running = queue.submit(PROMPT, LONG)
        assert gate.reached.wait(20)
        views = [queue.submit(OTHER, max_tokens=2, topic="camera") for _ in range(9)]
        assert [each.result(0).reason for each in views[:-1]] == ["cancelled"] * 8
        other = queue.submit(OTHER, max_tokens=2)
        with pytest.raises(UsageError, match="2 requests wait already"):
            queue.submit(OTHER)
        other.cancel()
        assert other.result(0).reason == "cancelled"
        assert list(other)[-1].reason == "cancelled" and list(other) == []
        gate.open.set()
        assert views[-1].result(20).reason == "length"
        assert running.result(20).reason == "length"


def test_a_deadline_counts_from_the_request(engine, monkeypatch):
    gate = _Gate(engine, monkeypatch, 2)
    with Scheduler(engine) as queue:
        queue.submit(PROMPT, max_tokens=6)
        assert gate.reached.wait(20)
        late = queue.submit(OTHER, max_tokens=40, deadline_ms=30)
        time.sleep(0.05)
        gate.open.set()
        assert (late.result(20).reason, late.result().ids) == ("deadline", ())


def test_one_that_was_put_back_and_is_cancelled_keeps_what_it_said(engine, monkeypatch):
    gate = _Gate(engine, monkeypatch, 3)
    with Scheduler(engine) as queue:
        low = queue.submit(PROMPT, LONG)
        assert gate.reached.wait(20)
        urgent = queue.submit(OTHER, max_tokens=30, priority=5)
        said = iter(urgent)
        gate.open.set()
        next(said)
        low.cancel()
        assert low.result(20).reason == "cancelled" and 0 < len(low.result().ids) < 60
        *_, alone = (urgent.result(20),)
    *_, plain = engine.generate(OTHER, max_tokens=30)
    assert alone.ids == plain.ids


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"priority": "high"}, "priority is 'high'"),
        ({"topic": 3}, "topic is 3"),
        ({"bogus": 1}, "unknown option bogus"),
    ],
)
def test_requests_that_make_no_sense(engine, given, message):
    with Scheduler(engine) as queue, pytest.raises(UsageError, match=message):
        queue.submit(PROMPT, **given)


def test_a_suspended_reply_leaves_the_cache_to_others(engine):
    first = engine.generate(PROMPT, LONG)
    taken = [next(first).id for _ in range(3)]
    while not first.at_round_end:
        taken.append(next(first).id)
    engine.suspend(first)
    with pytest.raises(ValueError, match="has to be resumed"):
        next(first)
    second = engine.generate(OTHER, max_tokens=20)
    half = [next(second).id for _ in range(5)]
    first.close()
    assert first.finish.ids == tuple(taken)
    *_, end = second
    assert end.ids[:5] == tuple(half) and len(end.ids) == 20
    with pytest.raises(ValueError, match="not suspended"):
        second.resume()


def test_statistics_add_up_over_a_suspension(engine):
    *_, whole = engine.generate(PROMPT, LONG)
    reply = engine.generate(PROMPT, LONG)
    for event in reply:
        if isinstance(event, Token) and reply.at_round_end:
            engine.suspend(reply)
            engine.resume(reply)
    stats = reply.finish.stats
    assert reply.finish.ids == whole.ids
    assert stats.accepted + stats.corrected + stats.bonus == stats.decoded
    assert sum(stats.rounds.values()) == stats.passes == stats.corrected + stats.bonus


def test_another_thread_ends_a_reply_after_its_round(engine, monkeypatch):
    reply = engine.generate(PROMPT, LONG)
    forward = engine.target.forward
    monkeypatch.setattr(engine.target, "forward", lambda *given: (time.sleep(0.01), forward(*given))[1])
    events = []
    reader = threading.Thread(target=lambda: events.extend(reply))
    reader.start()
    while len(events) < 3:
        time.sleep(0.001)
    reply.close()
    reader.join(20)
    assert reply.finish.reason == "cancelled" and 3 <= len(reply.finish.ids) < 30


def test_a_full_queue_refuses_and_closing_drops_what_waits(engine, monkeypatch):
    gate = _Gate(engine, monkeypatch, 2)
    queue = Scheduler(engine, most=2)
    running = queue.submit(PROMPT, LONG)
    assert gate.reached.wait(20)
    waiting = [queue.submit(PROMPT, LONG) for _ in range(2)]
    with pytest.raises(UsageError, match="2 requests wait already"):
        queue.submit(PROMPT)
    closing = threading.Thread(target=queue.close)
    closing.start()
    gate.open.set()
    closing.join(20)
    assert [each.result(1).reason for each in (running, *waiting)] == ["cancelled"] * 3
    with pytest.raises(TimeoutError):
        Scheduler(engine).submit(PROMPT, max_tokens=200).result(0)
