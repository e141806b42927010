from __future__ import annotations

import timeit

import numpy as np
import pytest
from scipy.stats import chi2_contingency, chisquare

from specedge.runtime.contracts import Context, Draft, Floats
from specedge.runtime.errors import NumericError, UsageError
from specedge.runtime.options import Options
from specedge.runtime.sampler import NumpySampler
from specedge.runtime.verifiers import Greedy

LAW_TOLERANCE = {"transformers, float32": 2e-6, "own reference, float64": 1e-12}
VOCAB = 49_152
GOLDEN = [11, 30, 45, 48, 43, 41, 45, 45]


def logits(seed: int, vocab: int = 500, spread: float = 3.0) -> Floats:
    return (spread * np.random.default_rng(seed).standard_normal(vocab)).astype(np.float32)


def prefix(seed: int, vocab: int = 500, length: int = 60) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed + 1000).integers(0, vocab // 20, length)]


def sampler(prompt_length: int = 20, seed: int = 7, **options: object) -> NumpySampler:
    return NumpySampler(Options(**options), prompt_length, seed)  # type: ignore[arg-type]


# ---- laws -----------------------------------------------------------------------------------

FILTERS = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 40},
    {"temperature": 1.0, "top_k": 10_000},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.01},
    {"temperature": 5.0, "top_p": 0.95},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "repetition_penalty": 0.7},
    {"temperature": 1.0, "no_repeat_ngram": 1},
    {"temperature": 1.0, "no_repeat_ngram": 2},
    {"temperature": 1.0, "no_repeat_ngram": 3},
    {"temperature": 0.9, "top_k": 30, "top_p": 0.8, "repetition_penalty": 1.2, "no_repeat_ngram": 2},
]


@pytest.mark.both
@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_law_is_that_of_transformers(options: dict[str, float], seed: int) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: laws are not compared with transformers'")
    process = pytest.importorskip(
        "transformers.generation.logits_process", reason="transformers is not installed: laws are not compared"
    )
    steps = [
        ("repetition_penalty", process.RepetitionPenaltyLogitsProcessor),
        ("no_repeat_ngram", process.NoRepeatNGramLogitsProcessor),
        ("temperature", process.TemperatureLogitsWarper),
        ("top_k", process.TopKLogitsWarper),
        ("top_p", process.TopPLogitsWarper),
        ("min_p", process.MinPLogitsWarper),
    ]
    row, seen = logits(seed), prefix(seed)
    scores = torch.from_numpy(row.copy())[None]
    for name, step in steps:
        if name in options:
            scores = step(options[name])(torch.tensor([seen]), scores)
    expected = torch.softmax(scores.double(), -1)[0].numpy()
    law = sampler(**options).law(row, seen)
    assert law.dtype == np.float64 and abs(law.sum() - 1) < 1e-12
    assert np.array_equal(law > 0, expected > 0)
    np.testing.assert_allclose(law, expected, atol=LAW_TOLERANCE["transformers, float32"])


@pytest.mark.parametrize("presence", [0.0, 0.7, -0.4])
@pytest.mark.parametrize("frequency", [0.0, 0.3, -0.2])
def test_presence_and_frequency_count_the_reply_only(presence: float, frequency: float) -> None:
    row, seen = logits(3), prefix(3)
    expected = row.astype(np.float64)
    for token in set(seen[20:]):
        expected[token] -= presence + frequency * seen[20:].count(token)
    expected = np.exp(expected - expected.max())
    law = sampler(temperature=1.0, presence_penalty=presence, frequency_penalty=frequency).law(row, seen)
    np.testing.assert_allclose(law, expected / expected.sum(), atol=LAW_TOLERANCE["own reference, float64"])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("spread", [0.0, 0.001, 3.0, 40.0])
def test_top_p_equals_a_full_sort(temperature: float, top_p: float, spread: float) -> None:
    row = logits(11, 5_000, spread)
    probabilities = np.exp((row.astype(np.float64) - row.max()) / temperature)
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities, kind="stable")
    above = np.cumsum(probabilities[order]) - probabilities[order]
    expected = np.zeros_like(probabilities)
    kept = order[above < top_p - 1e-12] if top_p < 1 else order
    expected[kept] = probabilities[kept]
    law = sampler(temperature=temperature, top_p=top_p).law(row, [])
    np.testing.assert_allclose(law, expected / expected.sum(), atol=LAW_TOLERANCE["own reference, float64"])


