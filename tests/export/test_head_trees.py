"""The trees that a calibration gives are the best there are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from specedge.export.head_trees import MOST_NODES, calibration_of


def test_shares_and_paths_of_a_few_rows():
    ranks = np.array([[0, 0], [0, 2], [1, 0], [2, 1]])  # 2: not among two guesses
    found = calibration_of(ranks, 2, "four rows")
    assert found.top == ((0.5, 0.75), (0.5, 0.75))
    assert dict(zip(found.paths, found.values, strict=True)) == {(0,): 0.5, (1,): 0.25, (0, 0): 0.25, (1, 0): 0.25}
    assert found.paths[0] == (0,)
    assert found.expected(0) == 1
    assert found.expected(4) == 2.25


@pytest.mark.parametrize("seed", range(5))
def test_no_tree_of_as_many_nodes_is_expected_to_be_longer(seed):
    random = np.random.default_rng(seed)
    ranks = random.choice(4, (60, 3), p=(0.4, 0.25, 0.15, 0.2))
    found = calibration_of(ranks, 3, "random")
    paths = [path for depth in (1, 2, 3) for path in itertools.product(range(3), repeat=depth)]
    value = {path: float((ranks[:, : len(path)] == path).all(1).mean()) for path in paths}
    for nodes in (1, 2, 3, 4):
        best = max(
            sum(value[path] for path in tree)
            for tree in itertools.combinations(paths, nodes)
            if all(path[:-1] in tree or len(path) == 1 for path in tree)
        )
        assert found.expected(nodes) == pytest.approx(1 + best)


def test_a_tree_is_never_empty_nor_too_large():
    assert calibration_of(np.full((3, 4), 10), 10, "never right").paths[:2] == ((0,), (1,))
    ranks = np.random.default_rng(0).integers(0, 10, (5000, 4))
    assert len(calibration_of(ranks, 10, "anything").paths) == MOST_NODES
    with pytest.raises(ValueError, match="no rows"):
        calibration_of(np.zeros((0, 4), int), 10, "nothing")
