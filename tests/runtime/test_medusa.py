"""Heads as a drafter: trees of ranks, budgets, sampled chains; and typical acceptance."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from specedge.runtime.contracts import EMPTY_DRAFT, Context, Draft, Rows
from specedge.runtime.drafters.medusa import MedusaDrafter
from specedge.runtime.drafters.merged import MergedDrafter, merge
from specedge.runtime.drafters.ngram import NgramDrafter
from specedge.runtime.drafters.tree import Tree, dense_tree
from specedge.runtime.errors import UsageError
from specedge.runtime.options import Options
from specedge.runtime.sampler import NumpySampler
from specedge.runtime.verifiers import Exact, Rejection, Typical, verifier_for
from specedge.tests.fakes import FakeTarget, fuzzy, random_tree

VOCAB = 8
HEADS, GUESSES = 3, 4
PATHS = [(0,), (0, 0), (1,), (0, 1), (0, 0, 2)]
TARGET = fuzzy(VOCAB, 1, order=2)


class FakeHeads:
    """Heads that guess well: by a noisy copy of the target, along its own likeliest guesses."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self._draft = fuzzy(VOCAB, 2, like=TARGET, noise=0.7)

    def logits(self, rows: Rows, token: int) -> np.ndarray:
        assert self.tokens[-1] == token
        prefix, laws = list(self.tokens), []
        for _ in range(HEADS):
            laws.append(self._draft(prefix))
            prefix.append(int(laws[-1].argmax()))
        return np.stack(laws)

    def run(self, rows: Rows, token: int) -> np.ndarray:
        return np.argsort(-self.logits(rows, token), axis=1)[:, :GUESSES]

    def close(self) -> None:
        pass


def rows() -> Rows:
    return Rows(np.zeros((1, VOCAB), np.float32), np.zeros((1, 4), np.float32))


def context(tokens: list[int], **options) -> Context:
    return Context(tokens, rows(), NumpySampler(Options(**options), 2, 7))


def decode(drafter, heads, verifier, options, count=60, budget=5):
    target, sampler, tokens, accepted = FakeTarget(TARGET, VOCAB), NumpySampler(options, 2, 7), [1, 2], 0
    heads.tokens = tokens
    seen: Rows | None = None
    while len(tokens) < count + 2:
        now = Context(tokens, seen, sampler)
        draft = drafter.propose(now, budget)
        passed = target.forward(tokens[target.length :], draft)
        verdict = verifier.judge(draft, passed.logits, now)
        target.commit(verdict.path)
        tokens += [*(draft.tokens[node] for node in verdict.path), verdict.token]
        assert target.tokens == tokens[:-1]
        seen, accepted = rows(), accepted + len(verdict.path)
    return tokens[2 : count + 2], accepted


def test_a_tree_of_paths():
    tree = Tree.of(PATHS)
    assert tree.parents == (-1, 0, -1, 0, 1)
    draft = tree.draft([[10, 11, 12], [20, 21, 22], [30, 31, 32]], 4)
    assert draft == Draft((10, 20, 11, 21), (-1, 0, -1, 0))
    assert tree.draft([[10, 11], [20, 21], [30, 31, 32]], 99).tokens[-1] == 32


@pytest.mark.parametrize("paths", [[()], [(0, 0)], [(0,), (0,)], [(0, 0), (0,)]])
def test_paths_that_are_no_tree(paths):
    with pytest.raises(ValueError, match="is empty, stands twice, or its parent is missing"):
        Tree.of(paths)


def test_dense_trees():
    tree = dense_tree("2x3", 3, 10)
    assert len(tree.paths) == 8
    assert sum(len(path) == 2 for path in tree.paths) == 6
    assert dense_tree("1x1x1", 3, 10).parents == (-1, 0, 1)
    for wrong in ("", "0", "2x", "x2", "2x11", "1x1x1x1", "-1", "2,3"):
        with pytest.raises(UsageError, match="give a number of guesses for each depth"):
            dense_tree(wrong, 3, 10)
    with pytest.raises(UsageError, match="at most 256"):
        dense_tree("10x10x10", 3, 10)


def test_without_rows_or_budget_there_is_no_draft():
    drafter = MedusaDrafter("medusa", FakeHeads([1, 2]), Tree.of(PATHS))
    assert drafter.propose(Context([1, 2], None, NumpySampler(Options(), 2, 7)), 4) == EMPTY_DRAFT
    assert drafter.propose(context([1, 2]), 0) == EMPTY_DRAFT
    assert len(drafter.propose(context([1, 2]), 3).tokens) == 3


