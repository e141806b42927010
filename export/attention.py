"""Attention of the speculative graph over a cache that a pass writes in place: three ways to the same result.

All three take rows, their positions, and an additive mask of which rows of the cache each may see.
Shapes depend on the number of rows only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

import numpy as np

from specedge.export.dialects import Dialect
from specedge.export.nodes import MICROSOFT, GraphBuilder
from specedge.export.weights import WeightFile
from specedge.models import Dimensions
from specedge.runtime.contracts import GraphNames as Names

if TYPE_CHECKING:
    from specedge.export.layers import Decoder

__all__ = ["COSINES", "ROWS", "SINES", "TreeAttention", "capacity_of", "store_count", "tree_attention", "write_rows"]

COSINES, SINES = "cos_cache", "sin_cache"
"""Names of the rotary tables, [capacity, head_dim / 2]."""

ROWS = "rows"
COUNT = "cache_count"
_CAPACITY = "capacity"


class TreeAttention(Protocol):
    """One way to attend."""

    def declare(self, graph: GraphBuilder) -> None:
        """Adds the graph inputs that it reads beside ids, positions and the cache."""
        ...

    def attend(self, graph: GraphBuilder, layer: int, qkv: str) -> str:
        """Adds a layer's attention over packed q, k and v; returns the name of [1, S, heads * head_dim]."""
        ...


def capacity_of(decoder: Decoder, dialect: Dialect) -> int | str:
    """The cache's rows as a dimension: a number where the graph is compiled, else a name."""
    return decoder.capacity if dialect.fixed else _CAPACITY


def tree_attention(decoder: Decoder, dialect: Dialect, *, masked: bool = True) -> TreeAttention:
    """The attention of a dialect.

    Args:
        decoder: The model.
        dialect: What its graph is made of.
        masked: False leaves the mask out, so that rows see all before them, which takes a faster kernel on CUDA;
            "gqa" alone can.
    """
    if dialect.attention == "gqa":
        return _GroupQuery(decoder, dialect, masked=masked)
    return (_Scattered if dialect.attention == "onnx24" else _Plain)(decoder, dialect)


class _GroupQuery:
    """GroupQueryAttention rotates q and k by `position_ids`, writes the cache, and is causal by itself.

    The total is always the capacity, so that no shape depends on how full the cache is; the mask takes
    away what is no ancestor.
    """

    def __init__(self, decoder: Decoder, dialect: Dialect, *, masked: bool) -> None:
        self._sizes, self._dtype, self._masked = decoder.dimensions, decoder.form.dtype, masked
        self._capacity = capacity_of(decoder, dialect)

    def declare(self, graph: GraphBuilder) -> None:
        if self._masked:
            graph.input(Names.ATTENTION_BIAS, self._dtype, [1, 1, ROWS, self._capacity])
        graph.input(Names.LAST_INDEX, "int32", [1])
        graph.input(Names.TOTAL, "int32", [1])

    def attend(self, graph: GraphBuilder, layer: int, qkv: str) -> str:
        heads, sizes = f"layer_{layer}.heads", self._sizes
        past = (Names.past(layer, "key"), Names.past(layer, "value"))
        inputs = (qkv, "", "", *past, Names.LAST_INDEX, Names.TOTAL, graph.weight(COSINES), graph.weight(SINES))
        graph.ops(
            "GroupQueryAttention",
            (*inputs, Names.POSITION_IDS, *([Names.ATTENTION_BIAS] if self._masked else [])),
            (heads, Names.present(layer, "key"), Names.present(layer, "value")),
            domain=MICROSOFT,
            num_heads=sizes.heads,
            kv_num_heads=sizes.kv_heads,
            do_rotary=1,
        )
        return heads


class _Written(ABC):
    """What the two others have in common: q, k and v apart, and a cache written from row `write_index` on.

    The mask says everything here: nothing is causal by itself.
    """

    def __init__(self, decoder: Decoder, dialect: Dialect) -> None:
        self._sizes: Dimensions = decoder.dimensions
        self._dtype = decoder.form.dtype
        self._capacity = capacity_of(decoder, dialect)

    def declare(self, graph: GraphBuilder) -> None:
        graph.input(Names.ATTENTION_BIAS, self._dtype, [1, 1, ROWS, self._capacity])
        graph.input(Names.WRITE_INDEX, "int64", [1])

    def attend(self, graph: GraphBuilder, layer: int, qkv: str) -> str:
        sizes, label = self._sizes, f"layer_{layer}"
        parts = tuple(f"{label}.{part}" for part in ("q", "k", "v"))
        graph.ops("Split", (qkv, graph.integers(sizes.q_size, sizes.kv_size, sizes.kv_size)), parts, axis=-1)
        q = self._rotate(graph, self._by_head(graph, parts[0], sizes.heads))
        k = self._rotate(graph, self._by_head(graph, parts[1], sizes.kv_heads))
        for kind, rows in (("key", k), ("value", self._by_head(graph, parts[2], sizes.kv_heads))):
            past, present = Names.past(layer, kind), Names.present(layer, kind)
            write_rows(graph, past, rows, Names.WRITE_INDEX, sizes.kv_heads, present, width_of=Names.INPUT_IDS)
        mixed = self._mix(graph, q, Names.present(layer, "key"), Names.present(layer, "value"))
        together = graph.op("Transpose", mixed, perm=(0, 2, 1, 3))
        return graph.op("Reshape", together, graph.integers(1, -1, sizes.q_size), name=f"{label}.heads")

    def _by_head(self, graph: GraphBuilder, x: str, heads: int) -> str:
        """[1, S, heads * head_dim] -> [1, heads, S, head_dim]."""
        apart = graph.op("Reshape", x, graph.integers(1, -1, heads, self._sizes.head_dim))
        return graph.op("Transpose", apart, perm=(0, 2, 1, 3))

    @abstractmethod
    def _rotate(self, graph: GraphBuilder, x: str) -> str:
        """Rotates by position, [1, heads, S, head_dim]."""

    @abstractmethod
    def _mix(self, graph: GraphBuilder, q: str, keys: str, values: str) -> str:
        """Attends to the cache, [1, heads, S, head_dim]."""


