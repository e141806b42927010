"""The queue in front of an engine: who goes first, what is dropped, and that going on later changes no token."""

from __future__ import annotations

import threading

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
