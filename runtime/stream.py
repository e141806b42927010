"""Tokens become text while they arrive: whole characters, and stop texts cut at the first that completes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specedge.runtime.text import Text

__all__ = ["Reply", "TextStream"]

_BROKEN = "\ufffd"
_PATIENCE = 8  # a character takes at most four tokens; after this many, what stands before the last one is final
_WINDOW = 64


class TextStream:
    """Decodes tokens one at a time; characters split over tokens arrive whole.

    A window of the newest tokens is decoded each time, and what it says beyond what was
    said before is new. The tokens said last stay in the window, so that a decoder that
    treats the first piece in its own way (SentencePiece drops its space) is not misled.

    Args:
        decode: Text of a few tokens.
        skip: Tokens without text.
        after: Tokens that stand before the first one, where the text continues theirs.
    """

    def __init__(self, decode: Callable[[list[int]], str], skip: Collection[int], after: Sequence[int] = ()) -> None:
        self._decode = decode
        self._skip = skip
        self._window = [token for token in after if token not in skip][-_PATIENCE:]
        self._old = len(self._window)
        self._said = len(decode(self._window)) if self._window else 0

    def push(self, token: int) -> str:
        """Adds a token; returns the text that became certain."""
        if token in self._skip:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        waiting = len(self._window) - self._old
        if not text.endswith(_BROKEN) or waiting >= _WINDOW:
            new = text[self._said :]
            self._window = self._window[self._old :]
            self._old = len(self._window)
            self._said = len(self._decode(self._window))
            return new
        if waiting < _PATIENCE:
            return ""
        new = text[self._said : -1]
        self._said = max(self._said, len(text) - 1)
        return new

    def flush(self) -> str:
        """The rest: half a character comes as U+FFFD."""
        text = self._decode(self._window) if len(self._window) > self._old else ""
        new = text[self._said :]
        self._window, self._old, self._said = [], 0, 0
        return new


class Reply:
    """The visible text of a reply: a stop text ends it, also where it lies over several tokens.

    Text that may be the start of a stop text is held back until that is decided.

    Args:
        text: The tokenizer.
        stops: Stop texts; the one that completes first ends the reply and is not part of it.
        after: Tokens before the reply, where its text continues theirs (a prompt without chat markup).
    """

    def __init__(self, text: Text, stops: Sequence[str] = (), after: Sequence[int] = ()) -> None:
        self._stream = text.stream(after)
        self._stops = tuple(stop for stop in stops if stop)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> tuple[str, bool]:
        """Adds a token; returns the text that became visible, and whether a stop text is complete."""
        if self.stopped:
            return "", True
        return self._add(self._stream.push(token)), self.stopped

    def flush(self) -> str:
        """What was held back, at the end of the reply."""
        if self.stopped:
            return ""
        visible = self._add(self._stream.flush())
        if not self.stopped:
            visible += self._held
            self._held = ""
        return visible

    def _add(self, new: str) -> str:
        self._held += new
        found = [(self._held.find(stop), stop) for stop in self._stops]
        complete = [(at + len(stop), at) for at, stop in found if at >= 0]
        if complete:
            self.stopped = True
            visible, self._held = self._held[: min(complete)[1]], ""
            return visible
        keep = self._open_tail()
        visible, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return visible

    def _open_tail(self) -> int:
        """Length of the longest end of the held text that may begin a stop text."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
