"""Text arrives in whole characters, and a stop text cuts it at the same place however tokens are split."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from specedge.runtime.stream import Reply
from specedge.runtime.text import Text
from specedge.tests.small_tokenizers import CHATML, byte_level, sentence_piece, size

KINDS = {}
for name, raw in (("bytes", byte_level()), ("pieces", sentence_piece())):
    text = Text(json.dumps(raw), {}, CHATML, vocab_size=size(raw), eos=(2,))
    KINDS[name] = (text, Tokenizer.from_str(json.dumps(raw)))

ANY_TEXT = st.text(alphabet=st.characters(codec="utf-8"), max_size=30)


def parts(text, ids):
    stream = text.stream()
    return [*map(stream.push, ids), stream.flush()]


@pytest.mark.parametrize("kind", KINDS)
@given(said=ANY_TEXT)
def test_characters_arrive_whole(kind, said):
    text, library = KINDS[kind]
    ids = text.encode(said)
    assert "".join(parts(text, ids)) == library.decode(ids, skip_special_tokens=True)
    if "\ufffd" not in said:
        assert not any("\ufffd" in part for part in parts(text, ids))


@given(ids=st.lists(st.integers(0, size(byte_level()) - 1), max_size=60))
def test_any_bytes_decode_as_the_library_decodes_them(ids):
    text, library = KINDS["bytes"]
    assert "".join(parts(text, ids)) == library.decode(ids, skip_special_tokens=True)


@given(ids=st.lists(st.integers(128, 258), min_size=8, max_size=40))
def test_long_runs_of_broken_bytes_come_out_while_they_run(ids):
    text, library = KINDS["bytes"]
    streamed = parts(text, ids)
    assert "".join(streamed) == library.decode(ids, skip_special_tokens=True)


def test_an_endless_run_of_broken_bytes_is_not_held_for_ever():
    text, _ = KINDS["bytes"]
    lone = byte_level()["model"]["vocab"]["ł"]  # a continuation byte
    assert "".join(parts(text, [lone] * 500)[:-1]).count("\ufffd") > 400


def test_half_a_character_is_said_at_the_end_only():
    for text, _ in KINDS.values():
        ids = text.encode("a🙂")
        assert "".join(parts(text, ids[:-1])[:-1]) == "a"
        assert set(parts(text, ids[:-1])[-1]) == {"\ufffd"}


def test_the_first_space_of_a_continuation_stays():
    text, _ = KINDS["pieces"]
    ids = text.encode("in the a")
    reply = Reply(text, after=ids[:-2])
    assert "".join(reply.push(token)[0] for token in ids[-2:]) == " the a"
    assert text.decode(ids[-2:]) == "the a"


def test_control_tokens_have_no_text():
    for text, _ in KINDS.values():
        assert parts(text, [1, 2]) == ["", "", ""]


def reply(text, stops, pieces):
    """Runs pieces of text through a Reply as if each were a token."""

    class Pieces:
        def stream(self, after=()):
            class Stream:
                def push(self, number):
                    return pieces[number]

                def flush(self):
                    return ""

            return Stream()

    made = Reply(Pieces(), stops)
    visible = []
    for number in range(len(pieces)):
        part, stopped = made.push(number)
        visible.append(part)
        if stopped:
            break
    return visible, made


@given(
    said=st.text(alphabet="ab\n", max_size=25),
    stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 25), max_size=8),
)
def test_a_stop_text_cuts_at_the_same_place_however_tokens_are_split(said, stops, cuts):
    edges = sorted({0, len(said), *(cut for cut in cuts if cut < len(said))})
    pieces = [said[start:end] for start, end in pairwise(edges)]
    ends = [(said.find(stop) + len(stop), said.find(stop)) for stop in stops if stop in said]
    expected = said[: min(ends)[1]] if ends else said
    visible, made = reply(None, stops, pieces)
    assert made.stopped == bool(ends)
    assert "".join(visible) + made.flush() == expected
    for shown in range(len(visible)):
        assert expected.startswith("".join(visible[: shown + 1]))


def test_only_what_may_begin_a_stop_text_is_held_back():
    visible, made = reply(None, ("\nUser:",), ["Hi", "\n", "Us", "ing it", "\nUser", ":", "never"])
    assert visible == ["Hi", "", "", "\nUsing it", "", ""]
    assert made.stopped and made.flush() == ""
    assert made.push(0) == ("", True)
