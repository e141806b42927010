"""A target in PyTorch that writes many texts at once, each in a slot of one cache, and keeps the rows heads read."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specedge.export.checkpoint import Checkpoint
from specedge.export.torch_decoder import CausalAttention, TorchDecoder, plain_layers, rotate, torch_tables
from specedge.export.torch_layer import TorchLayer, fast_dtype
from specedge.models import find_family, read_dimensions
from specedge.runtime.errors import MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["BatchTarget", "TargetRows", "check_packages", "fast_dtype", "fast_products", "load_target"]


@dataclass(frozen=True)
class TargetRows:
    """What the target gives of n tokens.

    Attributes:
        hidden: [n, hidden_size], after the final norm.
        inner: [n, taps * hidden_size], the inputs of some layers; None where none are wanted.
    """

    hidden: Tensor
    inner: Tensor | None

    def __getitem__(self, place: slice) -> TargetRows:
        return TargetRows(self.hidden[place], None if self.inner is None else self.inner[place])


def check_packages() -> None:
    """Tells what of the train extra is missing.

    Raises:
        MissingExtraError: A package is.
    """
    for name in ("torch", "accelerate", "safetensors"):
        if importlib.util.find_spec(name) is None:
            raise MissingExtraError(name, "train")


def fast_products(device: Any) -> Any:
    """A context in which products are computed in `fast_dtype`, the rest in float32."""
    import torch

    dtype = fast_dtype(device)
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype is torch.bfloat16)


def load_target(checkpoint: Checkpoint, dtype: Any = None, device: Any = "cpu") -> TorchDecoder:
    """A checkpoint as a decoder in PyTorch.

    Args:
        checkpoint: The model.
        dtype: What products are computed in; None: float32.
        device: Where.

    Raises:
        UnsupportedModelError: No builder covers it.
        CheckpointError: It is broken.
    """
    family = find_family(checkpoint.config.get("model_type"))
    sizes = read_dimensions(family, checkpoint.config)
    layers = {
        name: TorchLayer(layer, dtype=dtype, device=device)
        for name, layer in plain_layers(family, sizes, checkpoint.tensors).items()
    }
    return TorchDecoder.build(family, sizes, checkpoint.tensors, layers, device=device)


class BatchTarget:
    """Texts side by side: slots 0 to n - 1 of the cache hold the n that are being written.

    Args:
        decoder: The target.
        slots: Most texts at once.
        capacity: Most tokens of a text.
        taps: Layers whose input is kept beside the last rows.
        dtype: Of the cache.
    """

    def __init__(self, decoder: TorchDecoder, slots: int, capacity: int, taps: Sequence[int], dtype: Any) -> None:
        import torch

        self.decoder, self.slots, self.capacity, self.taps = decoder, slots, capacity, tuple(taps)
        sizes, device = decoder.sizes, decoder.device
        shape = (sizes.layers, 2, slots, sizes.kv_heads, capacity, sizes.head_dim)
        self._cache = torch.zeros(shape, dtype=dtype, device=device)
        self._tables = [table.to(device) for table in torch_tables(sizes, capacity)]

    def read(self, slot: int, tokens: Sequence[int]) -> TargetRows:
        """Runs a whole prompt into a slot; rows of all its tokens."""
        import torch

        causal = CausalAttention(self.decoder.sizes, len(tokens))
        cosine, sine = (table[: len(tokens)] for table in self._tables)

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._cache[layer, 0, slot, :, : len(tokens)] = rotate(k, cosine, sine)[0].to(self._cache.dtype)
            self._cache[layer, 1, slot, :, : len(tokens)] = v[0].to(self._cache.dtype)
            return causal(layer, q, k, v)

        ids = torch.tensor([list(tokens)], device=self.decoder.device)
        hidden, inner = self.decoder.run(ids, attention, self.taps)
        return _rows(hidden[0], [part[0] for part in inner])

    def step(self, tokens: Sequence[int], lengths: Sequence[int]) -> TargetRows:
        """Runs one token of each of the first slots.

        Args:
            tokens: [n], the newest of each.
            lengths: [n], how many stand before it.
        """
        import torch

        count, width, device = len(tokens), max(lengths) + 1, self.decoder.device
        places = torch.tensor(list(lengths), device=device)
        slots = torch.arange(count, device=device)
        cosine, sine = (table[places][:, None, None] for table in self._tables)
        sees = torch.arange(width, device=device)[None] <= places[:, None]
        sizes, dtype = self.decoder.sizes, self._cache.dtype
        bias = torch.zeros(sees.shape, dtype=dtype, device=device).masked_fill(~sees, float("-inf"))[:, None, None]

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._cache[layer, 0, :count], self._cache[layer, 1, :count]
            keys[slots, :, places] = rotate(k, cosine, sine)[:, :, 0].to(dtype)
            values[slots, :, places] = v[:, :, 0].to(dtype)
            # The queries that share keys and values are rows of one product.
            shared = rotate(q, cosine, sine).to(dtype).reshape(count, sizes.kv_heads, -1, sizes.head_dim)
            mixed = torch.nn.functional.scaled_dot_product_attention(
                shared, keys[:, :, :width], values[:, :, :width], attn_mask=bias
            )
            return mixed.reshape(count, sizes.heads, 1, sizes.head_dim).float()

        hidden, inner = self.decoder.run(torch.tensor(list(tokens), device=device)[:, None], attention, self.taps)
        return _rows(hidden[:, 0], [part[:, 0] for part in inner])

    def move(self, source: int, slot: int, length: int) -> None:
        """Copies the first `length` tokens of a slot into another."""
        self._cache[:, :, slot, :, :length] = self._cache[:, :, source, :, :length]


def _rows(hidden: Tensor, inner: Sequence[Tensor]) -> TargetRows:
    import torch

    return TargetRows(hidden, torch.cat(list(inner), -1) if inner else None)
