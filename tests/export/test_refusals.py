"""What an export cannot do is said early, or where it is known, in one line."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from safetensors.numpy import load_file, save_file

from specedge.export.pipeline import ExportOptions, export
from specedge.runtime.errors import MissingExtraError, SpecEdgeError, UsageError
from specedge.runtime.prompts import Prompt
from specedge.tests.tiny import write_tiny_checkpoint

pytest.importorskip("onnx")


def test_without_torch_distillation_is_refused_before_any_work(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    steps = []
    options = ExportOptions(drafts=("self-int4+gptq+distil",), capacity=64)
    with pytest.raises(MissingExtraError, match=r"specedge\[train\]"):
        export(str(tiny_checkpoint), tmp_path / "b", options, lambda *step: steps.append(step[0]))
    assert set(steps) <= {"resolve"} and not list(tmp_path.iterdir())


@pytest.mark.parametrize("draft", ["self-int4", "self-fp16"])
def test_weights_beyond_16_bits_are_told(tmp_path, draft):
    source = write_tiny_checkpoint(tmp_path / "large")
    weights = load_file(source / "model.safetensors")
    save_file({name: 1e7 * tensor for name, tensor in weights.items()}, source / "model.safetensors")
    with pytest.raises(SpecEdgeError, match="do not fit into 16 bits; choose"):
        export(str(source), tmp_path / "b", ExportOptions(drafts=(draft,), capacity=64, verify=False))
    assert not (tmp_path / "b").exists()


def test_layers_are_chosen_on_texts_that_fit(tiny_checkpoint, tmp_path):
    prompts = tuple(Prompt(str(at), "a", "the quick brown fox jumps over the dog") for at in range(8))
    options = ExportOptions(drafts=("layers-1",), capacity=512, verify=False, calibration_prompts=prompts)
    long = replace(options, calibration_prompts=tuple(replace(p, text=" ".join([p.text] * 14)) for p in prompts))
    with pytest.raises(UsageError, match=r"texts of 256 tokens, half the capacity.*raise --capacity"):
        export(str(tiny_checkpoint), tmp_path / "b", long)
    assert not (tmp_path / "b").exists()
    export(str(tiny_checkpoint), tmp_path / "b", options)
