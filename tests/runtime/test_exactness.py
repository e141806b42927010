"""Proofs that a verifier's text has the target's law: every outcome enumerated in Fractions, and chi-square."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache, partial

import numpy as np
import pytest
from scipy.stats import chisquare

from specedge.runtime import verifiers
from specedge.runtime.contracts import Context, Draft, Sampler, Verdict, Verifier
from specedge.runtime.options import Options
from specedge.runtime.sampler import NumpySampler
from specedge.runtime.verifiers import Exact, Rejection
from specedge.tests.fakes import GridSampler, LawOf, outcomes, random_tree, toy_law, toy_logits

PROMPT = (1, 0)
DRAWS = 100_000
MakeDraft = Callable[[Sampler], Draft]
Plant = Callable[[LawOf, pytest.MonkeyPatch], MakeDraft]


# ---- drafts ---------------------------------------------------------------------------------


def fixed(draft: Draft) -> MakeDraft:
    return lambda sampler: draft


def sampled_chain(q: LawOf, length: int, width: int | None = None) -> MakeDraft:
    """A chain drawn from q, with its laws; `width` cuts the rows to a narrower vocabulary."""

    def make(sampler: Sampler) -> Draft:
        tokens: list[int] = []
        laws = []
        for _ in range(length):
            laws.append(q((*PROMPT, *tokens)))
            tokens.append(sampler.draw(laws[-1], len(PROMPT) + len(tokens), 1))
        return Draft.chain(tokens, np.stack(laws)[:, :width])

    return make


def sampled_tree(q: LawOf, parents: tuple[int, ...], replace: bool, one_hot: frozenset[int] = frozenset()) -> MakeDraft:
    """A tree drawn from q. Nodes in `one_hot` are set to a token and have a one-hot row."""

    def make(sampler: Sampler) -> Draft:
        tokens: list[int] = []
        laws = []
        paths: list[tuple[int, ...]] = []
        for node, parent in enumerate(parents):
            path = paths[parent] if parent >= 0 else ()
            law = q((*PROMPT, *path))
            if not replace:
                for sibling in range(node):
                    if parents[sibling] == parent:
                        law[tokens[sibling]] = Fraction(0)
            if node in one_hot or not sum(law):
                law = np.array([Fraction(token == node % len(law)) for token in range(len(law))], dtype=object)
            laws.append(law / sum(law))
            tokens.append(sampler.draw(laws[-1], len(PROMPT) + len(path), 1))
            paths.append((*path, tokens[-1]))
        return Draft(tuple(tokens), parents, np.stack(laws))

    return make


def shared_chain(q: LawOf, length: int) -> MakeDraft:
    """A chain that shares the target's random numbers: drawn from q on stream 0."""

    def make(sampler: Sampler) -> Draft:
        tokens: list[int] = []
        for _ in range(length):
            tokens.append(sampler.draw(q((*PROMPT, *tokens)), len(PROMPT) + len(tokens), 0))
        return Draft.chain(tokens)

    return make


def mislabelled_chain(q: LawOf, length: int) -> MakeDraft:
    """A planted bias: the likeliest token of q, handed over as if it had been drawn from q."""

    def make(sampler: Sampler) -> Draft:
        tokens: list[int] = []
        laws = []
        for _ in range(length):
            laws.append(q((*PROMPT, *tokens)))
            tokens.append(int(np.argmax(laws[-1])))
        return Draft.chain(tokens, np.stack(laws))

    return make


# ---- one round ------------------------------------------------------------------------------


def judged(verifier: Verifier, p: LawOf, draft: Draft, sampler: Sampler) -> Verdict:
    prefixes = [PROMPT]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        prefixes.append((*prefixes[parent + 1], token))
    return verifier.judge(draft, np.stack([p(prefix) for prefix in prefixes]), Context(PROMPT, None, sampler))


def one_round(verifier: Verifier, p: LawOf, make: MakeDraft, sampler: Sampler) -> tuple[int, ...]:
    """The tokens that one round commits."""
    draft = make(sampler)
    verdict = judged(verifier, p, draft, sampler)
    return (*(draft.tokens[node] for node in verdict.path), verdict.token)


def completed(law: dict[tuple[int, ...], Fraction], p: LawOf, length: int) -> dict[tuple[int, ...], Fraction]:
    """The joint law of `length` tokens, where the target itself goes on after what `law` says."""
    joint: dict[tuple[int, ...], Fraction] = {}
    todo = list(law.items())
    while todo:
        tokens, weight = todo.pop()
        if len(tokens) >= length:
            joint[tokens[:length]] = joint.get(tokens[:length], Fraction(0)) + weight
        else:
            todo += [((*tokens, t), weight * c) for t, c in enumerate(p((*PROMPT, *tokens))) if c > 0]
    return joint


