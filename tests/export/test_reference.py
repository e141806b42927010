"""What the taps show is what a plain computation gives the linear layers."""

from __future__ import annotations

import numpy as np
import pytest

from specedge.export.decoder import write_decoder
from specedge.export.reference import Reference, reference
from specedge.tests.reference import forward, memory_checkpoint


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}])
def test_every_linear_layer_has_its_tap(changes, rng):
    checkpoint = memory_checkpoint(**changes)
    tokens = rng.integers(160, size=30).tolist()
    with reference(checkpoint, 64, threads=1) as model, model.taps(64) as taps:
        rows = {name: next(taps.run(tokens, [site]))[site] for site in taps.sites for name in site.names}
    assert set(rows) == {
        "lm_head",
        *(
            f"model.layers.{layer}.{module}"
            for layer in range(2)
            for module in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
        ),
    }
    _, hidden = forward(checkpoint, np.array(tokens))
    assert np.abs(rows["lm_head"] - hidden).max() < 1e-4
    tensors = checkpoint.tensors

    def linear(x, name):
        y = x @ tensors[f"{name}.weight"].T
        return y + tensors[f"{name}.bias"] if f"{name}.bias" in tensors else y

    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp."
        gate = linear(rows[f"{prefix}gate_proj"], f"{prefix}gate_proj")
        gated = gate / (1 + np.exp(-gate)) * linear(rows[f"{prefix}up_proj"], f"{prefix}up_proj")
        assert np.abs(rows[f"{prefix}down_proj"] - gated).max() < 1e-4
    # What enters the second layer is what leaves the first, normed.
    x = tensors["model.embed_tokens.weight"][tokens]
    x = x + linear(rows["model.layers.0.self_attn.o_proj"], "model.layers.0.self_attn.o_proj")
    x = x + linear(rows["model.layers.0.mlp.down_proj"], "model.layers.0.mlp.down_proj")
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * tensors["model.layers.1.input_layernorm.weight"]
    assert np.abs(rows["model.layers.1.self_attn.qkv_proj"] - x).max() < 1e-4


def test_chunks_and_leaving_layers_out_change_nothing(rng):
    checkpoint = memory_checkpoint(max_position_embeddings=1024)
    tokens = rng.integers(160, size=600).tolist()
    with reference(checkpoint, 700, threads=1) as model, model.taps(700) as taps:
        whole = list(taps.run(tokens, taps.sites))
        assert [len(chunk[taps.sites[0]]) for chunk in whole] == [256, 256, 88]
        alone = list(taps.run(tokens, taps.sites[:3]))
        for one, other in zip(alone, whole, strict=True):
            assert set(one) == set(taps.sites[:3])
            assert all(np.abs(rows - other[site]).max() < 1e-4 for site, rows in one.items())
        with pytest.raises(ValueError, match="do not fit"):
            next(taps.run([1] * 700, taps.sites))
    _, hidden = forward(checkpoint, np.array(tokens))
    last = np.concatenate([chunk[taps.sites[-1]] for chunk in whole])
    assert np.abs(last - hidden).max() < 1e-3


def test_an_fp32_target_is_used_as_it_stands(tmp_path):
    checkpoint = memory_checkpoint()
    spec = write_decoder(checkpoint, tmp_path, stem="target", precision="fp32", capacity=64, standard=True)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    with reference(checkpoint, 64, written=(tmp_path, spec), threads=1) as model:
        assert model.folder == tmp_path
        with model.taps(64) as taps:
            first = next(taps.run([1, 2, 3], taps.sites))
        with model.decoder(32) as decoder:
            hidden = decoder.forward([1, 2, 3]).hidden
            assert hidden is not None
            assert np.abs(hidden[-1] - first[taps.sites[-1]][-1]).max() < 1e-4
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    with reference(checkpoint, 100, written=(tmp_path, spec), threads=1) as model:
        assert model.folder != tmp_path  # its capacity is too small
    assert not model.folder.exists()


def test_a_rounded_graph_has_no_taps(tmp_path):
    spec = write_decoder(memory_checkpoint(), tmp_path, stem="target", precision="int4", capacity=64)
    with pytest.raises(ValueError, match="int4"), Reference(tmp_path, spec, ()).taps(64):
        pass
