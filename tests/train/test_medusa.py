"""`specedge train medusa`, end to end on the small model: heads learn, a killed run goes on, Medusa-2 tunes both."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("accelerate")

import torch
from click.testing import CliRunner

from specedge.cli import main
from specedge.export.heads_file import read_heads
from specedge.export.options import ExportOptions
from specedge.export.pipeline import export
from specedge.export.sources import resolve
from specedge.models.medusa import HeadsConfig
from specedge.runtime.bundle import open_bundle
from specedge.runtime.engine import Engine
from specedge.runtime.errors import StorageError, UsageError
from specedge.tests.heads import logits_of, random_heads
from specedge.tests.tiny import TinyLlama, write_tiny_checkpoint
from specedge.train import medusa, run
from specedge.train.head_rows import HeadRows, frequent_tokens
from specedge.train.joint import train_joint
from specedge.train.medusa import train_heads
from specedge.train.medusa_heads import MedusaHeads
from specedge.train.options import TrainOptions
from specedge.train.run import make_accelerator, train_medusa
from specedge.train.settings import Settings
from specedge.train.shards import Rows

VOCAB = 320
OPTIONS = TrainOptions(
    heads=2,
    width=32,
    vocabulary=200,
    length=24,
    context=200,
    temperatures=(0.0, 0.5),
    precision="float16",
    settings=Settings(epochs=3, segments=4, seed=3),
)


@pytest.fixture(scope="module")
def tiny_checkpoint(tmp_path_factory):
    """A small model whose head is its own: one whose head is its embedding says one token over and over."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("untied") / "checkpoint", TinyLlama(tied=False))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    lines = [{"turns": [f"Say {word} {number}"]} for word in ("fox", "dog", "text") for number in range(16)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture(scope="module")
def options(data, tmp_path_factory):
    return replace(OPTIONS, data=(str(data),), rows=tmp_path_factory.mktemp("rows") / "rows")


def tensors(path):
    return read_heads(path, VOCAB).tensors


# ---- the arithmetic -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        HeadsConfig(heads=2, hidden_size=64, vocab_size=VOCAB, blocks=2),
        HeadsConfig(heads=3, hidden_size=64, vocab_size=VOCAB, width=16, chain=True, taps=(0, 1), vocabulary=90),
        HeadsConfig(heads=2, hidden_size=64, vocab_size=VOCAB, lm_head="lowrank", rank=3, vocabulary=90),
        HeadsConfig(heads=2, hidden_size=64, vocab_size=VOCAB, lm_head="own", vocabulary=90),
    ],
    ids=["plain", "chain", "low rank", "own"],
)
def test_heads_in_pytorch_compute_what_the_description_says(tiny_checkpoint, config):
    checkpoint = resolve(str(tiny_checkpoint))
    stored = random_heads(config)
    ids = np.arange(VOCAB) if stored.vocabulary is None else np.sort(stored.vocabulary)
    stored = replace(stored, vocabulary=None if stored.vocabulary is None else ids)
    matrices = [
        torch.from_numpy(checkpoint.tensors[name][ids]) for name in ("lm_head.weight", "model.embed_tokens.weight")
    ]
    heads = MedusaHeads(config, *matrices)
    with torch.no_grad():
        for name, tensor in heads.named_tensors().items():
            tensor.copy_(torch.from_numpy(stored.tensors[name]))
        random = np.random.default_rng(0)
        hidden = random.standard_normal((4, 64)).astype(np.float32)
        inner = random.standard_normal((4, 64 * len(config.taps))).astype(np.float32)
        places = torch.tensor([3, 17, 5, -1])
        guessed = list(heads.guess(torch.from_numpy(hidden), torch.from_numpy(inner), places))
    outside = int(np.setdiff1d(np.arange(VOCAB), ids)[0]) if config.vocabulary else 0
    for row, place in enumerate(places.tolist()):
        token = int(ids[place]) if place >= 0 else outside
        if place < 0 and not config.vocabulary:
            continue
        expected = logits_of(stored, checkpoint, hidden[row], inner[row], token)
        found = np.stack([logits[row].numpy() for logits in guessed])
        assert np.abs(found - expected).max() < 1e-3


def test_new_heads_guess_what_the_target_says(tiny_checkpoint):
    """W1 = 0: before training every head is the target's own vocabulary product."""
    config = HeadsConfig(heads=2, hidden_size=8, vocab_size=20, width=4, chain=True, taps=(1,))
    matrix = torch.randn(20, 8)
    hidden = torch.randn(3, 8)
    for logits in MedusaHeads(config, matrix, matrix).guess(
        hidden, torch.randn(3, 8), torch.zeros(3, dtype=torch.long)
    ):
        assert torch.allclose(logits, hidden @ matrix.T, atol=1e-5)