def round_law(verifier: Verifier, p: LawOf, make: MakeDraft, length: int) -> dict[tuple[int, ...], Fraction]:
    return completed(outcomes(partial(one_round, verifier, p, make)), p, length)


def own_law(p: LawOf, length: int) -> dict[tuple[int, ...], Fraction]:
    return completed({(): Fraction(1)}, p, length)


# ---- every outcome --------------------------------------------------------------------------


@pytest.mark.parametrize("verifier", [Exact(), Rejection()], ids=lambda v: v.name)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("gamma", [0, 1, 2, 3])
def test_deterministic_chain(verifier: Verifier, seed: int, gamma: int) -> None:
    p, rng = toy_law(3, seed), random.Random(seed)
    draft = Draft.chain([rng.randrange(3) for _ in range(gamma)])
    assert round_law(verifier, p, fixed(draft), gamma + 1) == own_law(p, gamma + 1)


@pytest.mark.parametrize("verifier", [Exact(), Rejection()], ids=lambda v: v.name)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_sampled_chain(verifier: Verifier, seed: int, gamma: int) -> None:
    p, q = toy_law(3, seed), toy_law(3, seed + 100)
    assert round_law(verifier, p, sampled_chain(q, gamma), gamma + 1) == own_law(p, gamma + 1)


@pytest.mark.parametrize("seed", range(3))
def test_draft_that_equals_the_target_is_always_accepted(seed: int) -> None:
    p = toy_law(3, seed)
    law = outcomes(partial(one_round, Rejection(), p, sampled_chain(p, 2)))
    assert law == own_law(p, 3)


@pytest.mark.parametrize("verifier", [Exact(), Rejection()], ids=lambda v: v.name)
@pytest.mark.parametrize("seed", range(6))
def test_deterministic_tree(verifier: Verifier, seed: int) -> None:
    p, draft = toy_law(3, seed), random_tree(random.Random(seed), 6, 3)
    assert round_law(verifier, p, fixed(draft), 7) == own_law(p, 7)


