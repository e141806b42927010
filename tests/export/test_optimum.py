"""A family without a builder goes through Optimum (second environment), and its bundle says what it cannot do."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from specedge.export import optimum
from specedge.export.checkpoint import Checkpoint, Tokenizer
from specedge.export.pipeline import ExportOptions, export
from specedge.runtime.bundle import open_bundle
from specedge.runtime.contracts import Draft
from specedge.runtime.errors import ExportError, UnsupportedModelError, UsageError
from specedge.tests.tiny import CHAT_TEMPLATE, SPECIAL, tiny_tokenizer

pytest.importorskip("onnx")

SIZES = {
    "gpt2": {"n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "gemma2": {
        "max_position_embeddings": 256,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
}


@pytest.fixture(scope="module", params=["gpt2", "gemma2"])
def checkpoint(request, tmp_path_factory) -> Path:
    """A random model of a family that has no builder."""
    if importlib.util.find_spec("optimum") is None:
        pytest.skip("optimum is not installed; the second environment has it")
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param) / request.param
    common = {"vocab_size": 320, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3}
    config = transformers.AutoConfig.for_model(request.param, **SIZES[request.param], **common)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tiny_tokenizer(320).save(str(folder / "tokenizer.json"))
    content = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def bundle(checkpoint, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "bundle"
    export(str(checkpoint), folder)
    return folder


@pytest.mark.optimum
class TestBundle:
    def test_says_that_it_has_no_tree_mask_and_no_drafts(self, bundle):
        manifest = open_bundle(bundle, verify=True).manifest
        assert manifest.family == "optimum"
        assert manifest.target.flavour == "growing"
        assert not manifest.target.tree
        assert manifest.target.file == manifest.standard == "onnx/model.onnx"
        assert dict(manifest.drafts) == {}
        assert manifest.target.capacity == 256
        assert (manifest.target.layers, manifest.vocab_size) == (2, 320)

    def test_was_checked_against_pytorch(self, bundle):
        checks = open_bundle(bundle).manifest.checks
        assert checks["self"]["status"] == "passed"
        assert checks["pytorch"]["status"] == "passed"
        assert checks["pytorch"]["max_abs"] <= 2e-3

    def test_the_runtime_verifies_chains_with_it(self, bundle):
        from specedge.runtime.growing import GrowingDecoder

        spec = open_bundle(bundle).manifest.target
        decoder = GrowingDecoder(bundle / spec.file, spec)
        chain = decoder.forward([5, 9, 11], Draft.chain([7, 8])).logits.copy()
        decoder.rewind(0)
        plain = [decoder.forward([token]).logits[0] for token in (5, 9, 11, 7, 8)][2:]
        np.testing.assert_allclose(chain, plain, atol=1e-4)

    def test_optimum_opens_it(self, checkpoint, bundle):
        if checkpoint.name == "gemma2":
            pytest.skip("Optimum's loader takes head_dim and kv_heads of Gemma 2 from the wrong keys (optimum #2379)")
        code = (
            "import sys, torch\n"
            "from optimum.onnxruntime import ORTModelForCausalLM\n"
            "model = ORTModelForCausalLM.from_pretrained(sys.argv[1])\n"
            "print(model.generate(torch.tensor([[5, 9, 11]]), max_new_tokens=4, do_sample=False).shape[1] > 3)\n"
        )
        command = [sys.executable, "-c", code, str(bundle)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.stdout.strip() == "True", done.stderr[-2000:]

    def test_only_fp32_for_the_cpu(self, checkpoint, bundle, tmp_path):
        for given in ({"precision": "int4"}, {"device": "cuda"}):
            with pytest.raises(UsageError, match="goes through Optimum, which writes fp32 for the CPU"):
                export(str(checkpoint), tmp_path / "b", ExportOptions(**given))


@pytest.mark.optimum
def test_a_family_that_optimum_does_not_know_either(tiny_checkpoint, tmp_path):
    if importlib.util.find_spec("optimum") is None:
        pytest.skip("optimum is not installed; the second environment has it")
    source = tmp_path / "source"
    source.mkdir()
    for path in tiny_checkpoint.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "mamba9"}))
    with pytest.raises(UnsupportedModelError, match="'mamba9', and Optimum cannot export it"):
        export(str(source), tmp_path / "b")
    assert not (tmp_path / "b").exists()


def model(path: Path) -> Checkpoint:
    return Checkpoint("m", "folder:m", {"model_type": "gpt2", "hidden_size": 8}, {}, Tokenizer("{}", {}), path)


def test_a_gguf_file_cannot_go_through_optimum(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(UnsupportedModelError, match="Optimum reads no GGUF"):
        optimum.write_through_optimum(model(path), tmp_path, capacity=64)


def test_an_exporter_that_dies_is_told_in_one_line(tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho first >&2\necho the reason >&2\nexit 9\n")
    script.chmod(0o755)
    monkeypatch.setattr(optimum, "_installed", lambda: True)
    monkeypatch.setattr(optimum.sys, "executable", str(script))
    with pytest.raises(ExportError, match="Optimum's exporter failed: the reason"):
        optimum.write_through_optimum(model(tmp_path), tmp_path, capacity=64)


def test_a_graph_without_a_cache_is_refused(tmp_path):
    from onnx import TensorProto, helper, save

    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, [1, "s"])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, "s", 4])
    graph = helper.make_graph([], "g", [ids], [logits])
    save(helper.make_model(graph), tmp_path / "model.onnx")
    with pytest.raises(UnsupportedModelError, match="no key-value cache"):
        optimum._describe(tmp_path / "model.onnx", {"model_type": "x", "hidden_size": 8}, 64)
