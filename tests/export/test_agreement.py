"""How a draft agrees with its target: against values worked out by hand, and against decoding itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import log_softmax

from specedge.export import agreement
from specedge.export.agreement import TargetLogits, measure, walk
from specedge.export.texts import Text
from specedge.runtime.contracts import Draft
from specedge.runtime.errors import NumericError, StorageError, UsageError
from specedge.runtime.loop import generate
from specedge.runtime.options import Options
from specedge.runtime.sampler import NumpySampler
from specedge.runtime.stopping import StopRule
from specedge.runtime.verifiers import Greedy
from specedge.tests.fakes import FakeTarget, FunctionDrafter, directing, fuzzy


def table(*rows):
    """Logits that depend on the last token: one row for each."""
    return lambda prefix: np.array(rows[prefix[-1]], np.float32)


HALF, QUARTER = math.log(1 / 2), math.log(1 / 4)
# After token 0: p = (1/2, 1/4, 1/4) and q = (1/4, 1/2, 1/4); after token 1: the same law, logits 3 apart.
TARGET = table([HALF, QUARTER, QUARTER], [QUARTER, HALF, QUARTER], [0, 0, 1])
DRAFT = table([QUARTER, HALF, QUARTER], [QUARTER + 3, HALF + 3, QUARTER + 3], [0, 0, 1])


def test_values_worked_out_by_hand():
    result = measure(FakeTarget(TARGET, 3), FakeTarget(DRAFT, 3), [Text((2, 0), (1, 2)), Text((1,), (0,))])
    assert result.tokens == 3
    first, second = result.texts
    # The first text has a row after 0 and a row after 1, the second a row after 1.
    assert (first.tokens, second.tokens) == (2, 1)
    assert first.alpha == 0.5 and second.alpha == 1.0 and result.alpha == pytest.approx(2 / 3)
    assert first.alpha_sampled == pytest.approx((3 / 4 + 1) / 2)
    assert first.kl == pytest.approx((math.log(2) / 2 - math.log(2) / 4) / 2)
    assert second.kl == pytest.approx(0, abs=1e-6)
    assert first.logit_error == pytest.approx((2 / 3 * math.log(2) + 0) / 2), "a row's mean shift does not count"
    assert first.nll == pytest.approx((math.log(2) + math.log(4)) / 2)
    assert first.target_nll == pytest.approx((math.log(4) + math.log(4)) / 2)
    assert second.nll == second.target_nll == pytest.approx(math.log(4))
    assert result.nll == pytest.approx((2 * first.nll + second.nll) / 3)
    assert first.tau == {2: 1.0, 4: 1.0, 8: 1.0}, "one token after the first, one pass"
    assert second.tau == {2: None, 4: None, 8: None}


def test_each_number_against_float64():
    """Longer than one pass and one step, with a random model."""
    vocab, noise = 37, 0.7
    target = fuzzy(vocab, 1)
    draft = fuzzy(vocab, 2, like=target, noise=noise)
    random = np.random.default_rng(0)
    texts = [
        Text(tuple(random.integers(vocab, size=5).tolist()), tuple(random.integers(vocab, size=size).tolist()))
        for size in (1, 2, 128, 129, 130, 300)
    ]
    result = measure(FakeTarget(target, vocab, 400), FakeTarget(draft, vocab, 400), texts)
    for text, found in zip(texts, result.texts, strict=True):
        prefixes = [text.prompt + text.answer[:at] for at in range(len(text.answer))]
        z_p, z_q = (np.array([of(prefix) for prefix in prefixes], np.float64) for of in (target, draft))
        log_p, log_q = log_softmax(z_p, axis=1), log_softmax(z_q, axis=1)
        centred = (z_q - z_q.mean(1, keepdims=True)) - (z_p - z_p.mean(1, keepdims=True))
        row = np.arange(len(prefixes))
        assert found.tokens == len(text.answer)
        assert found.alpha == pytest.approx((z_p.argmax(1) == z_q.argmax(1)).mean())
        assert found.alpha_sampled == pytest.approx(np.minimum(np.exp(log_p), np.exp(log_q)).sum(1).mean(), rel=1e-5)
        assert found.kl == pytest.approx((np.exp(log_p) * (log_p - log_q)).sum(1).mean(), rel=1e-4)
        assert found.logit_error == pytest.approx(np.abs(centred).mean(), rel=1e-5)
        assert found.nll == pytest.approx(-log_q[row, text.answer].mean(), rel=1e-5)
        assert found.target_nll == pytest.approx(-log_p[row, text.answer].mean(), rel=1e-5)
    assert result.tokens == 690
    assert result.alpha == pytest.approx(sum(one.alpha * one.tokens for one in result.texts) / 690)


def test_a_model_agrees_with_itself():
    model = fuzzy(20, 3)
    result = measure(FakeTarget(model, 20), FakeTarget(model, 20), [Text((1, 2), tuple(range(13)))])
    assert (result.alpha, result.kl, result.logit_error) == (1.0, 0.0, 0.0)
    assert result.alpha_sampled == pytest.approx(1)
    assert result.tau == {2: 12 / 4, 4: 12 / 3, 8: 12 / 2}, "12 tokens after the first: by 3, by 5, by 9"


@pytest.mark.parametrize(
    ("agrees", "length", "expected"),
    [
        ("", 4, (0, 0)),
        ("1", 4, (0, 0)),
        ("01111", 2, (4, 2)),  # the first is the prompt's pass; then 2 + 1, then 1
        ("1001", 8, (3, 3)),  # wrong, wrong, right: a pass each
        ("11110111", 4, (7, 2)),  # 3 + 1, then 3
        ("10101010", 1, (7, 4)),  # wrong; right and a bonus; right and a bonus; right and a bonus
        ("11111111", 0, (7, 7)),
    ],
)
def test_the_walk(agrees, length, expected):
    assert walk([letter == "1" for letter in agrees], length) == expected


@pytest.mark.parametrize("length", [1, 2, 4, 8])
def test_tau_is_what_greedy_decoding_gives(length):
    vocab, tokens = 12, 60
    target = fuzzy(vocab, 5)
    guess = fuzzy(vocab, 6, like=target, noise=1.0)
    prompt = (1, 2, 3)

    def drafted(tokens, budget):
        guesses = []
        for _ in range(budget):
            guesses.append(int(guess((*tokens, *guesses)).argmax()))
        return Draft.chain(guesses)

    answer: list[int] = []
    for _ in range(tokens):
        answer.append(int(target(prompt + tuple(answer)).argmax()))
    measured = measure(
        FakeTarget(target, vocab), FakeTarget(guess, vocab), [Text(prompt, tuple(answer))], draft_lengths=[length]
    )
    rounds = list(
        generate(
            FakeTarget(target, vocab),
            directing(FunctionDrafter(drafted), length),
            Greedy(),
            NumpySampler(Options(), len(prompt), 0),
            list(prompt),
            StopRule((), tokens, lambda token: ("", False)),
        )
    )
    assert [token for one in rounds for token in one.tokens] == answer
    assert measured.tau[length] == pytest.approx((tokens - 1) / (len(rounds) - 1))
    assert 0.2 < measured.alpha < 0.95, "a draft that is always right or wrong would prove little"


def test_several_drafts_on_one_run_of_the_target(tmp_path):
    target = FakeTarget(fuzzy(9, 1), 9)
    texts = [Text((1,), (2, 3, 4)), Text((5, 6), (7,))]
    told = []
    logits = TargetLogits.record(target, texts, tmp_path, lambda *done: told.append(done))
    assert logits.tokens == 4
    assert target.passes == 2 and told == [(0, 2), (1, 2), (2, 2)]
    for seed in (1, 2):
        draft = fuzzy(9, seed)
        assert logits.nll == pytest.approx(logits.measure(FakeTarget(draft, 9)).target_nll, rel=1e-6)
        assert logits.measure(FakeTarget(draft, 9)) == measure(FakeTarget(fuzzy(9, 1), 9), FakeTarget(draft, 9), texts)
    assert target.passes == 2
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [4 * 9 * 4]


def test_padding_of_a_vocabulary_is_left_out():
    def padded(prefix):
        return np.concatenate([DRAFT(prefix), np.full(5, 99, np.float32)])

    texts = [Text((2, 0), (1, 2))]
    plain = measure(FakeTarget(TARGET, 3), FakeTarget(DRAFT, 3), texts)
    assert measure(FakeTarget(TARGET, 3), FakeTarget(padded, 8), texts) == plain


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite(bad):
    broken = table([0, bad, 0], [0, 1, 2], [0, 1, 2])
    texts = [Text((2,), (1, 2)), Text((2, 0), (1,))]
    with pytest.raises(NumericError, match="the draft computes NaN or infinity"):
        measure(FakeTarget(TARGET, 3), FakeTarget(broken, 3), texts)
    with pytest.raises(NumericError, match="the target computes NaN or infinity"):
        measure(FakeTarget(broken, 3), FakeTarget(DRAFT, 3), texts)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "no text to measure on"),
        ([Text((1,), (2,)), Text((), (1,))], "text 2: its prompt is empty"),
        ([Text((1,), ())], "text 1: its answer is empty"),
        ([Text((1,) * 10, (2,) * 7)], "text 1: 17 tokens where the cache holds 16"),
    ],
)
def test_texts_that_cannot_be_measured(texts, message):
    with pytest.raises(UsageError, match=message):
        measure(FakeTarget(TARGET, 3, 16), FakeTarget(DRAFT, 3, 16), texts)


def test_a_full_disk():
    class Full:
        def __truediv__(self, name):
            return self

        def __str__(self):
            return "somewhere"

        def open(self, mode):
            raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match=r"somewhere: cannot be written \(No space left on device\)"):
        TargetLogits.record(FakeTarget(TARGET, 3), [Text((1,), (2,))], Full())


def test_passes_are_no_wider_than_they_need_to_be():
    draft = FakeTarget(fuzzy(9, 1), 9, 512)
    measure(FakeTarget(fuzzy(9, 1), 9, 512), draft, [Text((1, 2), (3,) * 300)])
    assert draft.passes == math.ceil(300 / agreement._PASS_ROWS)
