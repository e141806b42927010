"""Fine-tuning a model on its own text: it leaves the grid, stays itself, and can be exported."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from specedge.runtime.errors import StorageError, UsageError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("onnx")

from specedge.export.sources import resolve  # noqa: E402  after the skips
from specedge.tests.tiny import TinyLlama, write_tiny_gguf  # noqa: E402
from specedge.train.self_tune import Settings, main, self_tune  # noqa: E402

SHORT = Settings(texts=6, length=12, epochs=2, batch=4, learning_rate=1e-4)


@pytest.fixture(scope="module")
def tuned(tiny_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned") / "model"
    steps = []
    result = self_tune(str(tiny_checkpoint), folder, SHORT, lambda *step: steps.append(step))
    return folder, result, steps


def test_every_matrix_moves_a_little(tiny_checkpoint, tuned):
    before, after = resolve(str(tiny_checkpoint)).tensors, resolve(str(tuned[0])).tensors
    assert set(before) == set(after)
    for name in before:
        change = np.abs(after[name] - before[name]).max()
        # four steps of at most the learning rate each, the first ones smaller
        assert 0 < change < 4.5 * SHORT.learning_rate, name
    assert 0 < tuned[1]["moved"] < 0.01


def test_the_folder_is_a_checkpoint_with_the_same_tokenizer(tiny_checkpoint, tuned):
    before, after = resolve(str(tiny_checkpoint)), resolve(str(tuned[0]))
    assert json.loads(after.tokenizer.model) == json.loads(before.tokenizer.model)
    assert after.tokenizer.chat_template == before.tokenizer.chat_template
    for key in ("hidden_size", "num_hidden_layers", "vocab_size", "tie_word_embeddings"):
        assert after.config[key] == before.config[key]


def test_a_gguf_file_becomes_a_checkpoint_in_floats(tmp_path):
    """The built-in model is one, and what the recipe is for."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", TinyLlama())
    result = self_tune(str(path), tmp_path / "tuned", SHORT)
    before, after = resolve(str(path)).tensors, resolve(str(tmp_path / "tuned"))
    assert set(before) == set(after.tensors) and "quantization_config" not in after.config
    assert all(0 < np.abs(after.tensors[name] - before[name]).max() < 4.5 * SHORT.learning_rate for name in before)
    assert 0 < result["moved"] < 0.01


def test_a_seed_gives_the_same_weights(tiny_checkpoint, tuned, tmp_path):
    self_tune(str(tiny_checkpoint), tmp_path / "again", SHORT)
    once, again = resolve(str(tuned[0])).tensors, resolve(str(tmp_path / "again")).tensors
    assert all(np.array_equal(once[name], again[name]) for name in once)


def test_progress_ends_at_its_total(tuned):
    assert tuned[2][-1] == ("tune", 4, 4)
    assert ("write texts", 6, 6) in tuned[2]


def test_a_taken_name_is_refused_before_any_work(tiny_checkpoint, tmp_path):
    with pytest.raises(StorageError, match="exists already"):
        self_tune(str(tiny_checkpoint), tmp_path, SHORT)


@pytest.mark.parametrize("wrong", [{"texts": 0}, {"length": 1}, {"learning_rate": 2.0}, {"epochs": 0}])
def test_settings_out_of_range(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong)).split("_")[0]):
        Settings(**wrong)


def test_the_command_says_in_one_line_what_is_wrong(tmp_path):
    done = CliRunner().invoke(main, [str(tmp_path / "nothing"), "-o", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1].startswith("Error: ") and "does not exist" in done.stderr
    assert "Traceback" not in done.stderr
