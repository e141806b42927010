"""Layers of a target as a draft of it: how they are scored, searched and renamed."""

from __future__ import annotations

import numpy as np
import pytest

from specedge.export.decoder import write_decoder
from specedge.export.layer_choice import choose_layers, simple_choices
from specedge.export.layer_draft import check_layers, find_layers, keep_layers
from specedge.export.layer_scores import LayerScorer
from specedge.export.texts import Text
from specedge.runtime.contracts import Draft
from specedge.runtime.errors import UnsupportedModelError, UsageError
from specedge.runtime.graph import Decoder
from specedge.tests.reference import memory_checkpoint

LAYERS = 4


@pytest.fixture(scope="module")
def checkpoint():
    return memory_checkpoint(seed=4, num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def written(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("layers")
    return folder, write_decoder(checkpoint, folder, stem="target", precision="fp32", capacity=128)


@pytest.fixture(scope="module")
def texts(rng_of):
    return [Text(tuple(rng_of.integers(0, 160, 5)), tuple(rng_of.integers(0, 160, 14))) for _ in range(2)]


@pytest.fixture(scope="module")
def rng_of():
    return np.random.default_rng(9)


def divergence(p, q):
    p, q = p.astype(np.float64), q.astype(np.float64)
    log_p = p - np.log(np.exp(p).sum(-1, keepdims=True))
    log_q = q - np.log(np.exp(q).sum(-1, keepdims=True))
    return (np.exp(log_p) * (log_p - log_q)).sum(-1)


@pytest.mark.parametrize("block", [None, 1, 4])
def test_a_score_is_what_the_draft_itself_does(checkpoint, written, texts, tmp_path, block):
    """The gated graph against a draft that was written, run as the runtime runs it, a token at a time."""
    folder, spec = written
    kept = (0, 2, 3)
    draft_spec = write_decoder(keep_layers(checkpoint, kept), tmp_path, stem="draft", precision="fp32", capacity=128)
    target = Decoder(folder / spec.file, spec, threads=1)
    hosted = {"shares_cache": True, "cache_layers": kept} if block else {}
    draft_spec = type(draft_spec)(**{**vars(draft_spec), **hosted})
    draft = Decoder(tmp_path / "draft.onnx", draft_spec, threads=1, host=target if block else None)
    found, same = [], []
    for text in texts:
        tokens, first = list(map(int, text.tokens)), len(text.prompt) - 1
        target.rewind(0)
        laws = target.forward(tokens[:1], Draft.chain(tokens[1:])).logits[first:-1].copy()
        if block is None:
            draft.rewind(0)
            rows = draft.forward(tokens[:1], Draft.chain(tokens[1:])).logits[first:-1].copy()
        else:
            rows = []
            for place in range(first, len(tokens) - 1):
                if (place - first) % block == 0:
                    target.rewind(0)
                    if place:
                        target.forward(tokens[:place])
                    draft.follow(place)
                rows.append(draft.forward([tokens[place]]).logits[0].copy())
        found.append(divergence(laws, np.array(rows)))
        same.append(laws.argmax(-1) == np.array(rows).argmax(-1))
    scorer = LayerScorer(folder / spec.file, spec, texts, block=block, threads=1)
    score = scorer(kept)
    assert score.kl == pytest.approx(np.concatenate(found).mean(), rel=1e-3)
    assert score.kl > 0.05
    assert score.agreement == pytest.approx(np.concatenate(same).mean())
    everything = scorer(range(LAYERS))
    assert abs(everything.kl) < 1e-4
    assert everything.agreement == 1
    assert scorer.evaluations == 2
    scorer.close()
    assert sorted(path.name for path in folder.iterdir()) == ["target.onnx", "target.onnx_data"]


def test_no_more_rows_are_scored_than_asked_for(written, texts):
    folder, spec = written
    one = LayerScorer(folder / spec.file, spec, texts[:1], threads=1)((0, 1))
    assert LayerScorer(folder / spec.file, spec, texts, rows=14, threads=1)((0, 1)) == one
    long = Text(texts[0].prompt, texts[0].answer * 30)
    assert 0 <= LayerScorer(folder / spec.file, spec, [long], threads=1)((0, 1)).agreement <= 1
    with pytest.raises(UsageError, match="half the capacity"):
        LayerScorer(folder / spec.file, spec, [Text(texts[0].prompt, ())], threads=1)


def test_a_graph_of_other_layers_is_refused(written, texts):
    folder, spec = written
    with pytest.raises(UnsupportedModelError, match="8 sums where 3 layers have two each"):
        LayerScorer(folder / spec.file, type(spec)(**{**vars(spec), "layers": 3}), texts, threads=1)


def test_a_search_finds_the_layers_that_matter():
    weight = [5, 1, 7, 2, 9, 3, 8, 4]

    def loss(kept):
        return sum(weight) - sum(weight[layer] for layer in kept)

    for keep in range(1, 8):
        best = sorted(sorted(range(8), key=lambda layer: -weight[layer])[:keep])
        assert choose_layers(loss, 8, keep, 100) == tuple(best)


@pytest.mark.parametrize("budget", [1, 6, 12, 40])
def test_a_search_keeps_its_budget_and_is_never_worse_than_no_search(budget):
    random = np.random.default_rng(3)
    measured = {}

    def loss(kept):
        assert kept not in measured
        measured[kept] = float(random.random()) + len(kept)
        return measured[kept]

    told = []
    kept = choose_layers(loss, 10, 6, budget, told.append)
    assert len(kept) == 6
    assert list(kept) == sorted(set(kept))
    assert measured[kept] <= min(measured[simple] for simple in simple_choices(10, 6))
    assert len(measured) <= max(budget, 4) + 1
    assert told == list(range(1, len(measured) + 1))


@pytest.mark.parametrize("keep", [0, 4, 5, -1])
def test_a_draft_of_all_or_no_layers(checkpoint, keep):
    with pytest.raises(UsageError, match="has 4 layers, so give"):
        check_layers(checkpoint, keep)
    with pytest.raises(UsageError, match="from 1 to 3"):
        choose_layers(lambda kept: 0.0, 4, keep, 9)


def test_simple_choices_are_choices():
    for keep in range(1, 30):
        for kept in simple_choices(30, keep):
            assert len(kept) == keep
            assert list(kept) == sorted(set(kept))
            assert kept[0] >= 0
            assert kept[-1] < 30


def test_layers_are_found_in_the_order_they_run(written, texts):
    folder, spec = written
    told = []
    kept = find_layers(folder, spec, texts, 2, threads=1, progress=lambda done, total: told.append((done, total)))
    assert len(kept) == 2
    assert kept[0] < kept[1]
    assert told[-1][0] <= told[-1][1] == 4 * LAYERS


def test_layers_that_stay_are_numbered_anew(checkpoint):
    kept = keep_layers(checkpoint, (1, 3))
    assert kept.config["num_hidden_layers"] == 2
    names = [name for name in checkpoint.tensors if ".layers.0." not in name and ".layers.2." not in name]
    assert len(list(kept.tensors)) == len(names)
    old = "model.layers.3.mlp.up_proj.weight"
    new = "model.layers.1.mlp.up_proj.weight"
    assert kept.tensors[new] is checkpoint.tensors[old]
    assert kept.tensors.shape(new) == checkpoint.tensors.shape(old)
    assert old not in kept.tensors
    assert kept.tensors["model.norm.weight"] is checkpoint.tensors["model.norm.weight"]
    assert kept.tokenizer is checkpoint.tokenizer
