"""The graph of heads computes what models/medusa.py says, for every make of heads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specedge.export.heads import write_heads
from specedge.export.sources import resolve
from specedge.quant.recipe import parse_recipe
from specedge.runtime.contracts import Rows
from specedge.runtime.errors import BundleError, NumericError
from specedge.runtime.heads import HeadsGraph
from specedge.tests.heads import PLAIN, WIDE, logits_of, random_heads
from specedge.tests.tiny import TinyLlama, write_tiny_checkpoint

MAKES = {
    "plain": PLAIN,
    "two blocks": replace(PLAIN, blocks=2),
    "own": replace(PLAIN, lm_head="own"),
    "low rank": replace(PLAIN, lm_head="lowrank", rank=5),
    "trimmed": replace(PLAIN, vocabulary=50),
    "own, trimmed": replace(PLAIN, vocabulary=50, lm_head="own"),
    "few tokens": replace(PLAIN, vocabulary=6),
    "wide": replace(PLAIN, width=48, blocks=2),
    "chain": WIDE,
    "chain without inner rows": replace(WIDE, taps=()),
    "chain over all tokens": replace(WIDE, vocabulary=0),
    "chain, low rank": replace(WIDE, lm_head="lowrank", rank=5),
}
# Of a logit, whose spread is about 6: rounding of weights and, in blocks, of activations.
BOUNDS = {"fp32": 1e-4, "int8": 0.5, "int4:b32:asym": 6.0}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    return resolve(str(write_tiny_checkpoint(folder, TinyLlama(tied=request.param))))


def opened(folder, checkpoint, heads, recipe="fp32"):
    spec = write_heads(heads, checkpoint, folder, parse_recipe(recipe, draft=True))
    return HeadsGraph(folder / spec.file, spec, heads.config.vocab_size, threads=1)


def rows_for(config, seed=0):
    random = np.random.default_rng(seed)
    hidden = random.standard_normal((2, config.hidden_size)).astype(np.float32)
    inner = (9 * random.standard_normal((2, len(config.taps) * config.hidden_size))).astype(np.float32)
    return Rows(np.zeros((2, 4), np.float32), hidden, inner if config.taps else None)


@pytest.mark.parametrize("make", MAKES)
def test_the_graph_computes_what_the_description_says(tmp_path, checkpoint, make):
    heads = random_heads(MAKES[make])
    graph = opened(tmp_path, checkpoint, heads)
    ids = np.arange(PLAIN.vocab_size) if heads.vocabulary is None else heads.vocabulary
    for seed in range(6):
        rows = rows_for(heads.config, seed)
        token = int(ids[seed]) if seed % 2 else seed
        expected = logits_of(heads, checkpoint, rows.hidden[-1], None if rows.inner is None else rows.inner[-1], token)
        found = graph.logits(rows, token)
        assert np.abs(found[:, ids] - expected).max() < BOUNDS["fp32"]
        others = np.setdiff1d(np.arange(PLAIN.vocab_size), ids)
        assert np.isneginf(found[:, others]).all()
        order = ids[np.argsort(-expected, axis=1, kind="stable")[:, : graph.spec.guesses]]
        assert (graph.run(rows, token) == order).all()


@pytest.mark.parametrize("recipe", ["int8", "int4:b32:asym"])
def test_rounded_heads_are_near(tmp_path, checkpoint, recipe):
    heads = random_heads(replace(PLAIN, width=64, taps=(0,)))  # no chain, where one other guess changes the rest
    graph = opened(tmp_path, checkpoint, heads, recipe)
    floats = opened(tmp_path / "fp32", checkpoint, heads)
    for seed in range(4):
        rows = rows_for(heads.config, seed)
        assert np.abs(graph.logits(rows, 0) - floats.logits(rows, 0)).max() < BOUNDS[recipe]
    assert graph.spec.weight_bytes < 0.6 * floats.spec.weight_bytes


def test_guesses_do_not_depend_on_what_ran_before(tmp_path, checkpoint):
    graph = opened(tmp_path, checkpoint, random_heads(WIDE), "int8")
    first = graph.run(rows_for(WIDE, 1), 5).copy()
    graph.run(rows_for(WIDE, 2), 9)
    assert (graph.run(rows_for(WIDE, 1), 5) == first).all()


def test_broken_rows_are_told(tmp_path, checkpoint):
    graph = opened(tmp_path, checkpoint, random_heads(WIDE))
    rows = rows_for(WIDE)
    rows.hidden[-1, 3] = np.nan
    with pytest.raises(NumericError, match="NaN or infinity"):
        graph.run(rows, 5)
    with pytest.raises(BundleError, match="gives no inner rows"):
        graph.run(replace(rows_for(WIDE), inner=None), 5)


def test_a_graph_that_is_not_what_the_manifest_says(tmp_path, checkpoint):
    heads = random_heads(WIDE)
    spec = write_heads(heads, checkpoint, tmp_path, parse_recipe("fp32"))
    for wrong in (
        replace(spec, heads=2),
        replace(spec, vocabulary=50),
        replace(spec, taps=()),
        replace(spec, chain=False),
    ):
        with pytest.raises(BundleError, match="differ from its manifest entry"):
            HeadsGraph(tmp_path / spec.file, wrong, PLAIN.vocab_size)
