"""A decoder in PyTorch, no more than it takes to differentiate it: what the graphs of export/layers.py compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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

__all__ = ["NORM", "TorchDecoder", "norm_names", "plain_layers"]

Matrix = NDArray[np.float32]

NORM = "norm"
"""What is free in a decoder beside its layers: norms are w (1 + a), with a free."""


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
    ) -> TorchDecoder:
        """Takes a model.

        Args:
            family, sizes: What it is.
            tensors: Where the norms are read from.
            layers: By the names they are stored under.
            free_norms: Whether the norms are free.
        """
        import torch

        norms = {name: torch.from_numpy(np.array(tensors[name], np.float32)) for name in norm_names(family, sizes)}
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
        import torch

        tables = rotary_tables(self.sizes, ids.shape[1])
        cosine, sine = (torch.from_numpy(table.astype(np.float32)) for table in tables)

        def rotate(heads: Tensor) -> Tensor:
            low, high = heads.chunk(2, -1)
            return torch.cat([low * cosine - high * sine, high * cosine + low * sine], -1)

        rows = self.layers[EMBEDDING].look_up(ids)
        for layer in range(self.sizes.layers):
            rows = self._layer(rows, layer, rotate)
        return self._normed(rows, self.family.final_norm)

    @property
    def head(self) -> TorchLayer:
        """What gives logits; the embedding, where they are tied."""
        return self.layers[EMBEDDING if self.sizes.tied else HEAD]

    def logits(self, rows: Tensor) -> Tensor:
        """[..., vocab] of rows after the final norm, [..., hidden]."""
        return self.head.apply(rows)

    def _layer(self, rows: Tensor, layer: int, rotate: Callable[[Tensor], Tensor]) -> Tensor:
        from torch.nn.functional import scaled_dot_product_attention, silu

        names, sizes = self.family, self.sizes
        prefix = names.layer.format(layer=layer)
        apply = {name: self.layers[f"model.layers.{layer}.{name}"].apply for name in _LAYERS}
        qkv = apply["self_attn.qkv_proj"](self._normed(rows, f"{prefix}{names.attention_norm}.weight"))
        keys, values = sizes.q_size, sizes.q_size + sizes.kv_size
        q, k, v = (
            qkv[..., first:last].reshape(*rows.shape[:2], -1, sizes.head_dim).transpose(1, 2)
            for first, last in ((0, keys), (keys, values), (values, values + sizes.kv_size))
        )
        shared = sizes.heads // sizes.kv_heads
        k, v = rotate(k).repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        mixed = scaled_dot_product_attention(rotate(q), k, v, is_causal=True)
        rows = rows + apply["self_attn.o_proj"](mixed.transpose(1, 2).flatten(2))
        inner = self._normed(rows, f"{prefix}{names.mlp_norm}.weight")
        gated = silu(apply["mlp.gate_proj"](inner)) * apply["mlp.up_proj"](inner)
        return rows + apply["mlp.down_proj"](gated)

    def _normed(self, rows: Tensor, name: str) -> Tensor:
        mean = rows.square().mean(-1, keepdim=True)
        return rows * (mean + self.sizes.norm_eps).rsqrt() * self.norm(name)


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
