"""A queue in front of an engine: priorities, and of one topic only the latest request.

A robot asks for things that grow old: a question about what the camera sees is worth nothing once
there is a newer picture. An engine makes one reply at a time, on one worker thread here.

- Of the requests that wait, the one of the highest priority runs next; among equals, the first.
- A request of a topic takes the place of an older one of that topic: one that waits is dropped, one
  that runs is ended after its round, with what it said so far.
- A request of a higher priority than the one that runs puts that one back into the queue. What it
  said is kept: it goes on later from there, with the same tokens that it would have had.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from specedge.runtime.engine import Engine
from specedge.runtime.errors import UsageError
from specedge.runtime.events import Event, Finish, Token
from specedge.runtime.options import Options

__all__ = ["Request", "Scheduler"]


class Request:
    """A reply that was asked for. Iterate for its events, or wait for its `result`.

    Attributes:
        priority: Higher goes first.
        topic: Of one topic only the latest request is answered; None: it stands alone.
    """

    def __init__(self, prompt: str | Sequence[int], options: Options, priority: int, topic: str | None) -> None:
        self.priority, self.topic = priority, topic
        self._prompt, self._options = prompt, options
        self._events: SimpleQueue[Event | BaseException] = SimpleQueue()
        self._done = threading.Event()
        self._finish: Finish | None = None
        self._error: BaseException | None = None
        self._generation: Any = None
        self._dropped = self._preempted = False

    def __iter__(self) -> Iterator[Event]:
        """Its events as they come; the last is its `Finish`."""
        while True:
            event = self._events.get()
            if isinstance(event, BaseException):
                raise event
            yield event
            if isinstance(event, Finish):
                return

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
        self._dropped = True

    @property
    def done(self) -> bool:
        """Whether it ended."""
        return self._done.is_set()

    def _end(self, finish: Finish | None, error: BaseException | None = None) -> None:
        self._finish, self._error = finish, error
        self._done.set()
        self._events.put(error if finish is None and error is not None else finish)  # type: ignore[arg-type]


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
        self._changed = threading.Condition()
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
            prompt, options, overrides: As `Engine.generate` takes them.
            priority: Higher goes first, and ahead of what runs.
            topic: Takes the place of older requests of this topic.

        Raises:
            UsageError: The queue is full, or closed, or an option is out of range.
        """
        chosen = replace(options or Options(), **overrides)
        request = Request(prompt, chosen, priority, topic)
        with self._changed:
            if self._closed:
                raise UsageError("this scheduler is closed: make another")
            if topic is not None:
                self._drop(topic)
            if len(self._waiting) >= self._most:
                raise UsageError(f"{self._most} requests wait already: ask again later, or cancel some")
            self._put(request)
            if self._running is not None and priority > self._running.priority:
                self._running._preempted = True
        return request

    def close(self) -> None:
        """Ends what runs after its round, and drops what waits."""
        with self._changed:
            self._closed = True
            for _, _, request in self._waiting:
                request.cancel()
            if self._running is not None:
                self._running.cancel()
            self._changed.notify()
        self._worker.join()

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _put(self, request: Request) -> None:
        heapq.heappush(self._waiting, (-request.priority, next(self._numbers), request))
        self._changed.notify()

    def _drop(self, topic: str) -> None:
        for request in (*(each for _, _, each in self._waiting), self._running):
            if request is not None and request.topic == topic:
                request.cancel()

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
                    heapq.heappush(self._waiting, (-request.priority, number, request))

    def _run(self, request: Request) -> bool:
        """Answers a request as far as it may; whether it has to go on later."""
        try:
            if request._generation is None:
                request._generation = self._engine.generate(request._prompt, request._options)
            else:
                self._engine.resume(request._generation)
            generation = request._generation
            if request._dropped:
                generation.close()
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