@pytest.mark.parametrize("verifier", [Exact(), Rejection()], ids=lambda v: v.name)
@pytest.mark.parametrize("replace", [False, True], ids=["without", "with"])
@pytest.mark.parametrize("parents", [(-1, -1), (-1, -1, -1), (-1, -1, 0, 0), (-1, 0, -1, 0, 2)], ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_sampled_tree(verifier: Verifier, replace: bool, parents: tuple[int, ...], seed: int) -> None:
    p, q = toy_law(3, seed), toy_law(3, seed + 50)
    assert round_law(verifier, p, sampled_tree(q, parents, replace), 3) == own_law(p, 3)


@pytest.mark.parametrize("one_hot", [{0}, {1}, {2}, {0, 2}, {1, 3}], ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_mixed_tree(one_hot: set[int], seed: int) -> None:
    p, q = toy_law(3, seed), toy_law(3, seed + 70)
    make = sampled_tree(q, (-1, -1, 0, 0, -1), False, frozenset(one_hot))
    assert round_law(Rejection(), p, make, 3) == own_law(p, 3)


@pytest.mark.parametrize("verifier", [Exact(), Rejection()], ids=lambda v: v.name)
def test_sibling_drafted_twice(verifier: Verifier) -> None:
    p = toy_law(3, 5)
    draft = Draft((1, 1, 0, 2, 2), (-1, -1, -1, 0, 1))
    assert round_law(verifier, p, fixed(draft), 3) == own_law(p, 3)


@pytest.mark.parametrize("seed", range(3))
def test_draft_with_a_narrower_vocabulary(seed: int) -> None:
    p, q = toy_law(4, seed), toy_law(2, seed + 30)
    assert round_law(Rejection(), p, sampled_chain(q, 2), 3) == own_law(p, 3)


def test_draft_with_a_padded_vocabulary() -> None:
    p = toy_law(3, 1)
    padding = np.array([Fraction(0)] * 2, dtype=object)
    q = toy_law(3, 31)
    make = sampled_chain(lambda prefix: np.concatenate([q(prefix), padding]), 2)
    assert round_law(Rejection(), p, make, 3) == own_law(p, 3)


@pytest.mark.parametrize("verifier", [Exact(), Rejection()], ids=lambda v: v.name)
@pytest.mark.parametrize("seed", range(3))
def test_draft_that_shares_the_targets_random_numbers(verifier: Verifier, seed: int) -> None:
    p, q = toy_law(3, seed, denominator=6), toy_law(3, seed + 10, denominator=6)
    law = outcomes(partial(one_round, verifier, p, shared_chain(q, 2)), lambda script: GridSampler(script, 6))
    assert completed(law, p, 3) == own_law(p, 3)


def test_accepted_tokens_of_the_block_verification_example() -> None:
    """q(a) = 2/3, p(a) = 1/3, two tokens: token-wise rejection accepts 10/9 (Sun et al., arXiv 2403.10444)."""
    p = np.array([Fraction(1, 3), Fraction(2, 3)], dtype=object)
    q = p[::-1]

    def accepted(sampler: Sampler) -> int:
        draft = sampled_chain(lambda prefix: q.copy(), 2)(sampler)
        return len(judged(Rejection(), lambda prefix: p.copy(), draft, sampler).path)

    assert sum(count * weight for count, weight in outcomes(accepted).items()) == Fraction(10, 9)


# ---- the runtime's sampler ------------------------------------------------------------------


def floats(law_of: LawOf) -> LawOf:
    return lambda prefix: law_of(prefix).astype(np.float64)


def chi_square(verifier: Verifier, p: LawOf, make: MakeDraft, draws: int = DRAWS, length: int = 3) -> float:
    """The p-value of `draws` texts of `length` tokens, one round and then the target alone, against the exact law."""
    logits_of = lru_cache(maxsize=None)(toy_logits(p))
    options = Options(temperature=1.0)
    seen: Counter[tuple[int, ...]] = Counter()
    for seed in range(draws):
        sampler = NumpySampler(options, len(PROMPT), seed)
        tokens = one_round(verifier, logits_of, make, sampler)
        while len(tokens) < length:
            prefix = (*PROMPT, *tokens)
            tokens += (sampler.draw(sampler.law(logits_of(prefix), prefix), len(prefix), 3),)
        seen[tokens[:length]] += 1
    law = own_law(p, length)
    assert set(seen) <= set(law), "a text that the target never writes"
    return float(chisquare([seen[text] for text in law], [float(weight) * draws for weight in law.values()]).pvalue)


@pytest.mark.parametrize(
    ("verifier", "make"),
    [
        (Exact(), shared_chain(floats(toy_law(3, 9)), 2)),
        (Rejection(), sampled_chain(floats(toy_law(3, 9)), 2)),
        (Rejection(), sampled_tree(floats(toy_law(3, 9)), (-1, -1, 0, 0), False)),
    ],
    ids=["exact, shared random numbers", "rejection, chain", "rejection, tree"],
)
def test_chi_square(verifier: Verifier, make: MakeDraft) -> None:
    assert chi_square(verifier, toy_law(3, 4), make) > 1e-3


# ---- planted biases -------------------------------------------------------------------------


def redraw_from_p(q: LawOf, monkeypatch: pytest.MonkeyPatch) -> MakeDraft:
    """A rejected token is drawn again from p, not from the residual."""
    monkeypatch.setattr(verifiers, "_residual", lambda law, q: law)
    return sampled_chain(q, 2)


def argmax_with_soft_q(q: LawOf, monkeypatch: pytest.MonkeyPatch) -> MakeDraft:
    """The draft is the likeliest token, the ratio uses all of q."""
    return mislabelled_chain(q, 2)


def residual_shares_the_drafts_numbers(q: LawOf, monkeypatch: pytest.MonkeyPatch) -> MakeDraft:
    """What rejection draws is correlated with the draft that it rejected."""
    monkeypatch.setattr(verifiers, "_REJECTION_STREAM", 1)
    return sampled_chain(q, 2)


@pytest.mark.parametrize("plant", [redraw_from_p, argmax_with_soft_q])
def test_enumeration_catches_a_bias(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    p = toy_law(3, 4)
    assert round_law(Rejection(), p, plant(toy_law(3, 9), monkeypatch), 3) != own_law(p, 3)


@pytest.mark.parametrize("plant", [redraw_from_p, argmax_with_soft_q, residual_shares_the_drafts_numbers])
def test_chi_square_catches_a_bias(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    make = plant(floats(toy_law(3, 9)), monkeypatch)
    assert chi_square(Rejection(), toy_law(3, 4), make, draws=DRAWS // 10) < 1e-6
