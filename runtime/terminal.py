"""What a model or a bundle says never steers the terminal: control characters and sequences are dropped."""

from __future__ import annotations

import re

__all__ = ["TerminalFilter", "clean", "clean_line"]

_SUSPECT = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and newline, DEL, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks, embeddings, overrides and isolates of direction
    "\u2028\u2029"  # line and paragraph separators
    "\ufff9-\ufffb\U000e0000-\U000e007f"  # annotations and tags: invisible text
    "\ud800-\udfff]"  # lone surrogates cannot be written
)
_LONGEST = 256
"""A sequence that goes on for longer is taken for an attempt to hide the rest of the reply."""

_TEXT, _ESCAPE, _CSI, _STRING, _STRING_ESCAPE = range(5)


class TerminalFilter:
    """Removes what could steer a terminal, from a text that arrives in pieces.

    Whole escape sequences go, not only their first character, so that no remains are
    left in the text. A sequence that does not end, at a newline or after some length,
    is given up, and what follows is text again. Newlines and tabs stay.
    """

    def __init__(self) -> None:
        self._state = _TEXT
        self._length = 0

    def push(self, text: str) -> str:
        """The harmless part of the next piece."""
        if self._state == _TEXT and not _SUSPECT.search(text):
            return text
        return "".join(character for character in text if self._keep(character))

    def _keep(self, character: str) -> bool:
        if self._state == _TEXT:
            return self._in_text(character)
        self._length += 1
        if character in "\n\x18\x1a" or self._length > _LONGEST:
            return self._in_text(character)
        if self._state == _CSI:
            return self._in_csi(character)
        if self._state == _ESCAPE:
            self._after_escape(character)
        elif self._state == _STRING_ESCAPE and character != "\\":
            return self._in_text("\x1b") or self._keep(character)
        else:
            self._in_string(character)
        return False

    def _in_text(self, character: str) -> bool:
        self._state, self._length = _TEXT, 0
        if character == "\x1b":
            self._state = _ESCAPE
        elif character == "\x9b":
            self._state = _CSI
        elif character in "\x90\x98\x9d\x9e\x9f":
            self._state = _STRING
        return not _SUSPECT.match(character)

    def _in_csi(self, character: str) -> bool:
        if "\x20" <= character <= "\x3f":
            return False
        if "\x40" <= character <= "\x7e":
            self._state = _TEXT
            return False
        return self._in_text(character)

    def _after_escape(self, character: str) -> None:
        if character == "[":
            self._state = _CSI
        elif character in "PX]^_":
            self._state = _STRING
        elif character == "\x1b" or "\x20" <= character <= "\x2f":
            pass  # another start, or an intermediate character: the final one is still to come
        else:
            self._state = _TEXT

    def _in_string(self, character: str) -> None:
        if self._state == _STRING_ESCAPE or character in "\x07\x9c":
            self._state = _TEXT
        elif character == "\x1b":
            self._state = _STRING_ESCAPE


def clean(text: object) -> str:
    """A whole text without what could steer a terminal."""
    return TerminalFilter().push(str(text))


def clean_line(text: object) -> str:
    """`clean`, on one line."""
    return " ".join(clean(text).split())
