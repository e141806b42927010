"""Harmful tokenizer files end in one kind of error, not in a panic, an abort or a full memory."""

from __future__ import annotations

import json

import pytest

from specedge.runtime.errors import BundleError, PromptError
from specedge.runtime.text import Text
from specedge.runtime.tokenizer import contained
from specedge.tests.small_tokenizers import byte_level, sentence_piece, size


def opened(raw, text=None, eos=(2,)):
    return Text(text or json.dumps(raw), {}, None, vocab_size=size(raw), eos=eos)


def model(**changes):
    raw = byte_level()
    return {**raw, "model": {**raw["model"], **changes}}


def added(**changes):
    raw = byte_level()
    raw["added_tokens"][2].update(changes)
    return raw


def replace(content, times=1, pattern=None):
    step = {"type": "Replace", "pattern": pattern or {"String": "a"}, "content": content}
    return {"type": "Sequence", "normalizers": [step] * times}


def merged(left, right):
    raw = byte_level()
    raw["model"]["merges"].append([left, right])
    return raw


HARMFUL = {
    "a merge without its result": merged("a", "b"),
    "a merge of what is not there": merged("the", "quick"),
    "padding to 4e9": byte_level(padding={"strategy": {"Fixed": 4_000_000_000}, "direction": "Right", "pad_id": 0,
                                          "pad_type_id": 0, "pad_token": "x", "pad_to_multiple_of": None}),
    "truncation": byte_level(truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst",
                                         "stride": 9}),
    "nine times ten": byte_level(normalizer=replace("a" * 10, 9)),
    "a long replacement": byte_level(normalizer=replace("a" * 1000)),
    "a long replacement by a pattern": byte_level(normalizer=replace("a" * 100, pattern={"Regex": "."})),
    "a long beginning": byte_level(normalizer={"type": "Prepend", "prepend": "a" * 10_000}),
    "nine times ten when decoding": byte_level(
        decoder={"type": "Sequence", "decoders": replace("a" * 10, 9)["normalizers"]}),
    "a bad charsmap": byte_level(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    "an added token far outside": added(id=2**32 - 1),
    "an added token below": added(id=-1),
    "an added token that is no text": added(content=7),
    "an added token under another's id": added(id=9),
    "a vocabulary that is larger than the model's": model(vocab={**byte_level()["model"]["vocab"], "zz": 9_999}),
    "ids that are no numbers": model(vocab={"a": "0"}),
    "no vocabulary": model(vocab=None),
    "an unknown kind of model": model(type="Magic"),
    "a post-processor with a token that is not there": byte_level(
        post_processor={"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}],
                        "pair": [], "special_tokens": {}}),
    "no model": {"version": "1.0"},
    "a list": [],
}  # fmt: skip


@pytest.mark.parametrize("name", HARMFUL)
def test_harmful_files_are_refused(name):
    raw = HARMFUL[name]
    with pytest.raises(BundleError, match=r"^bundle/tokenizer.json: ") as caught:
        Text(json.dumps(raw), {}, None, vocab_size=size(byte_level()), eos=(2,))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"model": NaN}', '"\x1b"'])
def test_what_is_no_json_is_refused(text):
    with pytest.raises(BundleError, match=r"^bundle/tokenizer.json: ") as caught:
        Text(text, {}, None, vocab_size=10)
    assert str(caught.value).isprintable()


def test_a_file_beyond_all_sizes_is_refused_unread():
    with pytest.raises(BundleError, match="allowed"):
        Text("x" * ((64 << 20) + 1), {}, None, vocab_size=10)


def test_an_end_of_text_that_is_not_in_the_vocabulary():
    with pytest.raises(BundleError, match="end-of-text"):
        Text(json.dumps(byte_level()), {}, None, vocab_size=50_000, eos=(40_000,))


def test_an_added_token_just_past_the_vocabulary_is_left_out():
    """Gemma 3 has one: the place of an image, which the text model has no row for."""
    raw = byte_level()
    raw["added_tokens"].append({**raw["added_tokens"][0], "id": size(raw), "content": "<image>"})
    text = opened(raw)
    assert max(text.encode("<image>")) < size(raw)
    assert text.decode(text.encode("<image>")) == "<image>"


def test_a_pattern_without_end_is_an_error(capfd):
    raw = byte_level(pre_tokenizer={"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated",
                                    "invert": False})  # fmt: skip
    text = opened(raw)
    with pytest.raises(BundleError, match="cannot encode"):
        text.encode("a" * 5_000 + "b")


def test_a_million_equal_characters_are_encoded():
    assert len(opened(byte_level()).encode("a" * (1 << 20))) == 1 << 20
    with pytest.raises(PromptError, match="shorten"):
        opened(byte_level()).encode("a" * ((1 << 20) + 1))


def test_the_small_tokenizers_are_whole():
    for raw in (byte_level(), sentence_piece()):
        text = opened(raw)
        assert text.decode(text.encode("the inn at 3.\n")) == "the inn at 3.\n"


class PanicException(BaseException):
    """Named as what the library raises."""


def test_panics_become_errors_and_interrupts_pass():
    with pytest.raises(BundleError, match=r"^here: boom"), contained("here"):
        raise PanicException("boom")
    for kind in (KeyboardInterrupt, SystemExit):
        with pytest.raises(kind), contained("here"):
            raise kind
