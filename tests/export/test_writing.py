"""Texts written side by side are those that each would be alone."""

from __future__ import annotations

import numpy as np
import pytest

from specedge.export.decoder import write_decoder
from specedge.export.writing import answer_prompts, write_texts
from specedge.runtime.contracts import Draft
from specedge.runtime.errors import NumericError, UsageError
from specedge.runtime.graph import Decoder
from specedge.tests.reference import memory_checkpoint

CAPACITY = 96


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("writing")
    spec = write_decoder(memory_checkpoint(), folder, stem="target", precision="fp32", capacity=CAPACITY)
    decoder = Decoder(folder / spec.file, spec, threads=1)
    yield decoder
    decoder.close()


def alone(target, tokens):
    """Logits of every token of one sequence, [tokens, vocab]."""
    target.rewind(0)
    return target.forward(tokens[:1], Draft.chain(tokens[1:])).logits.copy()


def greedy(target, prompt, length, ends=()):
    """Plain decoding."""
    target.rewind(0)
    answer: list[int] = []
    pending = list(prompt)
    while len(answer) < length and (not answer or answer[-1] not in ends):
        pending = [int(target.forward(pending).logits[-1].argmax())]
        answer += pending
    return tuple(answer)


def test_rows_apart_give_the_logits_of_each_sequence_alone(target, rng):
    """A shared prefix, then rows of three sequences in any order, in two passes."""
    prefix, *rest = (rng.integers(160, size=size).tolist() for size in (4, 9, 6, 11))
    whose = np.repeat([0, 1, 2], [9, 6, 11])
    rng.shuffle(whose)
    numbers = np.array([(whose[:row] == who).sum() for row, who in enumerate(whose)])
    tokens = [rest[who][number] for who, number in zip(whose, numbers, strict=True)]
    owner = np.concatenate([np.full(4, -1), whose])
    total = len(owner)
    sees = (owner[:, None] == owner[None]) | (owner[None] == -1)
    sees &= np.tri(total, dtype=bool)
    target.rewind(0)
    target.forward(prefix)
    rows = []
    for first, last in ((0, 10), (10, 26)):
        part = slice(first, last)
        wanted = range(last - first)
        seen = sees[4 + first : 4 + last, : 4 + last]
        rows.append(target.forward_apart(tokens[part], (4 + numbers[part]).tolist(), seen, wanted))
    together = np.concatenate(rows)
    for who, sequence in enumerate(rest):
        reference = alone(target, prefix + sequence)[4:]
        assert np.abs(together[whose == who] - reference).max() < 1e-4


def test_rows_apart_must_fit(target):
    target.rewind(0)
    with pytest.raises(ValueError, match="do not fit"):
        target.forward_apart([1] * CAPACITY, [0] * CAPACITY, np.ones((CAPACITY, CAPACITY), bool), [0])
    with pytest.raises(ValueError, match="vocabulary of 160"):
        target.forward_apart([160], [0], np.ones((1, 1), bool), [0])


@pytest.mark.parametrize("count", [1, 5, 40])
def test_greedy_answers_are_those_of_plain_decoding(target, rng, count):
    """More prompts than run at once, and than the cache holds at once; some with a common beginning."""
    prompts = [[5, 6, 7][: number % 4] + rng.integers(160, size=1 + number % 7).tolist() for number in range(count)]
    texts = answer_prompts(target, prompts, length=12, ends=(3, 9, 77))
    assert [text.prompt for text in texts] == [tuple(prompt) for prompt in prompts]
    assert [text.answer for text in texts] == [greedy(target, prompt, 12, (3, 9, 77)) for prompt in prompts]


def test_prompts_longer_than_a_pass(tmp_path, rng):
    checkpoint = memory_checkpoint(max_position_embeddings=1024)
    spec = write_decoder(checkpoint, tmp_path, stem="target", precision="fp32", capacity=700)
    decoder = Decoder(tmp_path / spec.file, spec, threads=1)
    common = rng.integers(160, size=290).tolist()
    prompts = [common + rng.integers(160, size=size).tolist() for size in (300, 1, 20)]
    texts = answer_prompts(decoder, prompts, length=4, ends=())
    assert [text.answer for text in texts] == [greedy(decoder, prompt, 4) for prompt in prompts]
    decoder.close()