@pytest.mark.parametrize("vocab", [1, 31, 32, 500, 5_003, VOCAB])
@pytest.mark.parametrize("top_k", [1, 2, 40, 1_000])
def test_top_k_equals_a_full_sort(vocab: int, top_k: int) -> None:
    for row in (logits(1, vocab), np.round(logits(2, vocab)), np.sort(logits(3, vocab)), np.zeros(vocab, np.float32)):
        least = np.sort(row)[-min(top_k, vocab)]  # ties with it stay
        law = sampler(temperature=1.0, top_k=top_k).law(row, [])
        assert np.array_equal(np.flatnonzero(law), np.flatnonzero(row >= least))


def test_temperature_zero_is_one_hot_at_the_penalised_argmax() -> None:
    row = np.array([2.0, 1.9, -1.0], np.float32)
    assert sampler(0).law(row, [0]).tolist() == [1.0, 0.0, 0.0]
    assert sampler(0, repetition_penalty=1.5).law(row, [0]).tolist() == [0.0, 1.0, 0.0]
    assert sampler(0, presence_penalty=0.5).greedy_token(row, [0]) == 1
    assert sampler(1, presence_penalty=0.5).greedy_token(row, [0]) == 0


def test_logits_are_left_alone() -> None:
    row, seen = logits(1), prefix(1)
    copy = row.copy()
    sampler(temperature=0.5, top_p=0.5, repetition_penalty=2.0, no_repeat_ngram=2).law(row, seen)
    assert np.array_equal(row, copy)


def test_rows_of_different_paths_do_not_see_each_other() -> None:
    options = {"temperature": 1.0, "repetition_penalty": 1.4, "frequency_penalty": 0.3, "no_repeat_ngram": 2}
    common, rng = prefix(5, length=400), np.random.default_rng(5)
    shared = sampler(**options)
    for step in range(60):
        cut = int(rng.integers(0, 400)) if step % 7 == 0 else 400
        seen = [*common[:cut], *(int(token) for token in rng.integers(0, 25, rng.integers(0, 9)))]
        row = logits(step)
        assert np.array_equal(shared.law(row, tuple(seen)), sampler(**options).law(row, seen))


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"repetition_penalty": 1.1}], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite(options: dict[str, float], bad: float) -> None:
    row = logits(2)
    row[123] = bad
    with pytest.raises(NumericError, match="not finite at position 60"):
        sampler(**options).law(row, prefix(2))
    with pytest.raises(NumericError):
        sampler(**options).token(row, prefix(2))
    with pytest.raises(NumericError):
        sampler(**options).law(np.full(5, -np.inf, np.float32), [])


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_forbidden_tokens_have_no_probability(options: dict[str, float]) -> None:
    row = logits(2)
    row[::2] = -np.inf
    law = sampler(**options).law(row, prefix(2))
    assert not law[::2].any() and abs(law.sum() - 1) < 1e-12


def test_penalties_that_leave_no_token() -> None:
    with pytest.raises(UsageError, match="raise no_repeat_ngram"):
        sampler(0, no_repeat_ngram=1).law(np.zeros(3, np.float32), [0, 1, 2])


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 100.0])
def test_extreme_temperatures(temperature: float) -> None:
    law = sampler(temperature=temperature).law(logits(4), [])
    assert abs(law.sum() - 1) < 1e-12 and law.argmax() == logits(4).argmax()


# ---- draws ----------------------------------------------------------------------------------


def test_draws_depend_on_seed_position_and_stream_alone() -> None:
    law = sampler(temperature=1.0).law(logits(1), [])
    first = [sampler(seed=9).draw(law, position, 1) for position in range(200)]
    again = sampler(seed=9)
    for position in reversed(range(200)):
        again.accept(0.5, position)
        again.draw(law, position, 0)
        assert again.draw(law, position, 1) == first[position]
    assert first != [sampler(seed=10).draw(law, position, 1) for position in range(200)]


