"""The checks catch what they are for: each fault here is planted in a bundle that was whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specedge.export import check, torch_check
from specedge.export.check import agreement, check_draft, check_prompts, check_target, compare
from specedge.export.gguf_config import _llama3_divisors
from specedge.export.pipeline import ExportOptions, export
from specedge.export.tolerances import TOLERANCES, Bound
from specedge.runtime.bundle import open_bundle
from specedge.runtime.cache import Cache
from specedge.runtime.errors import ExportError, ParityError
from specedge.tests.tiny import TinyLlama, write_tiny_gguf

onnx = pytest.importorskip("onnx")


@pytest.fixture
def whole(tiny_bundle, tmp_path):
    """A copy of the tiny bundle that may be damaged."""
    folder = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, folder)
    return open_bundle(folder)


@pytest.fixture
def prompts(whole):
    return check_prompts(whole.text("tokenizer.json"), whole.manifest.vocab_size)


def edit(path: Path, change: Callable) -> None:
    """Changes a graph without touching its weight file."""
    model = onnx.load(path, load_external_data=False)
    change(model.graph)
    path.write_bytes(model.SerializeToString())


def nodes(graph, kind: str) -> list:
    return [node for node in graph.node if node.op_type == kind]


def run(whole, prompts):
    return check_target(whole.folder, whole.manifest.target, whole.manifest.standard, prompts)


def test_a_whole_bundle_passes(whole, prompts):
    report, logits = run(whole, prompts)
    assert report["status"] == "passed"
    assert 0 <= max(report["pieces"], report["tree"], report["standard"]) <= TOLERANCES["fp32"].graph.absolute
    assert [rows.shape for rows in logits] == [(len(prompt), whole.manifest.vocab_size) for prompt in prompts]


def test_prompts_are_the_texts_where_the_tokenizer_gives_enough(whole):
    from tokenizers import Tokenizer

    text = whole.text("tokenizer.json")
    found = check_prompts(text, whole.manifest.vocab_size)
    assert len(found) == 3
    assert all(12 <= len(prompt) <= 28 for prompt in found)
    assert list(found[0]) == Tokenizer.from_str(text).encode(check._TEXTS[0]).ids[:28]
    few = check_prompts(text, 5)
    assert all(len(prompt) >= 12 and max(prompt) < 5 for prompt in few)


def test_a_graph_that_ignores_the_tree_mask(whole, prompts):
    def change(graph):
        for node in nodes(graph, "GroupQueryAttention"):
            node.input[10] = ""

    edit(whole.folder / whole.manifest.target.file, change)
    with pytest.raises(ParityError, match="a token tree: logits differ by"):
        run(whole, prompts)


def test_a_graph_that_ignores_positions(whole, prompts):
    """Linear positions are right for chains and wrong for trees."""

    def change(graph):
        for node in nodes(graph, "GroupQueryAttention"):
            node.input[9] = ""

    edit(whole.folder / whole.manifest.target.file, change)
    with pytest.raises(ParityError, match="a token tree"):
        run(whole, prompts)


def test_a_standard_graph_that_computes_something_else(whole, prompts):
    def change(graph):
        for node in nodes(graph, "SkipSimplifiedLayerNormalization"):
            for attribute in node.attribute:
                if attribute.name == "epsilon":
                    attribute.f = 0.1

    edit(whole.folder / whole.manifest.standard, change)
    with pytest.raises(ParityError, match="the standard graph: logits differ by"):
        run(whole, prompts)


def test_a_cache_that_does_not_move_committed_rows(whole, prompts, monkeypatch):
    def commit(self, rows):
        self.length += len(rows)

    monkeypatch.setattr(Cache, "commit", commit)
    with pytest.raises(ParityError, match="committing a path of a tree"):
        run(whole, prompts)


def test_weights_that_are_not_numbers(whole, prompts):
    path = whole.folder / "onnx" / "model.onnx_data"
    data = np.memmap(path, np.float32, "r+")
    data[::7] = np.nan
    data.flush()
    with pytest.raises(ParityError, match="NaN or infinity"):
        run(whole, prompts)


def test_drafts_pass_and_report_how_close_they_are(whole, prompts):
    _, logits = run(whole, prompts)
    close = check_draft(whole.folder, "self-int8", whole.manifest.drafts["self-int8"], prompts, logits)
    far = check_draft(whole.folder, "self-int4", whole.manifest.drafts["self-int4"], prompts, logits)
    assert 0 <= close["kl"] < far["kl"]
    assert close["agreement"] >= far["agreement"] > 0.5


def test_a_draft_of_another_model(whole, prompts):
    _, logits = run(whole, prompts)
    reversed_laws = [-8 * rows for rows in logits]
    with pytest.raises(ParityError, match=r"draft self-int4: KL\(target\|\|draft\) is"):
        check_draft(whole.folder, "self-int4", whole.manifest.drafts["self-int4"], prompts, reversed_laws)


def test_compare_allows_a_tie_and_nothing_more():
    reference = np.zeros((1, 4), np.float32)
    reference[0, :2] = (1.0, 0.9995)
    swapped = reference.copy()
    swapped[0, :2] = (0.9995, 1.0)
    assert compare("x", swapped, reference, Bound(2e-3, 1.0)) == pytest.approx(5e-4, abs=1e-5)
    with pytest.raises(ParityError, match=r"x: logits differ by 0\.0005 where 0\.0001 is allowed"):
        compare("x", swapped, reference, Bound(1e-4, 1.0))


def test_compare_bounds_the_divergence_where_logits_are_free():
    reference = np.zeros((2, 4), np.float32)
    moved = reference.copy()
    moved[0, 0] = 1.0
    kl = np.log((3 + np.e) / 4) - 0.25  # of the first row; the second is equal
    assert compare("x", moved, reference, Bound(None, 0.2)) == pytest.approx(kl / 2, rel=1e-2)
    with pytest.raises(ParityError, match="x: the laws differ by KL"):
        compare("x", moved, reference, Bound(None, kl / 3))


def test_agreement_is_the_mean_divergence():
    """Against a straightforward sum over a small vocabulary."""
    random = np.random.default_rng(3)
    p, q = random.normal(size=(5, 7)).astype(np.float32), random.normal(size=(5, 7)).astype(np.float32)

    def law(logits):
        return np.exp(logits.astype(float)) / np.exp(logits.astype(float)).sum(-1, keepdims=True)

    expected = (law(p) * np.log(law(p) / law(q))).sum(-1).mean()
    report = agreement([p[:2], p[2:]], [q[:2], q[2:]], "q")
    assert report["kl"] == pytest.approx(expected, abs=1e-5)
    assert report["agreement"] == pytest.approx((p.argmax(-1) == q.argmax(-1)).mean(), abs=1e-4)


@pytest.mark.both
class TestPyTorch:
    """Against transformers, which loads the checkpoint itself."""

    @pytest.fixture(autouse=True)
    def installed(self):
        pytest.importorskip("torch")
        pytest.importorskip("transformers")

    def test_the_checkpoints_own_logits_pass(self, whole, prompts, tiny_checkpoint):
        _, logits = run(whole, prompts)
        report = torch_check.check_pytorch(tiny_checkpoint, "fp32", prompts, logits)
        assert report["status"] == "passed"
        assert report["max_abs"] <= TOLERANCES["fp32"].pytorch.absolute
        assert report["agreement"] == 1.0
        assert report["torch"]
        assert report["transformers"]

    def test_other_logits_do_not(self, prompts, tiny_checkpoint, whole):
        _, logits = run(whole, prompts)
        logits[1] = logits[1] + np.float32(0.01)
        with pytest.raises(ParityError, match=r"fp32 against PyTorch, prompt 2: logits differ by 0\.01"):
            torch_check.check_pytorch(tiny_checkpoint, "fp32", prompts, logits)
        logits[1] = -logits[1]
        with pytest.raises(ParityError, match="int8 against PyTorch, prompt 2: the laws differ by KL"):
            torch_check.check_pytorch(tiny_checkpoint, "int8", prompts, logits)

    def test_a_checkpoint_that_transformers_cannot_load_is_said(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        report = torch_check.check_pytorch(tmp_path, "fp32", [(1, 2)], [np.zeros((2, 4), np.float32)])
        assert report["status"] == "skipped"
        assert "transformers cannot run this checkpoint" in report["reason"]


def test_without_pytorch_the_report_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(torch_check, "missing_package", lambda _: "torch")
    report = torch_check.check_pytorch(tmp_path, "fp32", [], [])
    assert report == {"status": "skipped", "reason": "torch not installed"}


def test_a_check_that_was_killed_is_an_error(monkeypatch, tmp_path):
    """Not a skip: the machine had not enough memory, and nobody has seen whether the graph is right."""
    monkeypatch.setattr(torch_check, "missing_package", lambda _: None)
    monkeypatch.setattr(torch_check.sys, "executable", str(_script(tmp_path, "kill -9 $$")))
    with pytest.raises(ExportError, match=r"ended by signal 9 .*--no-verify"):
        torch_check.check_pytorch(tmp_path, "fp32", [], [])


def _script(folder: Path, line: str) -> Path:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return path


def test_a_growing_graph_is_checked_too(whole, prompts):
    spec = replace(whole.manifest.target, file=whole.manifest.standard, flavour="growing")
    report, logits = check.check_growing(whole.folder, spec, prompts)
    assert report["status"] == "passed"
    _, expected = run(whole, prompts)
    for ours, theirs in zip(logits, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCES["fp32"].graph.absolute)


@pytest.mark.both
@pytest.mark.parametrize("case", ["llama 3 rotation", "biases"])
def test_a_gguf_file_of_which_transformers_ignores_a_part(tmp_path, case):
    """transformers 5.24 reads neither `rope_freqs.weight` nor attention biases of a Llama GGUF: the check tells it."""
    pytest.importorskip("torch")
    pytest.importorskip("accelerate")
    model, divisors = TinyLlama(attention_bias=True), None
    if case == "llama 3 rotation":
        model = TinyLlama(heads=2, kv_heads=1, head_dim=64, rope_theta=500000.0)
        divisors = _llama3_divisors(model.rope_theta, model.head, 8.0, 8192).astype(np.float32)
    path = write_tiny_gguf(tmp_path / "tiny.gguf", model, rope_freqs=divisors)
    manifest = export(str(path), tmp_path / "bundle", ExportOptions(drafts=("none",)))
    assert manifest.checks["pytorch"]["status"] == "passed"
    assert manifest.checks["pytorch"]["max_abs"] <= TOLERANCES["fp32"].pytorch.absolute
