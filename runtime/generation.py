"""One reply as an iterator of events, closable at any point."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import replace
from time import perf_counter
from types import TracebackType

from specedge.runtime.contracts import Round
from specedge.runtime.deadline import TIMED_PIECE, Deadline
from specedge.runtime.director import Director
from specedge.runtime.drafting import Drafting
from specedge.runtime.events import Event, Finish, FinishReason, Notice, Origin, Token
from specedge.runtime.loop import PIECE, generate
from specedge.runtime.options import PLAIN, Options
from specedge.runtime.sampler import NumpySampler
from specedge.runtime.session import Session
from specedge.runtime.stats import total, trim
from specedge.runtime.stopping import StopRule
from specedge.runtime.text import Reply, Text
from specedge.runtime.verifiers import verifier_for

__all__ = ["Generation"]


class Generation:
    """A reply in the making. Iterate for its events: `Token`s, a `Notice` here and there, then one `Finish`.

    With `continues` the reply's text goes on where the prompt's ends (a prompt without chat markup).

    `close()` (or leaving a `with` block, or an interrupt) ends it early. What was seen stays:
    exactly the tokens that were taken from the iterator are committed.

    Attributes:
        finish: The last event, once the reply has ended.
        options: Its options, with the method and seed that were really used.
    """

    def __init__(
        self,
        session: Session,
        drafting: Drafting,
        text: Text,
        prompt: Sequence[int],
        options: Options,
        *,
        eos: Collection[int],
        started: float,
        continues: bool = False,
        on_finish: Callable[[Finish], None] | None = None,
    ) -> None:
        self.options = options
        self.finish: Finish | None = None
        self._session = session
        self._prompt = tuple(prompt)
        self._on_finish = on_finish
        self._started = started
        self._cached = session.begin(prompt)
        self._reply = Reply(text, options.stop, after=self._prompt if continues else ())
        room = session.target.capacity - len(prompt)
        limit = room if options.max_tokens is None else min(room, options.max_tokens)
        deadline = Deadline(started, options.deadline_ms, options.max_step_ms, drafting.costs)
        self._stop = StopRule(eos, limit, self._reply.push, deadline.over)
        self._verifier = verifier_for(options)
        self._drafting = drafting
        self._director: Director = drafting.director(options, len(prompt), deadline)
        self._sampler = NumpySampler(options, len(prompt), options.seed or 0)
        self._loop = self._start()
        self._rounds: list[Round] = []
        self._overtime = self._suspended = self._unwanted = False
        self._queue: deque[Token] = deque()
        self._notices: deque[Notice] = deque()
        self._notes: list[str] = []
        self._seen: list[Token] = []
        self._ttft_ms = 0.0

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> Event:
        with self._session.lock:
            return self._next()

    def _next(self) -> Event:
        if self.finish is not None:
            raise StopIteration
        if self._suspended:
            raise ValueError("a suspended reply has to be resumed first")
        if self._unwanted:
            return self._end("cancelled")
        if not self._queue and not self._ended:
            try:
                self._advance()
            except BaseException:
                self._end("cancelled")
                raise
        if self._notices:
            return self._notices.popleft()
        if self._queue:
            self._seen.append(self._queue.popleft())
            return self._seen[-1]
        return self._end(self._reason)

    def close(self) -> None:
        """Ends the reply; tokens not yet taken from the iterator are dropped as if never drawn.

        From another thread than the one that iterates, it ends after the round that runs.
        """
        self.unwant()
        with self._session.lock:
            if self.finish is None:
                self._end(self._reason if self._ended and not self._queue else "cancelled")

    def unwant(self) -> None:
        """Lets the thread that iterates end the reply after its round: the lock alone would make others wait."""
        self._unwanted = True

    @property
    def at_round_end(self) -> bool:
        """Whether everything that was committed has been taken from the iterator."""
        return not self._queue and not self._notices

    def suspend(self) -> None:
        """Lets another reply have the cache; at the end of a round only. `resume` goes on."""
        if not self.at_round_end or self.finish is not None:
            raise ValueError("a reply can be suspended between its rounds only")
        self._loop.close()
        self._suspended = True

    def resume(self) -> None:
        """Goes on where `suspend` left off; greedy and exact with the tokens that it would have had."""
        if not self._suspended:
            raise ValueError("a reply that is not suspended cannot be resumed")
        self._suspended = False
        self._drafting.prepare(self.options)
        self._session.begin([*self._prompt, *(token.id for token in self._seen)])
        self._loop = self._start()

    def _start(self) -> Generator[Round, None, None]:
        self._drafting.look_at(self.options.looked_at)
        session, piece = self._session, PIECE if self.options.deadline_ms is None else TIMED_PIECE
        return generate(
            session.target, self._director, self._verifier, self._sampler, session.tokens, self._stop, piece
        )

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _ended(self) -> bool:
        return self._overtime or (bool(self._rounds) and self._rounds[-1].finish is not None)

    @property
    def _reason(self) -> FinishReason:
        if self._overtime:
            return "deadline"
        return "length" if self._rounds[-1].finish == "length" else "stop"

    def _advance(self) -> None:
        """Runs one round and queues its tokens, and what happened to drafters meanwhile."""
        outcome = next(self._loop, None)
        if outcome is None:  # time was called
            self._overtime = True
            return
        if self._rounds and outcome.prefill:  # it was suspended: to the reply this is a round like any other
            outcome = replace(outcome, prefill=False)
        self._rounds.append(outcome)
        self._notes += self._director.notices
        self._notices.extend(map(Notice, self._director.notices))
        self._director.notices.clear()
        if outcome.prefill:
            self._ttft_ms = 1e3 * (perf_counter() - self._started)
        own: Origin = "correction" if outcome.corrected else "bonus"
        for index, (token, text) in enumerate(zip(outcome.tokens, self._stop.texts, strict=True)):
            self._queue.append(Token(token, text, "draft" if index < outcome.accepted else own))
        if outcome.finish is not None:
            last = self._queue.pop()
            self._queue.append(replace(last, text=last.text + self._reply.flush()))

    def _end(self, reason: FinishReason) -> Finish:
        self._loop.close()
        unseen = len(self._queue)
        if unseen:
            self._rounds[-1] = trim(self._rounds[-1], len(self._rounds[-1].tokens) - unseen)
            self._queue.clear()
        if not self._suspended:  # else the cache is another reply's
            self._session.cut(len(self._prompt) + len(self._seen))
        stats = total(
            self._rounds,
            method=self.options.method or PLAIN,
            lossless=self._verifier.lossless,
            prompt_tokens=len(self._prompt),
            cached_tokens=self._cached,
            ttft_ms=self._ttft_ms,
            baseline_ms=self._director.baseline_ms,
            forecast=self._director.forecast.speedup,
            notes=self._notes,
        )
        text = "".join(token.text for token in self._seen)
        self.finish = Finish(reason, text, self._prompt, tuple(token.id for token in self._seen), stats)
        if self._on_finish is not None:
            self._on_finish(self.finish)
        return self.finish