def test_the_most_frequent_tokens():
    assert frequent_tokens([torch.tensor([5, 5, 9, 2, 2, 2])], 2, 12).tolist() == [2, 5]
    assert frequent_tokens([torch.tensor([9])], 3, 12).tolist() == [0, 1, 9]  # among equals the lower ids
    assert frequent_tokens([torch.tensor([9])], 0, 4).tolist() == [0, 1, 2, 3]


def test_batches_of_rows():
    """Two answers, of 3 and 2 tokens; the second is held out. -1: not guessed, or beyond the end."""
    rows = Rows(
        torch.tensor([4, 5, 6, 7, 4]), torch.arange(5.0)[:, None].bfloat16(), None, torch.tensor([1, 1, 1, 20, 20])
    )
    arranged = HeadRows(rows, 40, 2, torch.tensor([4, 6, 7]), 10)
    assert (arranged.train_tokens, arranged.held_out_tokens) == (3, 2)
    batch = arranged.batch(0, 1, 0)
    assert [each.tolist() for each in batch.before] == [[0, -1, 1], [-1, 1, 2]]
    assert [each.tolist() for each in batch.wanted] == [[-1, 1, -1], [1, -1, -1]]
    assert batch.whole.tolist() == [True, False, False]
    assert batch.deciding[:, 0].tolist() == [1, 2]
    assert [each.tolist() for each in batch.decided] == [[0, 1, -1], [1, -1, -1]]
    (held,) = arranged.held_out()
    assert [each.tolist() for each in held.wanted] == [[0, -1], [-1, -1]]


# ---- training -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tiny_checkpoint, options, tmp_path_factory):
    output = tmp_path_factory.mktemp("trained") / "heads.safetensors"
    reports = []
    done = train_medusa(str(tiny_checkpoint), output, options, report=reports.append)
    return output, done, reports


def test_training_makes_heads_better(trained, tiny_checkpoint, options, tmp_path):
    output, done, reports = trained
    heads = read_heads(output, VOCAB)
    assert heads.config.taps == (1,)
    assert heads.calibration == done.calibration
    assert done.held_out_tokens > 0
    assert reports[-1].step == reports[-1].steps
    few = replace(options, settings=replace(options.settings, epochs=0.01))
    untrained = train_medusa(str(tiny_checkpoint), tmp_path / "few.safetensors", few)
    assert done.calibration.expected(8) > untrained.calibration.expected(8) + 0.1


def test_the_same_seed_gives_the_same_heads(trained, tiny_checkpoint, options, tmp_path):
    train_medusa(str(tiny_checkpoint), tmp_path / "again.safetensors", options)
    again = tensors(tmp_path / "again.safetensors")
    assert all((tensor == again[name]).all() for name, tensor in tensors(trained[0]).items())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_killed_run_goes_on_where_it_was(trained, tiny_checkpoint, options, tmp_path, monkeypatch, checkpointing):
    """Killed in the middle, state written after every step: the heads are those of a run that was not."""
    options = replace(options, settings=replace(options.settings, gradient_checkpointing=checkpointing))
    monkeypatch.setattr(medusa, "_SAVE_SECONDS", -1.0)
    output, steps = tmp_path / "heads.safetensors", []

    def stop(report):
        steps.append(report.step)
        if len(steps) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_medusa(str(tiny_checkpoint), output, options, report=stop)
    assert not output.exists()
    assert run.state_path(output).exists()
    train_medusa(str(tiny_checkpoint), output, options, report=lambda report: steps.append(report.step))
    assert steps[5] == steps[4]  # the report came before its state was written: that step is done again
    assert not run.state_path(output).exists()
    found = tensors(output)
    assert all(np.allclose(tensor, found[name], atol=2e-3) for name, tensor in tensors(trained[0]).items())


def test_a_state_of_other_settings_is_refused(tiny_checkpoint, options, tmp_path, monkeypatch):
    monkeypatch.setattr(medusa, "_SAVE_SECONDS", -1.0)
    output = tmp_path / "heads.safetensors"

    def stop(report):
        if report.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_medusa(str(tiny_checkpoint), output, options, report=stop)
    other = replace(options, settings=replace(options.settings, learning_rate=1e-3))
    with pytest.raises(UsageError, match="a training with other settings; delete it"):
        train_medusa(str(tiny_checkpoint), output, other)


