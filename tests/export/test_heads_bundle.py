"""Heads in a bundle: exported, calibrated, opened, and every reply as plain decoding gives it."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import numpy as np
import pytest

from specedge.export.heads_choice import find_heads, shipped_heads
from specedge.export.heads_file import read_heads, write_heads_file
from specedge.export.options import ExportOptions
from specedge.export.pipeline import export
from specedge.export.sources import resolve
from specedge.runtime.bundle import MANIFEST, open_bundle
from specedge.runtime.contracts import Context, Draft, Rows
from specedge.runtime.engine import Engine
from specedge.runtime.errors import BundleError, CheckpointError, UsageError
from specedge.runtime.options import Options
from specedge.runtime.prompts import Prompt
from specedge.runtime.sampler import NumpySampler
from specedge.tests.export.bundles import QUICK
from specedge.tests.heads import PLAIN, WIDE, random_heads

PROMPT = "def reverse(text): return"
FREE = Options(max_tokens=48, repetition_penalty=1.1, no_repeat_ngram=2)


def heads_file(folder, config=WIDE, calibrated=True, seed=0):
    heads = random_heads(config, seed, calibrated)
    path = folder / "heads.safetensors"
    write_heads_file(path, config, heads.tensors, heads.vocabulary, heads.calibration)
    return path


@pytest.fixture(scope="module")
def bundle(tiny_checkpoint, tmp_path_factory):
    home = tmp_path_factory.mktemp("heads")
    export(str(tiny_checkpoint), home / "bundle", replace(QUICK, heads=str(heads_file(home))))
    return home / "bundle"


@pytest.fixture(scope="module")
def engine(bundle):
    with Engine(bundle, threads=1) as engine:
        yield engine


def reply(engine, options, **overrides):
    engine.reset()
    *_, finish = engine.generate(PROMPT, options, **overrides)
    assert finish.stats.notes == ()
    return finish


def test_what_the_bundle_says_of_its_heads(bundle, engine):
    manifest = open_bundle(bundle, verify=True).manifest
    spec = manifest.heads["medusa"]
    assert (spec.heads, spec.guesses, spec.vocabulary, spec.taps, spec.chain) == (3, 10, 120, (0, 1), True)
    assert spec.precision == "int8-block"
    assert manifest.target.taps == (0, 1)
    without = replace(manifest, heads={})
    assert manifest.memory_bytes == without.memory_bytes + 2 * spec.weight_bytes
    assert engine.methods == ("none", "medusa", "medusa+ngram", "ngram", "auto")
    assert engine.drafting.methods("auto") == ("medusa+ngram", "ngram")
    with pytest.raises(UsageError, match="method 'medusa:2y3' is not in"):
        engine.generate(PROMPT, method="medusa:2y3")
    with pytest.raises(UsageError, match="at most 3 heads of 10 guesses"):
        engine.generate(PROMPT, method="medusa:1x1x1x1")


@pytest.mark.parametrize("options", [FREE, replace(FREE, temperature=0.9, seed=5)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", ["medusa", "medusa:2x3", "medusa:1x1x1", "medusa:3x2x2", "medusa+ngram"])
def test_every_tree_gives_plain_decodings_reply(engine, options, method):
    plain = reply(engine, options, method="none")
    for draft_length in (1, 4, 21):
        given = reply(engine, options, method=method, draft_length=draft_length)
        assert given.ids == plain.ids
        assert 0 < given.stats.proposed <= draft_length * given.stats.passes
        assert given.stats.lossless


@pytest.mark.parametrize("method", ["medusa", "medusa+ngram"])
def test_a_target_that_rounds_activations_gets_chains(tiny_checkpoint, tmp_path, method):
    """A tree's rows are not bit for bit plain decoding's, and rounding would make that whole steps."""
    options = replace(QUICK, precision="int8", heads=str(heads_file(tmp_path)))
    export(str(tiny_checkpoint), tmp_path / "bundle", options)
    with Engine(tmp_path / "bundle", threads=1) as engine:
        plain = reply(engine, FREE, method="none")
        given = reply(engine, FREE, method=method, draft_length=4)
        assert given.ids == plain.ids
        assert given.stats.proposed > 0
        drafter = engine.drafting.opened(method)
        drafter = getattr(drafter, "_heads", drafter)
        rows = Rows(np.zeros((1, 1), np.float32), *_rows_of(drafter.model.spec))
        draft = drafter.propose(Context([5, 6, 7], rows, NumpySampler(Options(), 0, 0)), 9)
        assert draft.is_chain and len(draft.tokens) == 3
        assert reply(engine, FREE, method="medusa:1x1").ids == plain.ids
        with pytest.raises(UsageError, match="a tree would not be exact on a target that rounds"):
            engine.generate(PROMPT, method="medusa:2x3")


def _rows_of(spec):
    """Rows that heads can read."""
    size = spec.hidden_size
    return np.ones((1, size), np.float32), np.ones((1, len(spec.taps) * size), np.float32)


def test_typical_acceptance_is_marked(engine):
    finish = reply(engine, replace(FREE, temperature=0.7, accept="typical", seed=1), method="medusa")
    assert not finish.stats.lossless
    assert reply(engine, replace(FREE, accept="typical"), method="medusa").stats.lossless


def test_rejection_with_the_heads_own_laws(engine):
    finish = reply(engine, replace(FREE, temperature=0.9, accept="rejection", seed=5), method="medusa")
    assert finish.stats.proposed > 0


def test_the_cache_is_a_fresh_prefills_after_any_path(engine):
    """Random trees, any path through them: keys and values of every layer."""
    target, rng = engine.target, np.random.default_rng(3)
    tokens = rng.integers(3, 300, 30).tolist()
    engine.reset()
    target.forward(tokens[:10])
    place = 10
    while place < 28:
        paths = [(0,), (1,), (0, 0), (1, 0), (1, 1), (1, 0, 2)]
        node = int(rng.integers(len(paths)))
        chain = [i for i in range(len(paths)) if paths[node][: len(paths[i])] == paths[i]]
        wanted = dict(zip(chain, tokens[place + 1 :], strict=False))
        drafted = tuple(wanted.get(i, int(rng.integers(3, 300))) for i in range(len(paths)))
        parents = tuple(paths.index(path[:-1]) if len(path) > 1 else -1 for path in paths)
        target.forward(tokens[place : place + 1], Draft(drafted, parents))
        target.commit(chain[: len(tokens) - place - 1])
        place = target.length
    kept = target.pool[:, :, :, : target.length].copy()
    length = target.length
    target.rewind(0)
    target.forward(tokens[:length])
    assert np.allclose(kept, target.pool[:, :, :, :length], atol=1e-4)
    engine.reset()


@pytest.mark.parametrize("config", [PLAIN, replace(WIDE, taps=())], ids=["plain", "chain"])
def test_heads_without_a_calibration_are_measured_at_export(tiny_checkpoint, tmp_path, config):
    path = heads_file(tmp_path, config, calibrated=False)
    prompts = tuple(Prompt(str(n), "test", f"Tell me about number {n}.") for n in range(8))
    options = replace(QUICK, heads=str(path), calibration_prompts=prompts, heads_precision="fp32")
    manifest = export(str(tiny_checkpoint), tmp_path / "bundle", options)
    assert manifest.heads["medusa"].precision == "fp32"
    found = json.loads((tmp_path / "bundle" / "calibration.json").read_text())["heads"]["medusa"]
    assert found["positions"] > 50
    assert len(found["top"]) == 3
    with Engine(tmp_path / "bundle", threads=1) as engine:
        assert reply(engine, FREE, method="medusa").ids == reply(engine, FREE, method="none").ids


def test_no_heads_where_none_are_asked_for(tiny_checkpoint, tmp_path):
    manifest = export(str(tiny_checkpoint), tmp_path / "bundle", replace(QUICK, heads="none"))
    assert manifest.heads == {}
    assert manifest.target.taps == ()
    assert not (tmp_path / "bundle" / "calibration.json").exists()


def test_wrong_heads_are_told_before_any_work(tiny_checkpoint, tmp_path):
    path = heads_file(tmp_path, replace(WIDE, vocab_size=500))
    for heads, error, said in (
        (str(path), UsageError, "heads of another model"),
        (str(tmp_path / "none.safetensors"), CheckpointError, "is missing"),
    ):
        with pytest.raises(error, match=said):
            export(str(tiny_checkpoint), tmp_path / "bundle", replace(QUICK, heads=heads))
    with pytest.raises(UsageError, match="heads are only rounded"):
        ExportOptions(heads_precision="int4+gptq")
    assert not (tmp_path / "bundle").exists()


def test_a_damaged_calibration_or_graph_is_told(bundle, tmp_path):
    import hashlib
    import shutil

    folder = tmp_path / "bundle"
    shutil.copytree(bundle, folder)
    text = json.dumps({"heads": {}})
    (folder / "calibration.json").write_text(text)
    raw = json.loads((folder / MANIFEST).read_text())
    raw["files"]["calibration.json"] = {"size": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    (folder / MANIFEST).write_text(json.dumps(raw))
    with Engine(folder, threads=1) as engine, pytest.raises(BundleError, match="nothing that fits heads 'medusa'"):
        engine.generate(PROMPT)
    raw["target"]["taps"] = []
    (folder / MANIFEST).write_text(json.dumps(raw))
    with pytest.raises(BundleError, match="reads rows that the target does not give"):
        open_bundle(folder)


def test_heads_with_broken_weights_leave_decoding_plain(bundle, tmp_path, caplog):
    """NaN planted in the heads: the reply is the target's, and the statistics say why."""
    import shutil

    folder = tmp_path / "bundle"
    shutil.copytree(bundle, folder)
    data = bytearray((folder / "heads" / "medusa.onnx_data").read_bytes())
    data[:] = b"\xff" * len(data)
    (folder / "heads" / "medusa.onnx_data").write_bytes(data)
    with Engine(bundle, threads=1) as engine:
        plain = reply(engine, FREE, method="none")
    with caplog.at_level(logging.ERROR), Engine(folder, threads=1, verify=False) as engine:
        *_, finish = engine.generate(PROMPT, FREE, method="medusa")
    assert finish.ids == plain.ids
    assert "NaN or infinity" in finish.stats.notes[0]


def test_shipped_heads_are_found_by_the_models_name(tiny_checkpoint):
    assert shipped_heads("builtin:no-such-model") is None
    assert shipped_heads("folder:smollm2-135m") is None
    assert find_heads(resolve(str(tiny_checkpoint)), None) is None
    found = shipped_heads("builtin:smollm2-135m")
    assert found is not None
    heads = read_heads(found, 49152)
    assert heads.config.heads == 4
    assert heads.calibration is not None and heads.calibration.expected(15) > 2