@pytest.mark.parametrize("options", [Options(), Options(temperature=0.9, seed=7)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("seed", range(6))
def test_every_tree_gives_plain_decodings_tokens(options, seed):
    heads = FakeHeads([])
    plain, _ = decode(MedusaDrafter("medusa", heads, Tree.of([(0,)])), heads, Exact(), options, budget=0)
    rng = random.Random(seed)
    shape = random_tree(rng, 7, GUESSES)
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(shape.tokens, shape.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    paths = [path for path in paths if len(path) <= HEADS]
    tokens, accepted = decode(MedusaDrafter("medusa", heads, Tree.of(paths)), heads, Exact(), options, budget=7)
    assert tokens == plain
    if (0,) in paths:
        assert accepted > 0


def test_a_sampled_chain_comes_with_the_laws_it_was_drawn_from():
    heads = FakeHeads([1, 2])
    drafter = MedusaDrafter("medusa", heads, Tree.of(PATHS), sample=True)
    now = context([1, 2], temperature=0.8)
    draft = drafter.propose(now, 2)
    assert draft.is_chain
    assert len(draft.tokens) == 2
    logits = heads.logits(rows(), 2)
    for place, law in enumerate(draft.probs):
        prefix = [1, 2, *draft.tokens[:place]]
        assert np.allclose(law, now.sampler.law(logits[place], prefix))
        assert draft.tokens[place] == now.sampler.draw(law, len(prefix), 1)
    assert len(drafter.propose(now, 9).tokens) == HEADS
    tokens, accepted = decode(drafter, heads, Rejection(), Options(temperature=0.8, seed=7))
    assert accepted > 0 and len(tokens) == 60


# ---- heads and lookup together --------------------------------------------------------------

GUESSED = Draft((5, 6, 7, 8), (-1, 0, -1, 0))


@pytest.mark.parametrize(
    ("chain", "budget", "expected"),
    [
        ((), 3, Draft((5, 6, 7), (-1, 0, -1))),  # nothing to copy: the heads' alone
        ((1, 2, 3), 4, Draft((1, 2, 5, 6), (-1, 0, -1, 2))),  # half and half
        ((5, 6, 9, 9), 4, Draft((5, 6, 9, 7), (-1, 0, 1, -1))),  # both begin alike: the copy goes deep
        ((7, 1), 4, Draft((7, 1, 5, 6), (-1, 0, -1, 2))),  # the heads' third node is there already
        ((1,), 1, Draft((1,), (-1,))),
        ((5, 1), 1, Draft((5,), (-1,))),
    ],
)
def test_a_copied_chain_in_a_tree(chain, budget, expected):
    assert merge(GUESSED, chain, budget) == expected


@pytest.mark.parametrize("seed", range(20))
def test_a_merged_tree_is_a_tree_without_twins(seed):
    rng = random.Random(seed)
    tree, budget = random_tree(rng, 6, 4), rng.randrange(1, 9)
    merged = merge(tree, tuple(rng.randrange(4) for _ in range(rng.randrange(6))), budget)
    assert 0 < len(merged.tokens) <= budget
    assert len(set(zip(merged.parents, merged.tokens, strict=True))) == len(merged.tokens)


@pytest.mark.parametrize("options", [Options(), Options(temperature=0.9, seed=7)], ids=["greedy", "sampled"])
def test_heads_with_lookup_give_plain_decodings_tokens(options):
    heads = FakeHeads([])
    plain, _ = decode(MedusaDrafter("medusa", heads, Tree.of([(0,)])), heads, Exact(), options, budget=0)
    both = MergedDrafter("medusa+ngram", MedusaDrafter("medusa", heads, Tree.of(PATHS)), NgramDrafter(min_ngram=2))
    tokens, accepted = decode(both, heads, Exact(), options)
    assert tokens == plain
    assert accepted > 0
    both.sample, heads.tokens = True, [1, 2]
    assert both.propose(context([1, 2], temperature=0.9), 3).probs is not None


# ---- typical acceptance ---------------------------------------------------------------------


def judged(draft: Draft, laws: Sequence[Sequence[float]], epsilon=0.09, delta=0.3):
    with np.errstate(divide="ignore"):
        logits = np.log(np.array(laws)).astype(np.float32)
    return Typical(epsilon, delta).judge(draft, logits, context([1, 2], temperature=1.0))


def test_the_bound_of_typical_acceptance():
    """exp(-H) of (.5, .5) is .5 and of (.1 x 10) .1: bounds are min(.09, .15) and min(.09, .03)."""
    assert judged(Draft.chain([1]), [[0.88, 0.12], [0.5, 0.5]]).path == (0,)
    assert judged(Draft.chain([1]), [[0.95, 0.05], [0.5, 0.5]]).path == ()  # .05 < .09 and < .3 * .82
    flat = [0.1] * 9 + [0.06, 0.04]
    assert judged(Draft.chain([10]), [flat, [1 / 11] * 11]).path == (0,)  # .04 > .3 * exp(-2.36) = .028
    assert judged(Draft.chain([10]), [flat, [1 / 11] * 11], delta=0.5).path == ()  # .04 < .047


def test_the_longest_path_wins_and_of_equally_long_ones_the_likeliest():
    even = [0.25] * 4
    tree = Draft((0, 1, 2), (-1, -1, 1))
    assert judged(tree, [[0.6, 0.3, 0.05, 0.05], even, even, even]).path == (1, 2)
    pair = Draft((1, 0), (-1, -1))
    assert judged(pair, [[0.6, 0.3, 0.05, 0.05], even, even]).path == (1,)
    verdict = judged(tree, [[0.6, 0.3, 0.05, 0.05], even, [0.05, 0.05, 0.05, 0.85], even])
    assert (verdict.path, verdict.evaluated) == ((0,), 3)


def test_typical_acceptance_takes_more_than_sampling_and_says_that_it_is_not_lossless():
    heads = FakeHeads([])
    options = Options(temperature=0.7, accept="typical", seed=7)
    drafter = MedusaDrafter("medusa", heads, Tree.of(PATHS))
    typical, exact = (decode(drafter, heads, each, options, count=200)[1] for each in (verifier_for(options), Exact()))
    assert typical > exact
    assert not verifier_for(options).lossless
    assert verifier_for(Options(accept="typical")).lossless  # at temperature 0 it is greedy
