"""A queue in front of an engine: priorities, and of one topic only the latest request.

A robot asks for things that grow old: a question about what the camera sees is worth nothing once
there is a newer picture. An engine makes one reply at a time, on one worker thread here.

- Of the requests that wait, the one of the highest priority runs next; among equals, the first.
- A request of a topic takes the place of an older one of that topic: one that waits is dropped, one
  that runs is ended after its round, with what it said so far.
- A request of a higher priority than the one that runs puts that one back into the queue. What it
  said is kept: it goes on later from there, greedy and exact replies with the tokens that they would
  have had.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from time import perf_counter
from typing import Any

from specedge.runtime.engine import Engine, Generation
from specedge.runtime.errors import UsageError
from specedge.runtime.events import Event, Finish, Token
from specedge.runtime.options import AUTO, Options, override
from specedge.runtime.stats import total

__all__ = ["Request", "Scheduler"]


class Request:
    """A reply that was asked for. Iterate for its events, or wait for its `result`.

    Attributes:
        priority: Higher goes first.
        topic: Of one topic only the latest request is answered; None: it stands alone.
        asked: When it was asked for: its deadline counts from then.
    """

    def __init__(
        self,
        prompt: str | Sequence[int],
        options: Options,
        priority: int,
        topic: str | None,
        cancel: Callable[[Request], None],
    ) -> None:
        self.priority, self.topic, self.asked = priority, topic, perf_counter()
        self._prompt, self._options, self._cancel = prompt, options, cancel
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self._done = threading.Event()
        self._finish: Finish | None = None
        self._error: BaseException | None = None
        self._generation: Generation | None = None
        self._dropped = self._preempted = False

    def __iter__(self) -> Iterator[Event]:
        """Its events as they come; the last is its `Finish`. Each is given once."""
        while not (self._done.is_set() and self._events.empty()):
            event = self._events.get()
            if event is None:
                break
            yield event
        if self._error is not None:
            raise self._error

    def result(self, timeout: float | None = None) -> Finish:
        """Waits for its end.

        Raises:
            TimeoutError: It did not end within `timeout` seconds.
            SpecEdgeError: What made it fail.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"the reply did not end within {timeout} s")
        if self._error is not None:
            raise self._error
        assert self._finish is not None
        return self._finish

    def cancel(self) -> None:
        """Ends it: at once where it waits, after its round where it runs."""
        self._cancel(self)

    @property
    def done(self) -> bool:
        """Whether it ended."""
        return self._done.is_set()

    def _end(self, finish: Finish | None, error: BaseException | None = None) -> None:
        self._finish, self._error = finish, error
        self._events.put(finish)
        self._done.set()

    def _end_waiting(self) -> None:
        """Ends one that waits: with what it said so far, if it ever ran."""
        if self._generation is not None:
            self._generation.close()
            self._end(self._generation.finish)
            return
        stats = total([], method=self._options.method or AUTO, lossless=True, prompt_tokens=0, cached_tokens=0)
        self._end(Finish("cancelled", "", (), (), stats))


class Scheduler:
    """Runs requests on an engine of its own.

    Args:
        engine: Not to be used by anyone else meanwhile; it is not closed.
        most: Requests that may wait; more are refused.
    """

    def __init__(self, engine: Engine, most: int = 64) -> None:
        self._engine, self._most = engine, most
        self._waiting: list[tuple[int, int, Request]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition(threading.RLock())
        self._running: Request | None = None
        self._closed = False
        self._worker = threading.Thread(target=self._work, name="specedge-scheduler", daemon=True)
        self._worker.start()

    def submit(
        self,
        prompt: str | Sequence[int],
        options: Options | None = None,
        *,
        priority: int = 0,
        topic: str | None = None,
        **overrides: Any,
    ) -> Request:
        """Asks for a reply.

        Args:
            prompt, options, overrides: As `Engine.generate` takes them. A deadline counts from now.
            priority: Higher goes first, and ahead of what runs.
            topic: Takes the place of older requests of this topic.

        Raises:
            UsageError: The queue is full, or closed, or an option is out of range.
        """
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise UsageError(f"priority is {priority!r}: give a whole number")
        if not isinstance(topic, (str, type(None))):
            raise UsageError(f"topic is {topic!r}: give a text, or None")
        request = Request(prompt, override(options or Options(), overrides), priority, topic, self._cancel)
        with self._changed:
            if self._closed:
                raise UsageError("this scheduler is closed: make another")
            older = [each for each in self._all() if topic is not None and each.topic == topic]
            if len(self._waiting) - sum(each is not self._running for each in older) >= self._most:
                raise UsageError(f"{self._most} requests wait already: ask again later, or cancel some")
            for each in older:
                self._cancel(each)
            self._put(request, next(self._numbers))
            if self._running is not None and priority > self._running.priority:
                self._running._preempted = True
        return request

    def close(self) -> None:
        """Ends what runs after its round, and drops what waits."""
        with self._changed:
            self._closed = True
            for request in self._all():
                self._cancel(request)
            self._changed.notify()
        self._worker.join()

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _all(self) -> list[Request]:
        running = [] if self._running is None else [self._running]
        return [*(request for _, _, request in self._waiting), *running]

    def _put(self, request: Request, number: int) -> None:
        heapq.heappush(self._waiting, (-request.priority, number, request))
        self._changed.notify()

    def _cancel(self, request: Request) -> None:
        with self._changed:
            request._dropped = True
            waiting = [each for each in self._waiting if each[2] is not request]
            if len(waiting) < len(self._waiting):
                self._waiting = waiting
                heapq.heapify(self._waiting)
                request._end_waiting()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if not self._waiting:
                    return
                _, number, request = heapq.heappop(self._waiting)
                self._running = request
            back = self._run(request)
            with self._changed:
                self._running = None
                if back:  # with its old number: it stays ahead of those that came later
                    request._preempted = False
                    self._put(request, number)
                    if request._dropped:
                        self._cancel(request)

    def _run(self, request: Request) -> bool:
        """Answers a request as far as it may; whether it has to go on later."""
        try:
            if request._generation is None:
                request._generation = self._engine.generate(request._prompt, request._options, asked=request.asked)
            else:
                self._engine.resume(request._generation)
            generation = request._generation
            for event in generation:
                if isinstance(event, Finish):
                    request._end(event)
                    return False
                request._events.put(event)
                if request._dropped:
                    break
                if request._preempted and isinstance(event, Token) and generation.at_round_end:
                    self._engine.suspend(generation)
                    return True
            generation.close()
            request._end(generation.finish)
        except BaseException as error:  # noqa: BLE001  whoever waits for the reply has to hear of it
            request._end(None, error)
        return False
