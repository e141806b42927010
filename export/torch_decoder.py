"""A decoder in PyTorch, no more than it takes to differentiate it: what the graphs of export/layers.py compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specedge.export.checkpoint import Tensors
from specedge.export.layers import linear_layers
from specedge.export.rope import rotary_tables
from specedge.export.torch_layer import TorchLayer
from specedge.models import Dimensions, Family
from specedge.quant.formats import EMBEDDING, HEAD
from specedge.quant.layer import Layer

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "NORM",
    "CausalAttention",
    "TorchAttention",
    "TorchDecoder",
    "norm_names",
    "plain_layers",
    "rotate",
    "torch_tables",
]

Matrix = NDArray[np.float32]

TorchAttention = Callable[[int, "Tensor", "Tensor", "Tensor"], "Tensor"]
"""Attention of a layer: its number, q [B, heads, S, head_dim], k and v [B, kv_heads, S, head_dim], none of them
rotated yet -> [B, heads, S, head_dim]."""

NORM = "norm"
"""What is free in a decoder beside its layers: norms are w (1 + a), with a free."""


class CausalAttention:
    """Attention over texts that begin at position 0, without a cache.

    Args:
        sizes: The decoder's.
        rows: Of the longest text.
    """

    def __init__(self, sizes: Dimensions, rows: int) -> None:
        self._shared = sizes.heads // sizes.kv_heads
        self._tables = torch_tables(sizes, rows)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.nn.functional import scaled_dot_product_attention

        tables = [table.to(q.device) for table in self._tables]
        k, v = rotate(k, *tables).repeat_interleave(self._shared, 1), v.repeat_interleave(self._shared, 1)
        return scaled_dot_product_attention(rotate(q, *tables), k, v, is_causal=True)


@dataclass
class TorchDecoder:
    """A decoder; a text is read from position 0, without a cache.

    Attributes:
        family, sizes: What it is.
        layers: By the names they are stored under.
        norms: By tensor name.
        free_norms: The free a of each norm; empty: none is.
        free: All free numbers, by what they are.
    """

    family: Family
    sizes: Dimensions
    layers: Mapping[str, TorchLayer]
    norms: Mapping[str, Tensor]
    free_norms: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        family: Family,
        sizes: Dimensions,
        tensors: Tensors,
        layers: Mapping[str, TorchLayer],
        *,
        free_norms: bool = False,
        device: Any = "cpu",
    ) -> TorchDecoder:
        """Takes a model.

        Args:
            family, sizes: What it is.
            tensors: Where the norms are read from.
            layers: By the names they are stored under.
            free_norms: Whether the norms are free.
            device: Where it computes; the layers are there already.
        """
        import torch

        norms = {
            name: torch.from_numpy(np.array(tensors[name], np.float32)).to(device) for name in norm_names(family, sizes)
        }
        free = {name: torch.zeros_like(norm).requires_grad_() for name, norm in norms.items()} if free_norms else {}
        return cls(family, sizes, layers, norms, free)

    @property
    def free(self) -> dict[str, list[Tensor]]:
        kinds: dict[str, list[Tensor]] = {NORM: list(self.free_norms.values())} if self.free_norms else {}
        for layer in self.layers.values():
            for kind, numbers in layer.free.items():
                kinds.setdefault(kind, []).append(numbers)
        return kinds

    def norm(self, name: str) -> Tensor:
        """A norm's weight, as it stands."""
        weight = self.norms[name]
        return weight * (1 + self.free_norms[name]) if name in self.free_norms else weight

    def hidden(self, ids: Tensor) -> Tensor:
        """Rows after the final norm, [B, S, hidden], of ids, [B, S]."""
        return self.run(ids, CausalAttention(self.sizes, ids.shape[1]))[0]

    def run(self, ids: Tensor, attention: TorchAttention, taps: Sequence[int] = ()) -> tuple[Tensor, list[Tensor]]:
        """Runs all layers.

        Args:
            ids: [B, S].
            attention: Computes that of a layer.
            taps: Layers whose input is wanted as well.

        Returns:
            Rows after the final norm, [B, S, hidden], and the input of each layer of `taps`, likewise.
        """
        rows = self.layers[EMBEDDING].look_up(ids)
        kept = {}
        for layer in range(self.sizes.layers):
            if layer in taps:
                kept[layer] = rows
            rows = self._layer(rows, layer, attention)
        return self._normed(rows, self.family.final_norm), [kept[layer] for layer in taps]

    @property
    def device(self) -> Any:
        """Where it computes."""
        return self.norms[self.family.final_norm].device

    @property
    def head(self) -> TorchLayer:
        """What gives logits; the embedding, where they are tied."""
        return self.layers[EMBEDDING if self.sizes.tied else HEAD]

    def logits(self, rows: Tensor) -> Tensor:
        """[..., vocab] of rows after the final norm, [..., hidden]."""
        return self.head.apply(rows)

    def _layer(self, rows: Tensor, layer: int, attention: TorchAttention) -> Tensor:
        from torch.nn.functional import silu

        names, sizes = self.family, self.sizes
        prefix = names.layer.format(layer=layer)
        apply = {name: self.layers[f"model.layers.{layer}.{name}"].apply for name in _LAYERS}
        qkv = apply["self_attn.qkv_proj"](self._normed(rows, f"{prefix}{names.attention_norm}.weight"))
        keys, values = sizes.q_size, sizes.q_size + sizes.kv_size
        q, k, v = (
            qkv[..., first:last].reshape(*rows.shape[:2], -1, sizes.head_dim).transpose(1, 2)
            for first, last in ((0, keys), (keys, values), (values, values + sizes.kv_size))
        )
        mixed = attention(layer, q, k, v)
        rows = rows + apply["self_attn.o_proj"](mixed.transpose(1, 2).flatten(2))
        inner = self._normed(rows, f"{prefix}{names.mlp_norm}.weight")
        gated = silu(apply["mlp.gate_proj"](inner)) * apply["mlp.up_proj"](inner)
        return rows + apply["mlp.down_proj"](gated)

    def _normed(self, rows: Tensor, name: str) -> Tensor:
        mean = rows.square().mean(-1, keepdim=True)
        return rows * (mean + self.sizes.norm_eps).rsqrt() * self.norm(name)


def torch_tables(sizes: Dimensions, rows: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, [rows, head_dim / 2]."""
    import torch

    cosine, sine = (torch.from_numpy(table.astype(np.float32)) for table in rotary_tables(sizes, rows))
    return cosine, sine


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Heads, [B, heads, S, head_dim], turned to their positions' angles, whose tables broadcast to [B, 1, S, ...]."""
    import torch

    low, high = heads.chunk(2, -1)
    return torch.cat([low * cosine - high * sine, high * cosine + low * sine], -1)


_LAYERS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def norm_names(family: Family, sizes: Dimensions) -> list[str]:
    """Tensor names of all norms."""
    names = []
    for layer in range(sizes.layers):
        prefix = family.layer.format(layer=layer)
        names += [f"{prefix}{family.attention_norm}.weight", f"{prefix}{family.mlp_norm}.weight"]
    return [*names, family.final_norm]


def plain_layers(family: Family, sizes: Dimensions, tensors: Tensors) -> dict[str, Layer]:
    """The linear layers of a model in floats, by the names they are stored under."""
    return {name: Layer(weight, bias) for name, weight, bias in linear_layers(family, sizes, tensors)}
