"""Topology to positions and visibility, against walks written out by hand and random trees."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specedge.runtime.tree import ancestors, depths, path_to, positions, visibility


@st.composite
def topologies(draw):
    count = draw(st.integers(0, 20))
    return tuple(draw(st.integers(-1, node - 1)) for node in range(count))


def test_positions_follow_depth_not_slot():
    #        0 - 2
    #  root <      > 3 hangs on 1, 4 on 2
    #        1 - 3
    parents = (-1, -1, 0, 1, 2)
    assert depths(parents).tolist() == [0, 0, 1, 1, 2]
    assert positions(10, 2, parents).tolist() == [10, 11, 12, 12, 13, 13, 14]


def test_a_chain_sees_what_causal_attention_sees():
    assert (visibility(3, (-1, 0, 1)) == np.tri(6, dtype=bool)).all()


def test_siblings_do_not_see_each_other():
    sees = visibility(1, (-1, -1, 0))
    assert sees.tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [True, False, True, False],
        [True, True, False, True],
    ]


@given(topologies())
def test_ancestors_are_the_nodes_of_the_path(parents):
    above = ancestors(parents)
    for node in range(len(parents)):
        assert tuple(np.flatnonzero(above[node])) == tuple(sorted(path_to(parents, node)))
        assert depths(parents)[node] == len(path_to(parents, node)) - 1


def test_path_to_the_root_is_empty():
    assert path_to((-1, 0), -1) == ()
    assert path_to((-1, 0, 0, 2), 3) == (0, 2, 3)
