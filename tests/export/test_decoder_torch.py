"""The speculative graph against transformers' own models, made here from random weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specedge.export.checkpoint import Checkpoint, Tokenizer
from specedge.export.decoder import write_decoder
from specedge.tests.export.graphs import Speculative
from specedge.tests.reference import LLAMA3, MemoryTensors

pytest.importorskip("onnx")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.both

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}


def transformers_model(name, scaling=None, **changes):
    """A random model of transformers, and the same as a checkpoint."""
    torch.manual_seed(7)
    rope = {"rope_theta": 5000.0}
    if int(transformers.__version__.split(".")[0]) >= 5:
        given = {"rope_parameters": {"rope_type": "default", **(scaling or {}), **rope}}
    else:
        given = {"rope_scaling": scaling, **rope}
    config = getattr(transformers, f"{name}Config")(**SIZES, **given, **changes)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or parameter_name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    tensors = MemoryTensors({key: value.numpy() for key, value in model.state_dict().items()})
    flat = {**config.to_dict(), **rope, "rope_scaling": scaling}
    flat.pop("rope_parameters", None)
    return model, Checkpoint("tiny", "folder:tiny", flat, tensors, Tokenizer("{}", {}), Path("tiny"))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True}),
        ("Llama", {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3}),
        ("Llama", {"scaling": LLAMA3}),
        ("Llama", {"scaling": {"rope_type": "linear", "factor": 3.0}, "head_dim": 32}),
        ("Mistral", {"sliding_window": None}),
        ("Mistral", {"sliding_window": 96, "head_dim": 32}),
    ],
)
def test_logits_and_hidden_rows_are_those_of_transformers(tmp_path, rng, name, changes):
    model, checkpoint = transformers_model(name, **changes)
    spec = write_decoder(checkpoint, tmp_path, stem="target", precision="fp32", capacity=96)
    graph = Speculative(tmp_path / "target.onnx", spec)
    ids = rng.integers(0, 160, 90)
    with torch.no_grad():
        theirs = model(torch.from_numpy(ids)[None], output_hidden_states=True)
    pieces = [graph.run(ids[start:end]) for start, end in ((0, 40), (40, 41), (41, 90))]
    for ours, expected in zip(zip(*pieces, strict=True), (theirs.logits, theirs.hidden_states[-1]), strict=True):
        assert np.abs(np.concatenate(ours) - expected[0].numpy()).max() < 2e-3
