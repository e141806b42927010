"""The two ends of a decoder: embedding and head. A tied matrix is stored once and read by both."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specedge.export.linear import add_corrections, store_corrections
from specedge.export.nodes import MICROSOFT, GraphBuilder
from specedge.export.products import (
    BlockProduct,
    ColumnProduct,
    block_parameters,
    in_blocks,
    in_columns,
    store_floats,
)
from specedge.export.weights import WeightFile
from specedge.quant.formats import EMBEDDING, HEAD
from specedge.quant.grid import Rounded, dequantise
from specedge.quant.layer import Layer

__all__ = ["Table", "Vocabulary"]

Matrix = NDArray[np.float32]


class Table(Protocol):
    """A stored matrix [vocab, hidden]."""

    def embed(self, graph: GraphBuilder, ids: str) -> str:
        """Adds the nodes that look up ids, int64 [B, S]; returns the name of [B, S, hidden]."""
        ...

    def multiply(self, graph: GraphBuilder, x: str) -> str:
        """Adds the vocabulary product of rows, [R, hidden]; returns the name of [R, vocab]."""
        ...


class Vocabulary:
    """Embedding and head of one model."""

    def __init__(self, dtype: str, *, exact: bool = False) -> None:
        """Nothing is stored yet.

        Args:
            dtype: numpy name of the activations.
            exact: See `store_product`.
        """
        self._dtype, self._exact = dtype, exact
        self._tables: dict[str, Table] = {}

    def store(self, weights: WeightFile, name: str, layer: Layer) -> None:
        """Appends the embedding ("model.embed_tokens"), or a head of its own ("lm_head").

        What compensates the embedding's rounding belongs to its use as a head.
        """
        self._tables[name] = _store_table(weights, f"{name}.weight", layer, self._dtype, exact=self._exact)
        store_corrections(weights, name, layer, self._dtype)

    def embed(self, graph: GraphBuilder, ids: str) -> str:
        """Adds the nodes that look up ids, int64 [B, S]; returns the name of [B, S, hidden]."""
        return self._tables[EMBEDDING].embed(graph, ids)

    def logits(self, graph: GraphBuilder, rows: str) -> str:
        """Adds the vocabulary product of rows, [R, hidden]; returns the name of [R, vocab]."""
        name = HEAD if HEAD in self._tables else EMBEDDING
        return add_corrections(graph, rows, self._tables[name].multiply(graph, rows), name)


def _store_table(weights: WeightFile, name: str, layer: Layer, dtype: str, *, exact: bool) -> Table:
    weight = layer.weight
    if not isinstance(weight, Rounded):
        return _DenseTable(weights, name, weight, dtype, exact=exact)
    if weight.grid.kind == "float8":
        return _Float8Table(weights, name, weight)
    if in_columns(weight):
        return _ColumnTable(weights, name, weight, layer.step)
    if not in_blocks(weight):
        return _DenseTable(weights, name, dequantise(weight), dtype)
    return _BlockTable(weights, name, weight, dtype, exact=exact)


class _DenseTable:
    """Plain floats. Gemm takes the head as it stands, [vocab, hidden], as fast as MatMul takes its transpose."""

    def __init__(self, weights: WeightFile, name: str, matrix: Matrix, dtype: str, *, exact: bool = False) -> None:
        self._name = name
        store_floats(weights, name, matrix, dtype, exact=exact)

    def embed(self, graph: GraphBuilder, ids: str) -> str:
        return graph.op("Gather", self._table(graph), ids, axis=0)

    def multiply(self, graph: GraphBuilder, x: str) -> str:
        return graph.op("Gemm", x, self._table(graph), transB=1)

    def _table(self, graph: GraphBuilder) -> str:
        return graph.floats(self._name)


class _Float8Table(_DenseTable):
    """8-bit floats with a scale for each token; the runtime turns them into plain floats when it loads the graph."""

    def __init__(self, weights: WeightFile, name: str, rounded: Rounded) -> None:
        self._name = name
        weights.add(name, rounded.codes)
        weights.add(f"{name}.scales", rounded.group.scale)

    def _table(self, graph: GraphBuilder) -> str:
        return graph.shared("Mul", graph.floats(self._name), graph.weight(f"{self._name}.scales"))


class _BlockTable(BlockProduct):
    """Integers in blocks: GatherBlockQuantized reads the same bytes as MatMulNBits, under a flat shape."""

    def __init__(self, weights: WeightFile, name: str, rounded: Rounded, dtype: str, *, exact: bool) -> None:
        super().__init__(weights, name, rounded, dtype, exact=exact)
        rows, count, packed = weights.tensor(name).dims
        weights.alias(f"{name}.table", name, (rows, count * packed))

    def embed(self, graph: GraphBuilder, ids: str) -> str:
        shape = self.shape
        rows = graph.op(
            "GatherBlockQuantized",
            graph.weight(f"{self.name}.table"),
            ids,
            *block_parameters(graph, self.name),
            domain=MICROSOFT,
            gather_axis=0,
            quantize_axis=1,
            block_size=shape.size,
            bits=shape.bits,
        )
        if self.shifted:
            # [B, S, blocks, size] + [B, S, blocks, 1]
            shift = graph.op("Gather", self.shift(graph), ids, axis=0)
            blocks = graph.op("Reshape", rows, graph.integers(0, 0, shape.blocks, shape.size))
            shifted = graph.op("Add", blocks, graph.op("Unsqueeze", shift, graph.integers(-1)))
            rows = graph.op("Reshape", shifted, graph.integers(0, 0, shape.blocks * shape.size))
        if shape.width % shape.size == 0:
            return rows
        # The last block of a row is padded.
        return graph.op("Slice", rows, graph.integers(0), graph.integers(shape.width), graph.integers(-1))


class _ColumnTable(ColumnProduct):
    """int8 [hidden, vocab] with a scale for each token; the embedding takes columns of it."""

    def embed(self, graph: GraphBuilder, ids: str) -> str:
        columns = graph.op("Gather", graph.weight(self.name), ids, axis=1)  # [hidden, B, S]
        values = graph.cast(graph.op("Transpose", columns, perm=(1, 2, 0)), graph.dtype)
        scales = graph.op("Gather", graph.weight(f"{self.name}.scales"), ids, axis=0)
        return graph.op("Mul", values, graph.op("Unsqueeze", scales, graph.integers(-1)))
