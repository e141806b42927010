"""The two ends of a decoder: embedding and head. A tied matrix is stored once and read by both."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specedge.export.nodes import GraphBuilder
from specedge.export.weights import WeightFile
from specedge.quant.formats import Format

__all__ = ["DenseVocabulary", "Vocabulary", "vocabulary_for"]

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
    return DenseVocabulary(form)


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
        head = f"{HEAD}.weight" if f"{HEAD}.weight" in graph.weights else f"{EMBEDDING}.weight"
        return graph.op("Gemm", rows, graph.weight(head), transB=1)