def test_a_seed_gives_its_texts_again_whatever_else_is_written(target):
    settings = {"length": 20, "starts": [[1]], "temperature": 3.0}
    first = write_texts(target, count=30, seed=4, **settings)
    assert first == write_texts(target, count=30, seed=4, **settings)
    assert first[:3] == write_texts(target, count=3, seed=4, **settings)
    assert first != write_texts(target, count=30, seed=5, **settings)
    assert len(set(first)) == 30
    assert all(text.prompt == (1,) and len(text.tokens) == 20 for text in first)


def test_samples_have_the_targets_law(target):
    """The first token of 3,000 texts, by its probability in four bins."""
    law = np.exp(alone(target, [1])[0].astype(np.float64) / 2.0)
    law /= law.sum()
    texts = write_texts(target, count=3000, length=2, starts=[[1]], temperature=2.0, seed=0)
    found = np.bincount([text.answer[0] for text in texts], minlength=160)
    for tokens in np.array_split(np.argsort(law), 4):
        share = law[tokens].sum()
        spread = np.sqrt(3000 * share * (1 - share))
        assert abs(found[tokens].sum() - 3000 * share) < 4 * spread + 1


def test_an_end_ends_a_text(target):
    texts = write_texts(target, count=40, length=30, starts=[[1]], seed=0, ends=range(80, 160))
    assert any(len(text.tokens) < 30 for text in texts)
    for text in texts:
        assert all(token < 80 for token in text.answer[:-1])
        assert text.answer[-1] >= 80 or len(text.tokens) == 30


def test_a_chat_is_a_question_and_its_answer(target):
    ends, reply = range(100, 160), [101, 7, 8]
    texts = write_texts(target, count=40, length=40, starts=[[1, 2]], seed=0, ends=ends, reply=reply)
    for text in texts:
        assert text.prompt[:2] == (1, 2)
        assert text.prompt[-3:] == (101, 7, 8)
        question = text.prompt[2:-3]
        assert all(token < 100 for token in question)
        assert len(question) <= 11
        assert all(token < 100 for token in text.answer[:-1])
        assert text.answer[-1] >= 100 or len(text.tokens) == 40
    assert {len(text.prompt) for text in texts} >= {16}  # a question that was cut
    assert min(len(text.prompt) for text in texts) < 16  # and one that ended


def test_no_text_is_begun_past_the_budget(target):
    texts = write_texts(target, count=500, length=20, starts=[[1]], seed=0, tokens=300)
    assert sum(len(text.tokens) for text in texts) == 300
    short = write_texts(target, count=500, length=20, starts=[[1]], seed=0, tokens=300, ends=range(120, 160))
    assert len(short) > len(texts)
    assert 280 < sum(len(text.tokens) for text in short) < 320


def test_progress_ends_at_what_was_written(target):
    seen: list[tuple[int, int]] = []
    write_texts(target, count=20, length=10, starts=[[1]], progress=lambda *step: seen.append(step))
    assert seen[-1] == (200, 200)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"starts": [[]]}, "is empty"),
        ({"starts": [[1] * 10], "length": 10}, "no room"),
        ({"starts": [[1] * 4], "length": 10, "reply": [1, 2, 3, 4]}, "no room"),
        ({"length": CAPACITY}, "95 fit"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
    ],
)
def test_bad_arguments(target, arguments, complaint):
    with pytest.raises(UsageError, match=complaint) as caught:
        write_texts(target, **{"count": 1, "length": 10, "starts": [[1]], **arguments})
    assert "\n" not in str(caught.value)


def test_a_prompt_that_leaves_no_room_is_named(target):
    with pytest.raises(UsageError, match="prompt 2"):
        answer_prompts(target, [[1], [1] * 90], length=6, ends=())
    assert answer_prompts(target, [], length=6, ends=()) == []


def test_numbers_that_are_not_finite_are_an_error(tmp_path):
    checkpoint = memory_checkpoint()
    checkpoint.tensors["model.norm.weight"][:] = np.nan
    spec = write_decoder(checkpoint, tmp_path, stem="target", precision="fp32", capacity=64)
    decoder = Decoder(tmp_path / spec.file, spec, threads=1)
    with pytest.raises(NumericError, match="another precision"):
        write_texts(decoder, count=1, length=4, starts=[[1]])
    decoder.close()
