"""The two ends of a decoder: embedding and head. A tied matrix is stored once and read by both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specedge.export.linear import block_parameters, multiply_blocks, multiply_columns, store_blocks, store_columns
from specedge.export.nodes import MICROSOFT, GraphBuilder
from specedge.export.weights import WeightFile
from specedge.quant.formats import Format

__all__ = ["BlockVocabulary", "ColumnVocabulary", "DenseVocabulary", "Vocabulary", "vocabulary_for"]

EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"

Matrix = NDArray[np.float32]


class Vocabulary(Protocol):
    """A way to store embedding and head, to look tokens up, and to score them."""

    def store(self, weights: WeightFile, embedding: Matrix, head: Matrix | None) -> None:
        """Appends embedding and head, each [vocab, hidden]; no head: the embedding is the head."""
        ...

    def embed(self, graph: GraphBuilder, ids: str) -> str:
        """Adds the nodes that look up ids, int64 [B, S]; returns the name of [B, S, hidden]."""
        ...

    def logits(self, graph: GraphBuilder, rows: str) -> str:
        """Adds the vocabulary product of rows, [R, hidden]; returns the name of [R, vocab]."""
        ...


def vocabulary_for(form: Format) -> Vocabulary:
    """The way a number format stores both ends."""
    return _KINDS[form.kind](form)


class DenseVocabulary:
    """Plain floats. Gemm takes the head as it stands, [vocab, hidden], as fast as MatMul takes its transpose."""

    def __init__(self, form: Format) -> None:
        self._form = form

    def store(self, weights: WeightFile, embedding: Matrix, head: Matrix | None) -> None:
        weights.add(f"{EMBEDDING}.weight", embedding.astype(self._form.dtype, copy=False))
        if head is not None:
            weights.add(f"{HEAD}.weight", head.astype(self._form.dtype, copy=False))

    def embed(self, graph: GraphBuilder, ids: str) -> str:
        return graph.op("Gather", graph.weight(f"{EMBEDDING}.weight"), ids, axis=0)

    def logits(self, graph: GraphBuilder, rows: str) -> str:
        return graph.op("Gemm", rows, graph.weight(_head(graph)), transB=1)


class BlockVocabulary:
    """Integers in blocks: GatherBlockQuantized reads the same bytes as MatMulNBits, under a flat shape."""

    def __init__(self, form: Format) -> None:
        self._form = replace(form, bits=form.head_bits or form.bits)
        self._hidden = 0

    def store(self, weights: WeightFile, embedding: Matrix, head: Matrix | None) -> None:
        for name, matrix in ((EMBEDDING, embedding), (HEAD, head)):
            if matrix is not None:
                store_blocks(weights, f"{name}.weight", matrix, self._form)
        self._hidden = embedding.shape[1]
        table = f"{EMBEDDING}.weight"
        rows, count, packed = weights.tensor(table).dims
        weights.alias(f"{EMBEDDING}.table", table, (rows, count * packed))

    def embed(self, graph: GraphBuilder, ids: str) -> str:
        scales, *zeros = block_parameters(graph, f"{EMBEDDING}.weight")
        rows = graph.op(
            "GatherBlockQuantized",
            graph.weight(f"{EMBEDDING}.table"),
            ids,
            scales,
            *zeros,
            domain=MICROSOFT,
            gather_axis=0,
            quantize_axis=1,
            block_size=self._form.block_size,
            bits=self._form.bits,
        )
        if self._hidden % self._form.block_size == 0:
            return rows
        # The last block of a row is padded.
        return graph.op("Slice", rows, graph.integers(0), graph.integers(self._hidden), graph.integers(-1))

    def logits(self, graph: GraphBuilder, rows: str) -> str:
        return multiply_blocks(graph, rows, _head(graph), self._form, self._hidden)


class ColumnVocabulary:
    """int8 [hidden, vocab] with a scale for each token; the embedding takes columns of it."""

    def __init__(self, form: Format) -> None:
        self._form = form

    def store(self, weights: WeightFile, embedding: Matrix, head: Matrix | None) -> None:
        for name, matrix in ((EMBEDDING, embedding), (HEAD, head)):
            if matrix is not None:
                store_columns(weights, f"{name}.weight", matrix)

    def embed(self, graph: GraphBuilder, ids: str) -> str:
        table = f"{EMBEDDING}.weight"
        columns = graph.op("Gather", graph.weight(table), ids, axis=1)  # [hidden, B, S]
        values = graph.cast(graph.op("Transpose", columns, perm=(1, 2, 0)), self._form.dtype)
        scales = graph.op("Gather", graph.weight(f"{table}.scales"), ids, axis=0)
        return graph.op("Mul", values, graph.op("Unsqueeze", scales, graph.integers(-1)))

    def logits(self, graph: GraphBuilder, rows: str) -> str:
        return multiply_columns(graph, rows, _head(graph))


_KINDS: dict[str, Callable[[Format], Vocabulary]] = {
    "dense": DenseVocabulary,
    "blocks": BlockVocabulary,
    "affine": BlockVocabulary,
    "columns": ColumnVocabulary,
}


def _head(graph: GraphBuilder) -> str:
    """The head's weight; the embedding's where they are tied."""
    head = f"{HEAD}.weight"
    return head if head in graph.weights else f"{EMBEDDING}.weight"
