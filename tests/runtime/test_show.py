"""Replies on a stream, statistics and progress."""

from __future__ import annotations

import io
import json
import logging
import os
import signal

import pytest

from specedge.runtime.errors import NumericError
from specedge.runtime.progress import Phases
from specedge.runtime.show import JsonPrinter, TextPrinter, interruptible, speak, stats_json, stats_text
from specedge.tests.runtime.fake_chat import FakeReply, make_stats


def said(reply, printer=TextPrinter, **options):
    out = io.StringIO()
    speak(reply, printer(out, **options))
    return out.getvalue()


def test_a_reply_is_text_and_one_newline_at_its_end():
    assert said(FakeReply(["Hi", "", " there"])) == "Hi there\n"
    assert said(FakeReply(["Hi\n"])) == "Hi\n"


def test_controls_of_the_model_do_not_pass():
    assert said(FakeReply(["a\x1b", "]0;", "t\x07b\x9b", "2Jc"])) == "abc\n"


def test_painted_tokens_carry_the_colour_of_their_origin():
    assert said(FakeReply(["a", "b", "c"]), paint=True) == "\x1b[36ma\x1b[0m\x1b[32mb\x1b[0m\x1b[31mc\x1b[0m\n"


@pytest.mark.parametrize("held", ["", "\nUs"])
def test_json_events_add_up(held):
    lines = said(FakeReply(["Hi", "", "\x1b[1m é"], held=held), JsonPrinter).splitlines()
    events = [json.loads(line) for line in lines]
    *tokens, finish = events
    assert all(event["event"] == "token" and event["text"] for event in tokens)
    assert "".join(event["text"] for event in tokens) == finish["text"] == "Hi\x1b[1m é" + held
    assert finish["event"] == "finish" and finish["finish_reason"] == "stop"
    assert finish["prompt_ids"] == [1, 2, 3] and finish["ids"] == [100, 101, 102]
    assert finish["stats"]["alpha"] == pytest.approx(6 / 9)
    assert all(line.isascii() and line.isprintable() for line in lines)


def test_a_stopped_reply_keeps_what_was_said():
    reply = FakeReply(["a", "b", "c"])
    calls = iter([False, True])
    out = io.StringIO()
    finish = speak(reply, TextPrinter(out), lambda: next(calls))
    assert out.getvalue() == "ab\n" and reply.closed
    assert (finish.reason, finish.text) == ("cancelled", "ab")


def test_a_reply_that_fails_is_closed():
    reply = FakeReply(["a"], fails=NumericError("NaN"))
    out = io.StringIO()
    with pytest.raises(NumericError):
        speak(reply, TextPrinter(out))
    assert reply.closed and out.getvalue() == "a\n"


def test_one_interrupt_is_noted_and_the_second_raised():
    before = signal.getsignal(signal.SIGINT)
    with interruptible() as stopped:
        assert not stopped()
        os.kill(os.getpid(), signal.SIGINT)
        assert stopped()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_statistics_as_text():
    text = stats_text(make_stats(notes=("drafter failed:\x1b[31m NaN",), lossless=False))
    for part in (
        "120 ms",
        "30.0 tokens/s",
        "2.25",
        "0.67",
        "6 accepted of 9",
        "draft 90 ms",
        "verify 200 ms",
        "host 10 ms",
    ):
        assert part in text
    for part in ("not lossless", "3 of them cached", "512.0 MB", "drafter failed: NaN"):
        assert part in text


def test_statistics_of_a_reply_of_one_token():
    nothing = make_stats(tokens=1, passes=0, evaluated=0, accepted=0, decode_ms=0.0)
    assert "α            -" in stats_text(nothing)
    assert stats_json(nothing)["tau"] is None and stats_json(nothing)["tokens_per_second"] is None


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_progress(kind):
    out = kind()
    with Phases(out) as phases:
        for done in (0, 5, 10):
            phases("write target", done, 10)
        logging.getLogger("specedge.export").info("takes about %d MB\x1b[2J", 700)
        phases("finish\x1b[2J", 1, 1)
    assert "write target" in out.getvalue() and "takes about 700 MB" in out.getvalue() and "finish" in out.getvalue()
    assert "\x1b[2J" not in out.getvalue()
    if kind is io.StringIO:
        assert "\x1b" not in out.getvalue() and len(out.getvalue().splitlines()) == 5
    logger = logging.getLogger("specedge")
    assert not [handler for handler in logger.handlers if type(handler).__name__ == "_Lines"]
