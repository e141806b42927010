"""What a manifest says of the graphs of a bundle."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np

__all__ = ["SAFE_PART", "TREE_FLAVOURS", "GraphSpec", "HeadsSpec"]

TREE_FLAVOURS = ("gqa", "onnx24", "plain")
"""Ways to attend with a tree mask over a cache that a pass writes in place; see docs/gpu.md."""

_FLAVOURS = (*TREE_FLAVOURS, "growing")
_CACHES = ("float32", "float16", "bfloat16")
_BFLOAT16 = 16  # ONNX's number of it (TensorProto.BFLOAT16)
_DEVICES = ("", "cpu", "cuda", "tensorrt")
SAFE_PART = re.compile(r"[A-Za-z0-9._+:@,=-]+")
"""What names may consist of that end up in paths and in commands."""


@dataclass(frozen=True)
class GraphSpec:
    """One decoder graph of a bundle.

    Attributes:
        file: Path inside the bundle, with slashes.
        flavour: "gqa", "onnx24" and "plain" are forms of the speculative graph (tree mask, in-place cache), by
            their attention; "growing" has the standard inputs and outputs, its cache grows and it can verify
            chains only.
        precision: Name of its number format: "fp32", "fp16", "int8", "int4", "fp8-e4m3" …
        layers, kv_heads, head_dim: Shape of the cache.
        hidden_size: Width of the hidden rows.
        vocab_size: Width of the logits.
        capacity: Most rows its cache may hold.
        cache_dtype: "float32", "float16" or "bfloat16"; of the mask as well.
        weight_bytes: Size of the weights.
        shares_cache: A draft that is the target itself in fewer bits works in the target's cache:
            it reads the target's keys and values and writes its own behind them.
        cache_layers: Where it shares the cache: which of the target's layers each of its own is; (): all, in order.
        recipe: Its format, options and compensation as they were asked for: "int4:b64:sym+gptq".
        taps: Layers whose inputs it gives beside the hidden rows, for heads that read them.
        device: What it was made for, where that is not the bundle's device.
        fixed: Its cache has `capacity` rows, neither more nor fewer.
        top: How many of the likeliest tokens the graph finds by itself; 0: it gives logits only.
        chains: Path of a twin over the same weights that takes no mask, and so runs chains only; "": there is none.
        compact: Path of a graph that moves rows of its cache on the device; "": there is none.
    """

    file: str
    flavour: str
    precision: str
    layers: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    capacity: int
    cache_dtype: str
    weight_bytes: int
    shares_cache: bool = False
    cache_layers: tuple[int, ...] = ()
    recipe: str = ""
    taps: tuple[int, ...] = ()
    device: str = ""
    fixed: bool = False
    top: int = 0
    chains: str = ""
    compact: str = ""

    def __post_init__(self) -> None:
        if self.device not in _DEVICES:
            raise ValueError(f"device {self.device!r} is none of cpu, cuda, tensorrt")
        if self.weight_bytes < 0:
            raise ValueError(f"weight_bytes is {self.weight_bytes}")
        if not 0 <= self.top <= max(self.vocab_size, 0):
            raise ValueError(f"top is {self.top}")
        if self.flavour not in _FLAVOURS:
            raise ValueError(f"flavour {self.flavour!r} is none of {', '.join(_FLAVOURS)}")
        if self.cache_dtype not in _CACHES:
            raise ValueError(f"cache_dtype {self.cache_dtype!r} is none of {', '.join(_CACHES)}")
        for name in ("layers", "kv_heads", "head_dim", "hidden_size", "vocab_size", "capacity"):
            if not 0 < getattr(self, name) < 1 << 31:
                raise ValueError(f"{name} is {getattr(self, name)}")
        kept = self.cache_layers
        if kept and (not self.shares_cache or len(kept) != self.layers or list(kept) != sorted(set(kept))):
            raise ValueError(f"cache_layers {list(kept)} are not the layers of the {self.layers} it has, in order")
        if any(not 0 <= tap < self.layers for tap in self.taps) or list(self.taps) != sorted(set(self.taps)):
            raise ValueError(f"taps {list(self.taps)} are not some of the {self.layers} layers, in order")
        if len({PurePosixPath(file).parent for file in self.files}) > 1:
            raise ValueError(f"{', '.join(self.files)} do not lie in one folder, with their weights")
        if self.recipe and not SAFE_PART.fullmatch(self.recipe):
            raise ValueError("recipe has characters other than letters, digits and ._+:@,=-")

    @property
    def cache_bytes(self) -> int:
        """Memory of a full cache."""
        size = 4 if self.cache_dtype == "float32" else 2
        return 2 * self.layers * self.kv_heads * self.capacity * self.head_dim * size

    @property
    def cache_kind(self) -> np.dtype[Any]:
        """The numpy type that holds the cache and the mask; the bits of bfloat16, which numpy does not have."""
        return np.dtype("uint16" if self.cache_dtype == "bfloat16" else self.cache_dtype)

    @property
    def cache_element(self) -> Any:
        """The type of the same for an IOBinding: numpy's, or ONNX's number."""
        return _BFLOAT16 if self.cache_dtype == "bfloat16" else self.cache_kind

    @property
    def tree(self) -> bool:
        """Whether a token tree can be verified in one pass."""
        return self.flavour in TREE_FLAVOURS

    def rows_for(self, wanted: int) -> int:
        """Rows of cache to allocate where `wanted` are enough."""
        return self.capacity if self.fixed else min(self.capacity, wanted)

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of its graphs."""
        return tuple(filter(None, (self.file, self.chains, self.compact)))


@dataclass(frozen=True)
class HeadsSpec:
    """Heads that draft from the target's own rows.

    Attributes:
        file: Path of their graph inside the bundle.
        precision: Name of their number format.
        heads: How many; head k guesses k places behind the token that the target decides.
        guesses: Guesses of each.
        vocabulary: Among how many tokens they guess.
        hidden_size, taps: What they read: the target's hidden rows, and inputs of its layers.
        chain: They read the newest committed token as well.
        weight_bytes: Size of the weights.
        recipe: Their format as it was asked for.
    """

    file: str
    precision: str
    heads: int
    guesses: int
    vocabulary: int
    hidden_size: int
    weight_bytes: int
    taps: tuple[int, ...] = ()
    chain: bool = False
    recipe: str = ""

    def __post_init__(self) -> None:
        for name in ("heads", "guesses", "vocabulary", "hidden_size"):
            if not 0 < getattr(self, name) < 1 << 24:
                raise ValueError(f"{name} is {getattr(self, name)}")
