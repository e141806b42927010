"""A conversation on a small real bundle: turns, what a change does to an open reply, saving and loading."""

from __future__ import annotations

import pytest

from specedge.runtime.engine import Engine
from specedge.runtime.errors import PromptError, UsageError
from specedge.runtime.events import Finish
from specedge.runtime.options import Options

SURROGATE = '{"messages": [{"role": "user", "content": "\\ud800"}]}'
FREE = Options(max_tokens=48, repetition_penalty=1.1, no_repeat_ngram=2)


@pytest.fixture
def engine(tiny_bundle):
    with Engine(tiny_bundle, threads=1) as engine:
        yield engine


def collect(generation):
    *tokens, finish = generation
    assert isinstance(finish, Finish)
    return tokens, finish


def test_a_chat_keeps_turns_and_reuses_the_cache(engine):
    chat = engine.chat("You are brief.", FREE)
    first = collect(chat.send("hello to the fox"))[1]
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant"]
    assert chat.messages[-1]["content"] == first.text
    second = collect(chat.send("and the dog"))[1]
    assert second.stats.cached_tokens > 10
    assert len(chat.messages) == 5
    again = collect(chat.regenerate())[1]
    assert again.ids == second.ids
    assert len(chat.messages) == 5
    with pytest.raises(PromptError, match="empty"):
        chat.send("   ")
    assert len(chat.messages) == 5
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "You are brief."}]
    with pytest.raises(PromptError, match="nothing to answer again"):
        chat.regenerate()


def test_a_turn_sent_before_the_reply_ended_keeps_what_was_said(engine):
    chat = engine.chat(options=FREE)
    reply = chat.send("hello")
    said = "".join(next(reply).text for _ in range(6))
    collect(chat.send("and then"))
    assert [message["role"] for message in chat.messages] == ["user", "assistant", "user", "assistant"]
    assert chat.messages[1]["content"] == said


def test_what_changes_a_chat_ends_its_open_reply_first(engine, tmp_path):
    chat = engine.chat(options=FREE)
    collect(chat.send("hello"))
    chat.save(tmp_path / "talk.json")
    for change in (lambda: setattr(chat, "system", "New."), lambda: chat.load(tmp_path / "talk.json")):
        reply = chat.send("more")
        next(reply)
        change()
        after = list(chat.messages)
        reply.close()
        assert chat.messages == after
        assert reply.finish.reason == "cancelled"


def test_a_turn_that_does_not_fit_changes_nothing(engine):
    chat = engine.chat()
    with pytest.raises(PromptError, match="shorten it"):
        chat.send("fox " * 3000)
    assert chat.messages == []


def test_a_chat_is_saved_and_loaded(engine, tmp_path):
    chat = engine.chat("Be brief.", FREE)
    collect(chat.send("hello"))
    chat.save(tmp_path / "talk.json")
    other = engine.chat()
    other.load(tmp_path / "talk.json")
    assert other.messages == chat.messages
    assert other.system == "Be brief."
    for text in (
        "{}",
        "[]",
        '{"messages": [{"role": "root", "content": "x"}]}',
        '{"messages": 3}',
        "\xff",
        "[" * 9999,
        SURROGATE,
    ):
        (tmp_path / "bad.json").write_text(text, encoding="latin-1")
        with pytest.raises(UsageError, match="not a conversation saved by /save"):
            other.load(tmp_path / "bad.json")
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        other.load(tmp_path / "none.json")
    assert other.messages == chat.messages
    assert [path.name for path in tmp_path.iterdir() if "part" in path.name] == []