def test_draws_do_not_change_between_versions() -> None:
    """A seed is a promise: whoever changes these tokens breaks it, and says so in the CHANGELOG."""
    law = sampler(temperature=1.0).law(np.linspace(-2, 2, 50).astype(np.float32), [])
    assert [sampler(seed=1).draw(law, position) for position in range(8)] == GOLDEN


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_token_is_a_draw_from_the_law(options: dict[str, float]) -> None:
    ours = sampler(**options)
    for seed in range(20):
        row, seen = logits(seed), prefix(seed)
        assert ours.token(row, seen) == ours.draw(ours.law(row, seen), len(seen))


@pytest.mark.parametrize("stream", [0, 1, 2])
def test_draws_have_the_law(stream: int) -> None:
    law = np.array([0.5, 0.25, 0.0, 0.2, 0.04, 0.01])
    ours = sampler()
    counts = np.bincount([ours.draw(law, position, stream) for position in range(100_000)], minlength=len(law))
    assert counts[2] == 0
    assert chisquare(counts[law > 0], law[law > 0] * 100_000).pvalue > 1e-3


def test_tests_have_their_probability() -> None:
    ours = sampler()
    for probability in (0.001, 0.3, 0.75):
        hits = sum(ours.accept(probability, position, 3) for position in range(50_000))
        assert chisquare([hits, 50_000 - hits], [50_000 * probability, 50_000 * (1 - probability)]).pvalue > 1e-3
    assert all(ours.accept(1.0, position) and not ours.accept(0.0, position) for position in range(1_000))


def test_streams_tests_positions_and_seeds_are_independent() -> None:
    """Every pair of the decisions that a round may make at one place, and of neighbouring places."""
    law, count = np.full(4, 0.25), 20_000
    decisions = {f"stream {s}": [sampler(seed=1).draw(law, p, s) for p in range(count)] for s in range(3)}
    decisions |= {f"trial {t}": [sampler(seed=1).accept(0.5, p, t) for p in range(count)] for t in range(3)}
    decisions["next position"] = [*decisions["stream 0"][1:], 0]
    decisions["next seed"] = [sampler(seed=2).draw(law, p) for p in range(count)]
    names = list(decisions)
    for i, one in enumerate(names):
        for other in names[:i]:
            table = np.zeros((4, 4))
            np.add.at(table, (np.array(decisions[one], int), np.array(decisions[other], int)), 1)
            table = table[table.any(1)][:, table.any(0)]
            assert chi2_contingency(table).pvalue > 1e-4, f"{one} and {other} are not independent"


def test_a_law_of_one_token_or_none() -> None:
    one_hot = np.zeros(VOCAB)
    one_hot[VOCAB - 1] = 1.0
    assert all(sampler().draw(one_hot, position) == VOCAB - 1 for position in range(50))
    with pytest.raises(ValueError, match="no probability"):
        sampler().draw(np.zeros(4), 0)


def test_shared_random_numbers_make_two_laws_agree() -> None:
    """The bound of arXiv 2408.07978, (1 - TV) / (1 + TV); two draws of their own agree far less."""
    ours, agreed, apart = sampler(), 0, 0
    rng = np.random.default_rng(0)
    p, q = (rng.dirichlet(np.full(50, 0.3)) for _ in range(2))
    q = 0.85 * p + 0.15 * q
    distance = 0.5 * np.abs(p - q).sum()
    for position in range(20_000):
        token = ours.draw(p, position)
        agreed += token == ours.draw(q, position)
        apart += token == ours.draw(q, position, 1)
    assert agreed / 20_000 > (1 - distance) / (1 + distance) - 0.01
    assert apart / 20_000 == pytest.approx(float(p @ q), abs=0.02)


# ---- time -----------------------------------------------------------------------------------


def test_a_greedy_round_of_width_8_takes_a_millisecond_at_most() -> None:
    rows = np.stack([logits(seed, VOCAB) for seed in range(8)])
    draft = Draft.chain([int(row.argmax()) for row in rows[:7]])
    context = Context(list(range(1_000)), None, sampler())
    verdict = Greedy().judge(draft, rows, context)
    assert len(verdict.path) == 7
    seconds = min(timeit.repeat(lambda: Greedy().judge(draft, rows, context), number=10, repeat=20)) / 10
    assert seconds <= 1e-3
