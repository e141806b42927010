"""Token texts to calibrate on and to compare models on: a prompt, and what the target wrote after it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Text"]


@dataclass(frozen=True)
class Text:
    """One text.

    Attributes:
        prompt: Token ids that were given; may be as short as a begin-of-text token.
        answer: Token ids that the target wrote.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """All of it."""
        return self.prompt + self.answer
