"""A conversation: messages, turns that reuse the cache, saving and loading."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from specedge.runtime.errors import PromptError, UsageError
from specedge.runtime.events import Finish
from specedge.runtime.files import write_text
from specedge.runtime.generation import Generation
from specedge.runtime.options import Options
from specedge.runtime.text import Text

__all__ = ["Chat"]

Message = dict[str, str]
_ROLES = ("system", "user", "assistant")
_MAX_FILE = 16 << 20


class _Engine(Protocol):
    """What a chat needs of an engine."""

    text: Text

    def start(
        self, ids: Sequence[int], options: Options, overrides: dict[str, Any], on_finish: Callable[[Finish], None]
    ) -> Generation: ...


class Chat:
    """A conversation with a model.

    Attributes:
        messages: The conversation so far: {"role": "system" | "user" | "assistant", "content": text}.
        options: Options of every reply.
    """

    def __init__(self, engine: _Engine, system: str | None = None, options: Options | None = None) -> None:
        self._engine = engine
        self.options = options or Options()
        self._running: Generation | None = None
        self.messages: list[Message] = []
        self.system = system

    @property
    def system(self) -> str | None:
        """The system message; setting it starts the conversation anew."""
        first = self.messages[0] if self.messages else None
        return first["content"] if first and first["role"] == "system" else None

    @system.setter
    def system(self, text: str | None) -> None:
        self._settle()
        self.messages = [{"role": "system", "content": text}] if text else []

    def send(self, text: str, **overrides: Any) -> Generation:
        """Adds a user turn and starts the reply, which joins the conversation when it ends or is closed.

        Args:
            text: The user's turn.
            **overrides: Options of this reply only.

        Raises:
            PromptError: The text is empty, or the conversation no longer fits the context;
                the conversation is unchanged.
        """
        if not isinstance(text, str) or not text.strip():
            raise PromptError("the prompt is empty: give it some text")
        self._settle()
        return self._reply([*self.messages, {"role": "user", "content": text}], overrides)

    def regenerate(self, **overrides: Any) -> Generation:
        """Answers the last user turn again; the answer before is dropped.

        Raises:
            PromptError: There is no user turn yet.
        """
        self._settle()
        turns = list(self.messages)
        if turns and turns[-1]["role"] == "assistant":
            turns.pop()
        if not turns or turns[-1]["role"] != "user":
            raise PromptError("there is nothing to answer again: say something first")
        return self._reply(turns, overrides)

    def reset(self) -> None:
        """Forgets the turns; the system message stays."""
        self.system = self.system

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the conversation as JSON, beside and renamed.

        Raises:
            StorageError: The file cannot be written.
        """
        write_text(path, json.dumps({"messages": self.messages}, indent=2, ensure_ascii=False) + "\n")

    def load(self, path: str | os.PathLike[str]) -> None:
        """Takes up a saved conversation.

        Raises:
            UsageError: The file is not a conversation.
        """
        source = Path(path)
        try:
            if source.stat().st_size > _MAX_FILE:
                raise ValueError
            messages = json.loads(source.read_text(encoding="utf-8"))["messages"]
            loaded = [{"role": _role(m["role"]), "content": _content(m["content"])} for m in messages]
        except OSError as error:
            raise UsageError(f"{source}: cannot be read: {error.strerror}") from None
        except (ValueError, TypeError, KeyError, RecursionError):
            raise UsageError(f"{source}: not a conversation saved by /save") from None
        self._settle()
        self.messages = loaded

    def _reply(self, turns: list[Message], overrides: dict[str, Any]) -> Generation:
        def keep(finish: Finish) -> None:
            self.messages.append({"role": "assistant", "content": finish.text})

        self._running = self._engine.start(self._engine.text.chat_prompt(turns), self.options, overrides, keep)
        self.messages = turns
        return self._running

    def _settle(self) -> None:
        """Ends a reply that is still open, so that what it said stands before the next turn."""
        if self._running is not None:
            self._running.close()
            self._running = None


def _role(value: object) -> str:
    if value not in _ROLES:
        raise ValueError(value)
    return str(value)


def _content(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    value.encode("utf-8")  # half a surrogate pair is no text: a ValueError
    return value
