"""A conversation that answers without a model, for the parts a person touches."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from specedge.runtime.errors import PromptError
from specedge.runtime.events import Event, Finish, Stats, Token
from specedge.runtime.options import Options

__all__ = ["FakeChat", "FakeReply", "make_stats"]


def make_stats(**changes: Any) -> Stats:
    """Statistics of a reply of ten tokens in four passes."""
    values: dict[str, Any] = {
        "method": "draft:self-int4", "lossless": True, "prompt_tokens": 12, "cached_tokens": 3, "tokens": 10,
        "passes": 4, "proposed": 16, "evaluated": 9, "accepted": 6, "ttft_ms": 120.0, "prefill_ms": 100.0,
        "decode_ms": 300.0, "draft_ms": 90.0, "verify_ms": 200.0, "host_ms": 10.0, "peak_memory_bytes": 512_000_000,
    }  # fmt: skip
    return Stats(**{**values, **changes})


class FakeReply:
    """Says the given pieces, one token each; the last may come only with the finish, as held-back text does.

    Attributes:
        closed: Whether `close` was called.
    """

    def __init__(self, pieces, reason="stop", notes=(), pause=0.0, on_finish=None, fails=None, held="") -> None:
        self._pieces = list(pieces)
        self._reason, self._notes, self._pause = reason, notes, pause
        self._on_finish, self._fails, self._held = on_finish, fails, held
        self._seen: list[Token] = []
        self.finish: Finish | None = None
        self.closed = False

    def __iter__(self) -> FakeReply:
        return self

    def __next__(self) -> Event:
        if self.finish is not None:
            raise StopIteration
        time.sleep(self._pause)
        if not self._pieces:
            if self._fails is not None:
                raise self._fails
            return self._end(self._reason)
        number = len(self._seen)
        self._seen.append(Token(100 + number, self._pieces.pop(0), ("bonus", "draft", "correction")[number % 3]))
        return self._seen[-1]

    def close(self) -> None:
        self.closed = True
        if self.finish is None:
            self._end("cancelled")

    def _end(self, reason) -> Finish:
        text = "".join(token.text for token in self._seen) + self._held
        ids = tuple(token.id for token in self._seen)
        self.finish = Finish(reason, text, (1, 2, 3), ids, make_stats(tokens=len(ids), notes=self._notes))
        if self._on_finish is not None:
            self._on_finish(self.finish)
        return self.finish


class FakeChat:
    """Answers every message with its own words.

    Args:
        pause: Seconds before each token.
        reply: Arguments of each FakeReply.
    """

    def __init__(self, pause: float = 0.0, **reply: Any) -> None:
        self.messages: list[dict[str, str]] = []
        self.options = Options()
        self._system: str | None = None
        self._reply = {"pause": pause, **reply}

    @property
    def system(self) -> str | None:
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        self._system, self.messages = text, []

    def send(self, text: str, **overrides: Any) -> FakeReply:
        if "too long" in text:
            raise PromptError("the prompt has 9,000 tokens and the context holds 2,048: shorten it")
        self.messages.append({"role": "user", "content": text})
        return self._answer()

    def regenerate(self, **overrides: Any) -> FakeReply:
        if not self.messages:
            raise PromptError("there is nothing to answer again: say something first")
        self.messages.pop()
        return self._answer()

    def reset(self) -> None:
        self.messages = []

    def save(self, path: Path) -> None:
        Path(path).write_text(json.dumps(self.messages))

    def load(self, path: Path) -> None:
        self.messages = json.loads(Path(path).read_text())

    def _answer(self) -> FakeReply:
        words = self.messages[-1]["content"].split(" ")
        pieces = [f"<{word}> " for word in words]
        return FakeReply(pieces, on_finish=self._keep, **self._reply)

    def _keep(self, finish: Finish) -> None:
        self.messages.append({"role": "assistant", "content": finish.text})
