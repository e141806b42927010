"""A target that answers many questions at once gives each the answer it would give alone."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from specedge.export.calibration_texts import open_text
from specedge.export.checkpoint import ReplacedTensors
from specedge.export.sources import resolve
from specedge.runtime.errors import StorageError, UsageError
from specedge.train.answering import Question, answer_questions
from specedge.train.collect import row_facts
from specedge.train.questions import in_groups, read_questions
from specedge.train.shards import RowStore
from specedge.train.target import BatchTarget, load_target

TAPS = (0, 1)
ENDS = {7}


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint):
    return resolve(str(tiny_checkpoint))


@pytest.fixture(scope="module")
def decoder(checkpoint):
    return load_target(checkpoint)


def questions(count=11, temperature=0.0, length=9):
    random = np.random.default_rng(5)
    return [
        Question(n, tuple(random.integers(3, 300, 2 + n % 5).tolist()), length, temperature=temperature)
        for n in range(count)
    ]


def answers(decoder, asked, slots, seed=0):
    target = BatchTarget(decoder, slots, 32, TAPS, torch.float32)
    return {each.question.number: each for each in answer_questions(target, asked, ends=ENDS, seed=seed)}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_do_not_depend_on_what_is_answered_beside_them(decoder, temperature):
    alone, together = (answers(decoder, questions(temperature=temperature), slots) for slots in (1, 4))
    assert {n: each.tokens for n, each in alone.items()} == {n: each.tokens for n, each in together.items()}
    for number, one in alone.items():
        assert torch.allclose(one.rows.hidden.float(), together[number].rows.hidden.float(), atol=2e-2)


def test_greedy_answers_and_rows_are_those_of_one_pass_over_the_text(decoder):
    for number, answer in answers(decoder, questions(), 4).items():
        prompt = questions()[number].prompt
        ids = torch.tensor([[*prompt, *answer.tokens]])
        with torch.inference_mode():
            hidden = decoder.hidden(ids)[0, len(prompt) - 1 : -1]
            assert decoder.logits(hidden).argmax(-1).tolist() == list(answer.tokens)
        assert torch.allclose(answer.rows.hidden.float(), hidden, atol=2e-2)
        assert answer.rows.inner.shape == (len(answer.tokens), len(TAPS) * hidden.shape[1])
        assert len(answer.tokens) == 9 or answer.tokens[-1] in ENDS


def test_an_answer_that_is_given_is_taken_as_it_is(decoder):
    (written,) = answers(decoder, questions(1), 1).values()
    given = Question(0, questions(1)[0].prompt, 9, written.tokens)
    (found,) = answers(decoder, [given], 1).values()
    assert found.tokens == written.tokens
    assert torch.allclose(found.rows.hidden.float(), written.rows.hidden.float(), atol=2e-2)
    assert torch.allclose(found.rows.inner.float(), written.rows.inner.float(), atol=2e-2)


def test_a_store_goes_on_where_it_was_and_refuses_other_rows(decoder, tmp_path):
    found = answers(decoder, questions(), 4)
    store = RowStore(tmp_path / "rows", {"model": "one"})
    for number in (8, 3, 1):
        store.add(found[number])
    store.flush()
    again = RowStore(tmp_path / "rows", {"model": "one"})
    assert again.done() == {1, 3, 8}
    for number in set(found) - again.done():
        again.add(found[number])
    again.flush()
    rows = again.load()
    assert again.tokens() == len(rows) == sum(len(each.tokens) for each in found.values())
    assert rows.tokens.tolist() == [token for n in sorted(found) for token in found[n].tokens]
    assert (rows.hidden == torch.cat([found[n].rows.hidden for n in sorted(found)])).all()
    with pytest.raises(UsageError, match="of another model"):
        RowStore(tmp_path / "rows", {"model": "two"})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    with pytest.raises(UsageError, match="is not empty and holds no rows"):
        RowStore(tmp_path / "full", {})


# ---- files ----------------------------------------------------------------------------------


def lines(path, *objects):
    path.write_text("\n".join(json.dumps(each) for each in objects), encoding="utf-8")
    return path


def asked(checkpoint, *paths, **options):
    text, _ = open_text(checkpoint, 320)
    return read_questions(paths, text, **{"length": 8, "capacity": 200, "ends": {2}, **options})


def test_prompts_chats_and_texts_are_read(checkpoint, tmp_path):
    text, ends = open_text(checkpoint, 320)
    user, assistant = {"role": "user", "content": "who?"}, {"role": "assistant", "content": "the fox"}
    found = asked(
        checkpoint,
        lines(tmp_path / "a.jsonl", {"turns": ["who?", "why?"]}, {"messages": [user, assistant]}),
        lines(tmp_path / "b.jsonl", {"messages": [user]}, {"text": "the fox said hello"}),
        temperatures=(0.0, 0.7),
    )
    prompt = tuple(text.chat_prompt([user]))
    first, chat, open_chat, plain, *others = found.questions
    assert ends == {2}
    assert [each.prompt for each in (first, chat, open_chat)] == [prompt] * 3
    assert (first.answer, open_chat.answer) == ((), ())
    assert chat.answer == (*text.encode("the fox"), 2)
    assert plain.prompt + plain.answer == tuple(text.encode("the fox said hello"))
    assert [(each.number, each.temperature) for each in others] == [(4, 0.7), (6, 0.7)]  # what is given comes once
    assert found.prompts == 4
    assert [each.temperature for each in in_groups(found.questions, 1)] == [0.0] * 4 + [0.7] * 2


def test_lines_that_are_too_long_are_left_out_and_counted(checkpoint, tmp_path):
    path = lines(tmp_path / "a.jsonl", {"turns": ["who? " * 90]}, {"turns": ["who?"]})
    assert asked(checkpoint, path).left_out == 1
    with pytest.raises(UsageError, match="leaves room for an answer"):
        asked(checkpoint, path, capacity=9)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", r"a\.jsonl:1: not JSON"),
        ("[]", "not an object"),
        ("{}", "neither turns, messages nor text"),
        ('{"turns": []}', "neither turns"),
        ('{"turns": ["  "]}', "nothing is asked"),
        ('{"messages": "hello"}', "no list of roles and contents"),
        ('{"messages": [{"role": "assistant", "content": "hello"}]}', "nothing is asked"),
        ('{"messages": [{"role": "user"}]}', "no list of roles"),
    ],
)
def test_lines_that_are_none(checkpoint, tmp_path, line, said):
    (tmp_path / "a.jsonl").write_text(line)
    with pytest.raises(UsageError, match=said):
        asked(checkpoint, tmp_path / "a.jsonl")


def test_an_answer_has_no_begin_of_text(checkpoint, tmp_path):
    """A model whose tokenizer puts one before a text does not write one in the middle of a chat."""
    config = {**checkpoint.tokenizer.config, "add_bos_token": True, "bos_token": "<|endoftext|>"}
    text, _ = open_text(replace(checkpoint, tokenizer=replace(checkpoint.tokenizer, config=config)), 320)
    assert text.encode("the fox")[0] == 0
    said = [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "the fox"}]
    path = lines(tmp_path / "a.jsonl", {"messages": said})
    (found,) = read_questions([path], text, length=8, capacity=200, ends={2}).questions
    assert found.answer == (*text.encode_more("the fox"), 2)
    assert 0 not in found.answer


@pytest.mark.parametrize("damage", [b"", b"junk", b"\xff" * 64])
def test_damaged_shards_are_told(decoder, tmp_path, damage):
    store = RowStore(tmp_path / "rows", {"model": "one"})
    store.add(answers(decoder, questions(1), 1)[0])
    store.flush()
    (shard,) = (tmp_path / "rows").glob("rows-*")
    shard.write_bytes(damage)
    for read in (store.done, store.tokens, store.load):
        with pytest.raises(StorageError, match="is damaged; delete it"):
            read()


def test_rows_of_other_weights_are_not_taken(checkpoint):
    name = "model.norm.weight"
    other = replace(checkpoint, tensors=ReplacedTensors(checkpoint.tensors, {name: 2 * checkpoint.tensors[name]}))
    assert row_facts(checkpoint, questions(), TAPS, 0) != row_facts(other, questions(), TAPS, 0)


def test_a_file_that_is_not_there(checkpoint, tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        asked(checkpoint, tmp_path / "none.jsonl")
