"""A calibration is checked before any work, made once, and kept where it was asked for."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest

from specedge.export import calibration_texts
from specedge.export.calibration_texts import text_source
from specedge.export.decoder import write_decoder
from specedge.export.prepare import prepare_calibration
from specedge.runtime.errors import UsageError
from specedge.runtime.prompts import Prompt
from specedge.tests.export.chats import VOCAB, chat_checkpoint
from specedge.tests.reference import memory_checkpoint

PROMPTS = tuple(
    Prompt(str(number), "prompt", f"the fox {number} says hello" * (1 + number % 3)) for number in range(12)
)


@pytest.fixture(scope="module")
def checkpoint():
    return chat_checkpoint()


def prepared(checkpoint, **settings):
    return prepare_calibration(checkpoint, **{"capacity": 256, "tokens": 600, "threads": 1, **settings})


def source(checkpoint, prompts=None, **settings):
    return text_source(checkpoint, prompts, **{"capacity": 256, "vocab_size": VOCAB, **settings})


def test_a_chat_model_writes_the_question_too(checkpoint):
    found = source(checkpoint)
    tokens = {text: number for number, text in enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])}
    assert len(found.starts) == 1
    assert found.starts[0][0] == tokens["<|im_start|>"]
    assert found.reply[0] == tokens["<|im_end|>"]
    assert tokens["<|im_start|>"] in found.reply
    assert found.ends == {tokens["<|im_end|>"]}
    with prepared(checkpoint) as calibration:
        for text in calibration.texts:
            assert text.prompt[: len(found.starts[0])] == found.starts[0]
            assert text.prompt[-len(found.reply) :] == found.reply


def test_a_base_model_begins_with_its_begin_of_text():
    assert source(chat_checkpoint(template=None)).starts == ((1,),)
    refuses = "{{ raise_exception('no') }}"
    assert source(chat_checkpoint(template=refuses)).starts == ((1,),)
    nameless = dataclasses.replace(chat_checkpoint(template=None), generation={})
    assert len(source(nameless).starts) > 1
    assert source(nameless) == source(nameless)
    assert source(nameless) != source(nameless, seed=1)


def test_prompts_are_answered(checkpoint):
    with prepared(checkpoint, prompts=PROMPTS, tokens=10_000) as calibration:
        rendered = source(checkpoint, PROMPTS).prompts
        assert sorted(text.prompt for text in calibration.texts) == sorted(rendered)
        assert all(0 < len(text.answer) <= 128 for text in calibration.texts)
    few = source(checkpoint, PROMPTS, tokens=10)
    assert len(few.prompts) == calibration_texts.FEWEST_PROMPTS
    assert few.prompts != source(checkpoint, PROMPTS, tokens=10, seed=1).prompts


@pytest.mark.parametrize(
    ("prompts", "complaint"),
    [
        ((), "0 prompts are too few"),
        (PROMPTS[:7], "7 prompts are too few"),
        ((*PROMPTS, Prompt("long", "prompt", "word " * 300)), "calibration prompt long has"),
    ],
)
def test_bad_prompts_are_refused_before_any_work(checkpoint, prompts, complaint, tmp_path):
    with pytest.raises(UsageError, match=complaint) as caught:
        prepared(checkpoint, prompts=prompts, folder=tmp_path / "kept")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_nothing_is_made_before_it_is_asked_for(checkpoint, tmp_path):
    folder = tmp_path / "kept"
    steps = []
    with prepared(checkpoint, folder=folder, progress=lambda *step: steps.append(step)) as calibration:
        assert "lm_head" in calibration
        assert "model.embed_tokens" not in calibration
        assert not folder.exists()
        assert not steps
        first = calibration["lm_head"]
    assert folder.is_dir()
    assert {phase for phase, _, _ in steps} == {"calibrate"}
    assert [done for _, done, _ in steps] == sorted(done for _, done, _ in steps)
    assert steps[-1][1:] == (2000, 2000)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    with prepared(checkpoint, folder=folder) as again:
        assert np.array_equal(again["lm_head"].second, first.second)
        assert again.texts == calibration.texts
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_what_is_not_kept_is_removed(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with prepared(checkpoint) as calibration:
        assert calibration["model.layers.0.mlp.up_proj"].count > 500
        assert list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())
    with pytest.raises(KeyError), prepared(checkpoint) as calibration:
        calibration["model.layers.9.mlp.up_proj"]
    assert not list(tmp_path.iterdir())


def test_a_folder_that_does_not_fit(checkpoint, tmp_path):
    folder = tmp_path / "kept"
    with prepared(checkpoint, folder=folder) as calibration:
        texts = calibration.texts
    with pytest.raises(UsageError, match="other texts"):
        prepared(checkpoint, folder=folder, seed=1)
    with pytest.raises(UsageError, match="other texts"):
        prepared(checkpoint, folder=folder, prompts=PROMPTS)
    with pytest.raises(UsageError, match="another model"):
        prepared(chat_checkpoint(seed=1), folder=folder)
    with prepare_calibration(checkpoint, capacity=256, folder=folder) as again:  # nothing particular is asked for
        assert again.texts == texts
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="holds no calibration"):
        prepared(checkpoint, folder=tmp_path / "other")


def test_a_seed_gives_the_same_moments(checkpoint):
    with (
        prepared(checkpoint, seed=5) as one,
        prepared(checkpoint, seed=5) as same,
        prepared(checkpoint, seed=6) as other,
    ):
        assert one.texts == same.texts != other.texts
        assert np.array_equal(one["lm_head"].second, same["lm_head"].second)


def test_an_fp32_target_saves_a_copy(checkpoint, tmp_path, monkeypatch):
    spec = write_decoder(checkpoint, tmp_path, stem="target", precision="fp32", capacity=256, standard=True)
    monkeypatch.setattr("specedge.export.reference.write_decoder", None)
    with prepared(checkpoint) as calibration:
        calibration.use(tmp_path, spec)
        assert calibration["lm_head"].count > 500


@pytest.mark.model
def test_the_built_in_model_is_calibrated_on_2000_tokens_of_its_own(tmp_path, capsys):
    from specedge.export.sources import resolve
    from specedge.runtime.errors import DownloadError

    try:
        checkpoint = resolve("smollm2-135m", progress=lambda *step: None)
    except DownloadError as error:
        pytest.skip(f"the built-in model cannot be fetched: {error}")
    start = time.monotonic()
    with prepare_calibration(
        checkpoint, capacity=1024, tokens=2000, threads=1, folder=tmp_path / "kept"
    ) as calibration:
        texts = calibration.texts
        for name in ("model.layers.0.self_attn.qkv_proj", "model.layers.29.mlp.down_proj", "lm_head"):
            moments = calibration[name]
            assert moments.count == sum(len(text.tokens) for text in texts)
            assert np.isfinite(moments.second).all()
            assert np.linalg.eigvalsh(moments.second.astype(np.float64))[0] > -1e-3 * moments.second.max()
    with capsys.disabled():
        print(f"\n{moments.count} tokens in {len(texts)} texts: {time.monotonic() - start:.0f} s on one thread")
    assert len(texts) >= 5
    assert 1500 < moments.count < 2300


def test_memory_checkpoints_without_a_tokenizer_are_no_use_here():
    """The fixture of other tests has an empty tokenizer: one line, not a panic."""
    from specedge.runtime.errors import SpecEdgeError

    with pytest.raises(SpecEdgeError):
        prepared(memory_checkpoint(vocab_size=VOCAB))
