"""Nothing a model says reaches the terminal as a control, however its tokens are split."""

from __future__ import annotations

import random
import re

import pytest

from specedge.runtime.terminal import TerminalFilter, clean, clean_line

FORBIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\u2028\u2029\ud800-\udfff]"
)
PIECES = [
    "\x1b]0;title\x07", "\x1b]52;c;aGk=\x1b\\", "\x1b[2J", "\x1b[31;1m", "\x9b31m", "\x9d0;t\x9c", "\x1bPq\x1b\\",
    "\x1b", "\x1b[", "\x1b]", "\x1b\x1b[", "\x90", "\x9c", "\x1b(B", "\x1bc", "\x07", "\x08", "\x00", "\x7f", "\x85",
    "\r", "\x0b", "\x18", "\u202e", "\u2066", "\u2028", "\ud83d", "\U000e0041", "text", "é好🙂\u200d", "\n", "\t",
    "[31m", "]0;", ";", "m", "\\", "\x1b[\x1b[1m", "\x1b[1\x07m",
]  # fmt: skip


def hostile(count):
    chooser = random.Random(7)
    return ["".join(chooser.choices(PIECES, k=chooser.randint(1, 8))) for _ in range(count)]


def test_two_thousand_hostile_strings_split_at_every_position():
    for text in hostile(2000):
        whole = clean(text)
        assert not FORBIDDEN.search(whole)
        for cut in range(len(text) + 1):
            split = TerminalFilter()
            assert split.push(text[:cut]) + split.push(text[cut:]) == whole


def test_a_character_at_a_time():
    for text in hostile(200):
        one = TerminalFilter()
        assert "".join(map(one.push, text)) == clean(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc", "a\tb\nc"),
        ("a\r\nb", "a\nb"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x9b1;31mred", "red"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bP1$r0m\x1b\\x", "x"),
        ("\x1b(Bx\x1b7y", "xy"),
        ("\x1b[12\nx", "\nx"),
        ("\x1b]0;never ends\nx", "\nx"),
        ("**bold** `code` # h <b>", "**bold** `code` # h <b>"),
        ("family 👨\u200d👩\u200d👧 café 你好", "family 👨\u200d👩\u200d👧 café 你好"),
        ("\u202eevil\u202c", "evil"),
    ],
)
def test_what_is_shown(text, shown):
    assert clean(text) == shown


def test_a_sequence_that_does_not_end_hides_the_reply_for_a_short_while_only():
    shown = clean("\x1b]0;" + "x" * 1000)
    assert 700 < len(shown) < 1000


def test_one_line():
    assert clean_line("a\nb\x1b[31m  c\t") == "a b c"
