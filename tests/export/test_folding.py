"""Folding scales into a model changes its weights, and nothing that it computes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from specedge.export import folding
from specedge.export.folding import FoldedTensors
from specedge.export.layers import read_decoder
from specedge.quant.formats import find_format
from specedge.tests.activations import moments_of
from specedge.tests.reference import MemoryTensors, forward, memory_checkpoint

SHAPES = [
    {},
    {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    {"num_key_value_heads": 1, "attention_bias": True},
    {"num_key_value_heads": 4},
    {"head_dim": 32},
]


class AnyCalibration:
    """The same random moments for every layer of a width."""

    def __init__(self, decoder):
        sizes = decoder.dimensions
        self._width = {"o_proj": sizes.q_size, "down_proj": sizes.mlp_size}
        self._hidden = sizes.hidden_size

    def __contains__(self, name):
        return True

    def __getitem__(self, name):
        width = self._width.get(name.rpartition(".")[2], self._hidden)
        rng = np.random.default_rng(width)
        return moments_of((rng.standard_normal((400, width)) * rng.uniform(0.1, 10, width)).astype(np.float32))


def folded(checkpoint, precision):
    decoder = read_decoder(checkpoint, find_format(precision), 64)
    return FoldedTensors(decoder, checkpoint.tensors, AnyCalibration(decoder))


def logits(checkpoint, tensors, rng):
    whole = MemoryTensors({name: tensors[name] for name in tensors})
    return forward(dataclasses.replace(checkpoint, tensors=whole), rng.integers(160, size=30))[0]


@pytest.mark.parametrize("changes", SHAPES)
@pytest.mark.parametrize("precision", ["int8", "int8-static", "int4"])
def test_folding_alone_leaves_the_logits_as_they_were(changes, precision):
    checkpoint = memory_checkpoint(**changes)
    tensors = folded(checkpoint, precision)
    plain = logits(checkpoint, checkpoint.tensors, np.random.default_rng(0))
    found = logits(checkpoint, tensors, np.random.default_rng(0))
    assert np.abs(found - plain).max() < 2e-4 * np.abs(plain).max()


@pytest.mark.parametrize("changes", SHAPES)
def test_any_scales_leave_the_logits_as_they_were(changes, monkeypatch, rng):
    """All three folds at once, with scales far from 1."""

    def drawn(weights, grid, moments, *, rounds_rows, static, second_order):
        return np.exp(rng.uniform(-2, 2, weights[0].shape[1])).astype(np.float32)

    monkeypatch.setattr(folding, "search_scale", drawn)
    checkpoint = memory_checkpoint(**changes)
    tensors = folded(checkpoint, "int4")
    plain = logits(checkpoint, checkpoint.tensors, np.random.default_rng(0))
    found = logits(checkpoint, tensors, np.random.default_rng(0))
    assert np.abs(found - plain).max() < 1e-3 * np.abs(plain).max()
    changed = {name for name in tensors if not np.array_equal(tensors[name], checkpoint.tensors[name])}
    kept = {name for name in tensors if name not in changed}
    assert all(".layers." not in name or name.endswith("bias") or "o_proj" in name for name in kept)
    assert "model.norm.weight" in kept
    assert "model.embed_tokens.weight" in kept


def test_a_layers_input_is_divided_by_what_its_weight_is_multiplied_with(rng):
    checkpoint = memory_checkpoint()
    tensors = folded(checkpoint, "int4")
    for part, site in (("self_attn.q", "self_attn.qkv"), ("self_attn.v", "self_attn.qkv"), ("mlp.down", "mlp.down")):
        scale = tensors.scale(f"model.layers.1.{site}_proj")
        name = f"model.layers.1.{part}_proj.weight"
        assert scale is not None
        assert np.allclose(tensors[name], checkpoint.tensors[name] * scale)
        assert scale.max() > 1.01
    assert tensors.scale("lm_head") is None
    assert tensors.scale("model.layers.1.self_attn.o_proj") is None


def test_a_layer_in_floats_is_not_scaled():
    checkpoint = memory_checkpoint()
    decoder = read_decoder(checkpoint, dataclasses.replace(find_format("int4"), kept=(("first", None),)), 64)
    tensors = FoldedTensors(decoder, checkpoint.tensors, AnyCalibration(decoder))
    name = "model.layers.{}.mlp.gate_proj"
    assert (tensors.scale(name.format(0)) == 1).all()
    assert (tensors.scale(name.format(1)) != 1).any()
