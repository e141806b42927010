"""Where a reply ends: end-of-text tokens, stop texts, length, a full context, no more time. Cuts before bookkeeping."""

from __future__ import annotations

from collections.abc import Callable, Collection

__all__ = ["StopRule"]


class StopRule:
    """Cuts a round's tokens and collects the text that each one makes visible.

    Args:
        eos: Tokens that end the reply; one that is produced stays as the last token, without text.
        limit: Most tokens the reply may have (max_tokens, or what the context still holds).
        push: Adds a token to the reply's text; returns the text that became visible and whether
            a stop text was completed by it.
        over: Whether there is no time for another pass.
    """

    def __init__(
        self,
        eos: Collection[int],
        limit: int,
        push: Callable[[int], tuple[str, bool]],
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._eos = frozenset(eos)
        self._left = limit
        self._push = push
        self.over = over
        self.texts: list[str] = []

    def room(self) -> int:
        return self._left

    def cut(self, tokens: list[int]) -> tuple[int, str | None]:
        self.texts = []
        for count, token in enumerate(tokens, start=1):
            self._left -= 1
            if token in self._eos:
                self.texts.append("")
                return count, "stop"
            text, stopped = self._push(token)
            self.texts.append(text)
            if stopped:
                return count, "stop"
            if self._left <= 0:
                return count, "length"
        return len(tokens), None