def test_a_target_that_asks_itself(tiny_checkpoint, tmp_path, capsys):
    arguments = ["train", "medusa", str(tiny_checkpoint), "-o", str(tmp_path / "h.safetensors"), "--data", "self:400"]
    short = [
        "--length",
        "16",
        "--context",
        "200",
        "--heads",
        "1",
        "--width",
        "16",
        "--vocabulary",
        "100",
        "--epochs",
        "1",
    ]
    first = CliRunner().invoke(main, [*arguments, *short, "--temperature", "1"])
    assert first.exit_code == 0, first.output
    assert "head 1: top-1" in first.stderr
    kept = json.loads((tmp_path / "h.safetensors.rows.questions.json").read_text())
    assert 0 < len(kept["prompts"]) <= 4
    assert CliRunner().invoke(main, [*arguments, *short, "--temperature", "1"]).exit_code == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"data": ("self", "a.jsonl")}, "give one of the two"),
        ({"own": True, "rank": 4}, "leave one out"),
        ({"width": 0}, "--no-chain --no-inner"),
        ({"length": 2}, "length is 2: give 8 or more"),
        ({"temperatures": (-1.0,)}, "numbers from 0 to 10"),
        ({"precision": "int4"}, "choose one of float16, int8"),
    ],
)
def test_options_out_of_range(options, said):
    with pytest.raises(UsageError, match=said):
        TrainOptions(**options)
    for wrong in (
        {"soft": 2},
        {"dropout": 1},
        {"seed": -1},
        {"seed": 1 << 31},
        {"epochs": 0},
        {"segments": 0},
        {"learning_rate": 0},
        {"decay": 2},
    ):
        with pytest.raises(UsageError, match="give"):
            Settings(**wrong)


def test_a_model_without_a_builder(tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "other", TinyLlama(overrides={"model_type": "gpt_neo"}))
    result = CliRunner().invoke(main, ["train", "medusa", str(folder), "-o", str(tmp_path / "h.safetensors")])
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("Error: config.json: no builder for model_type 'gpt_neo'")


def test_too_little_to_train_on_is_told_before(tiny_checkpoint, data, tmp_path):
    one = tmp_path / "one.jsonl"
    one.write_text(data.read_text().splitlines()[0])
    for options in (replace(OPTIONS, data=(str(one),)), replace(OPTIONS, data=(str(data),), heads=16, length=8)):
        with pytest.raises(UsageError, match="too few to train heads"):
            train_medusa(str(tiny_checkpoint), tmp_path / f"{options.heads}.safetensors", options)


def test_a_damaged_state_is_told(tiny_checkpoint, options, tmp_path):
    output = tmp_path / "heads.safetensors"
    run.state_path(output).write_bytes(b"junk")
    with pytest.raises(StorageError, match="is damaged; delete it to begin anew"):
        train_medusa(str(tiny_checkpoint), output, options)


# ---- Medusa-2 -------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [False, True])
def test_both_learn_together(trained, tiny_checkpoint, options, tmp_path, checkpointing):
    options = replace(options, settings=replace(options.settings, gradient_checkpointing=checkpointing))
    output = tmp_path / "heads.safetensors"
    output.write_bytes(trained[0].read_bytes())
    before = tensors(output)
    result = train_joint(str(tiny_checkpoint), output, tmp_path / "model", options, 6)
    assert abs(result.after / result.before - 1) < 0.1
    assert result.divergence < 0.1
    old, new = resolve(str(tiny_checkpoint)), resolve(str(tmp_path / "model"))
    changed = [name for name in new.tensors if not (new.tensors[name] == old.tensors[name]).all()]
    assert len(changed) == 7 * 2  # every linear layer of both layers, and nothing else
    assert any((tensor != tensors(output)[name]).any() for name, tensor in before.items())
    export(str(tmp_path / "model"), tmp_path / "bundle", ExportOptions(drafts=("none",), heads=str(output)))
    assert open_bundle(tmp_path / "bundle").manifest.heads
    with Engine(tmp_path / "bundle", threads=1) as engine:
        for _ in engine.generate("a fox", method="medusa", max_tokens=8):
            pass


def test_training_needs_some_answers_held_out():
    heads = MedusaHeads(HeadsConfig(heads=1, hidden_size=4, vocab_size=9), torch.randn(9, 4), torch.randn(9, 4))
    rows = Rows(torch.arange(9) % 9, torch.randn(9, 4).bfloat16(), None, torch.full((9,), 21))
    arranged = HeadRows(rows, 100, 1, torch.arange(9), 9)
    assert medusa.ranks(heads, arranged, make_accelerator()).shape == (0, 1)
    assert train_heads(heads, arranged, Settings(epochs=2, segments=1), make_accelerator()) > 0