class _Scattered(_Written):
    """RotaryEmbedding, TensorScatter and Attention of opset 24: what TensorRT 10.15 turns into its own layers."""

    def _rotate(self, graph: GraphBuilder, x: str) -> str:
        return graph.op("RotaryEmbedding", x, graph.weight(COSINES), graph.weight(SINES), Names.POSITION_IDS)

    def _mix(self, graph: GraphBuilder, q: str, keys: str, values: str) -> str:
        return graph.op("Attention", q, keys, values, Names.ATTENTION_BIAS)


class _Plain(_Written):
    """Gather, Mul, ScatterND, MatMul and Softmax. Query heads are folded into their key heads: no key is repeated."""

    def _rotate(self, graph: GraphBuilder, x: str) -> str:
        tables = []
        for name in (COSINES, SINES):
            rows = graph.shared("Gather", graph.weight(name), Names.POSITION_IDS, axis=0)  # [1, S, head_dim / 2]
            tables.append(graph.shared("Unsqueeze", rows, graph.integers(1)))
        low, high = f"{x}.low", f"{x}.high"
        half = self._sizes.head_dim // 2
        graph.ops("Split", (x, graph.integers(half, half)), (low, high), axis=-1)
        cosine, sine = tables
        first = graph.op("Sub", graph.op("Mul", low, cosine), graph.op("Mul", high, sine))
        second = graph.op("Add", graph.op("Mul", high, cosine), graph.op("Mul", low, sine))
        return graph.op("Concat", first, second, axis=-1)

    def _mix(self, graph: GraphBuilder, q: str, keys: str, values: str) -> str:
        sizes = self._sizes
        group = sizes.heads // sizes.kv_heads
        scaled = graph.op("Mul", q, graph.number(sizes.head_dim**-0.5))
        rows = graph.op("Reshape", scaled, graph.integers(1, sizes.kv_heads, -1, sizes.head_dim))
        scores = graph.op("MatMul", rows, graph.op("Transpose", keys, perm=(0, 1, 3, 2)))  # [1, kv_heads, group * S, C]
        mask = graph.shared("Concat", *[Names.ATTENTION_BIAS] * group, axis=2)
        seen = graph.op("Softmax", graph.op("Add", scores, mask), axis=-1)
        return graph.op("Reshape", graph.op("MatMul", seen, values), graph.integers(1, sizes.heads, -1, sizes.head_dim))


def write_rows(graph: GraphBuilder, cache: str, rows: str, start: str, heads: int, name: str, *, width_of: str) -> None:
    """Adds what writes rows into a cache from a row on; in place where `name` is bound to the cache's memory.

    Args:
        graph: The graph.
        cache: [1, heads, C, head_dim].
        rows: [1, heads, n, head_dim].
        start: int64 [1], the row of the cache that the first goes to.
        heads: How many heads.
        name: For the result.
        width_of: A graph input of n as its last dimension.
    """
    if graph.dialect.attention != "plain":
        graph.op("TensorScatter", cache, rows, start, name=name, axis=-2)  # TensorRT takes no other axis
        return
    # ScatterND wants a place for each head and row, (0, head, start + row), int64 [1, heads, n, 3].
    count = graph.shared("Shape", width_of, start=-1)
    offsets = graph.shared("Slice", graph.weight(COUNT), graph.integers(0), count, graph.integers(0))
    places = graph.shared("Reshape", graph.shared("Add", offsets, start), graph.integers(1, 1, -1, 1))
    places = graph.shared("Mul", places, graph.integers(0, 0, 1))
    head = np.zeros((1, heads, 1, 3), np.int64)
    head[0, :, 0, 1] = np.arange(heads)
    graph.op("ScatterND", cache, graph.shared("Add", places, graph.constant(head)), rows, name=name)


def store_count(decoder: Decoder, weights: WeightFile) -> None:
    """Stores 0, 1, 2 … up to the capacity, which "plain" counts rows with: no operator of TensorRT 10.3 would."""
    weights.add(COUNT, np.arange(decoder.capacity, dtype=np.int64))
