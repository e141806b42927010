"""What stays over replies: the target and its drafters, and which tokens their caches hold."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from specedge.runtime.contracts import Drafter, Target

__all__ = ["Session"]

_log = logging.getLogger("specedge.runtime")


class Session:
    """A target, the drafters opened so far, and the committed tokens they know.

    Attributes:
        tokens: All committed tokens, prompt first; the loop extends the list in place.
        lock: Held by whoever changes any of this: a round of a reply, its start and its end.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.drafters: list[Drafter] = []
        self.lock = threading.RLock()
        self.tokens: list[int] = []

    def begin(self, prompt: Sequence[int]) -> int:
        """Takes a new prompt and keeps the cached rows of what it shares with the tokens before.

        Returns:
            How many of its tokens are in the target's cache. Its last token never is, so
            that the first pass has a row to give the next token from.
        """
        shared = _common_prefix(self.tokens, prompt)
        self.rewind(min(shared, len(prompt) - 1))
        self.tokens.extend(prompt[len(self.tokens) :])
        return self.target.length

    def cut(self, length: int) -> None:
        """Drops the committed tokens from `length` on; the newest that stays is not cached."""
        tokens = self.tokens[:length]
        self.rewind(max(length - 1, 0))
        self.tokens = tokens

    def rewind(self, length: int) -> None:
        """Forgets all tokens from `length` on, in the caches too."""
        del self.tokens[length:]
        self.target.rewind(min(self.target.length, length))
        for drafter in self.drafters:
            _rewind(drafter, length)


def _rewind(drafter: Drafter, length: int) -> None:
    try:
        drafter.rewind(length)
    except Exception as error:  # noqa: BLE001  a drafter may fail in any way; the reply must not
        _log.warning("drafter %s cannot rewind: %s", drafter.name, error)


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))
