"""The speculative graph of a decoder: rows with a tree mask over a cache that is written in place.

Its shapes depend on the rows S and on the rows R whose logits are wanted, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specedge.export.attention import ROWS, capacity_of, tree_attention, write_rows
from specedge.export.dialects import SCATTERS, Dialect
from specedge.export.layers import Decoder
from specedge.export.nodes import GraphBuilder
from specedge.export.weights import WeightFile
from specedge.runtime.contracts import GraphNames as Names

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["TOP", "compacting_graph", "speculative_graph"]

TOP = 64
"""How many of the likeliest tokens a graph finds that leaves its logits on the device."""

_LOGIT_ROWS, _SOURCE_ROWS = "logit_rows", "moved_rows"


def speculative_graph(
    decoder: Decoder, weights: WeightFile, dialect: Dialect, taps: Sequence[int] = (), *, masked: bool = True
) -> ModelProto:
    """Builds the graph over weights that `Decoder.store` has written.

    Args:
        decoder: The model.
        weights: Where its tensors are.
        dialect: What the graph is made of.
        taps: Layers whose inputs it gives beside the hidden rows, ascending.
        masked: False makes the twin without a mask (see `tree_attention`).
    """
    sizes, dtype = decoder.dimensions, decoder.form.dtype
    graph = GraphBuilder(weights, dtype, dialect)
    ids = graph.input(Names.INPUT_IDS, "int64", [1, ROWS])
    graph.input(Names.POSITION_IDS, "int64", [1, ROWS])
    attention = tree_attention(decoder, dialect, masked=masked)
    attention.declare(graph)
    wanted = graph.input(Names.LOGIT_ROWS, "int64", [_LOGIT_ROWS])
    # The outputs are float32 whatever the activations are; the names belong to what leaves the graph.
    final, inner = (name if dtype == "float32" else f"{name}.{dtype}" for name in (Names.HIDDEN, Names.INNER))
    hidden = decoder.run(graph, ids, lambda layer, qkv: attention.attend(graph, layer, qkv), final, taps, inner)
    flat = graph.op("Reshape", hidden, graph.integers(-1, sizes.hidden_size))
    scores = decoder.vocabulary.logits(graph, graph.op("Gather", flat, wanted, axis=0))
    if dtype != "float32":
        scores = graph.cast(scores, "float32")
        graph.cast(hidden, "float32", Names.HIDDEN)
        if taps:
            graph.cast(inner, "float32", Names.INNER)
    graph.op("Unsqueeze", scores, graph.integers(0), name=Names.LOGITS)
    graph.output(Names.LOGITS, "float32", [1, _LOGIT_ROWS, sizes.vocab_size])
    if dialect.selects:
        _select(graph, min(TOP, sizes.vocab_size))
    graph.output(Names.HIDDEN, "float32", [1, ROWS, sizes.hidden_size])
    if taps:
        graph.output(Names.INNER, "float32", [1, ROWS, len(taps) * sizes.hidden_size])
    cache: list[int | str] = [1, sizes.kv_heads, capacity_of(decoder, dialect), sizes.head_dim]
    for layer in range(sizes.layers):
        for kind in ("key", "value"):
            graph.input(Names.past(layer, kind), dtype, cache)
            graph.output(Names.present(layer, kind), dtype, cache)
    return graph.model("specedge_speculative")


def compacting_graph(decoder: Decoder, weights: WeightFile, dialect: Dialect) -> ModelProto:
    """Builds the graph that moves rows of all keys and values at once, so that a cache need not leave its device.

    Rows `source` of [1, N, C, head_dim] go to the places from `place` on. Input and output are bound to the
    same memory: what is moved was gathered before anything is written.
    """
    sizes, dtype = decoder.dimensions, decoder.form.dtype
    newest = dialect if dialect.attention == "plain" else replace(dialect, opset=SCATTERS)
    graph = GraphBuilder(weights, dtype, newest)
    tensors = 2 * sizes.layers * sizes.kv_heads
    shape: list[int | str] = [1, tensors, capacity_of(decoder, dialect), sizes.head_dim]
    pool = graph.input(Names.POOL, dtype, shape)
    source = graph.input(Names.SOURCE, "int64", [_SOURCE_ROWS])
    place = graph.input(Names.PLACE, "int64", [1])
    rows = graph.op("Gather", pool, source, axis=2)
    write_rows(graph, pool, rows, place, tensors, Names.MOVED, width_of=source)
    graph.output(Names.MOVED, dtype, shape)
    return graph.model("specedge_compaction")


def _select(graph: GraphBuilder, count: int) -> None:
    """The likeliest tokens and their log-probabilities, so that logits may stay where they are."""
    laws = graph.op("LogSoftmax", Names.LOGITS, axis=-1)
    graph.ops("TopK", (laws, graph.integers(count)), (Names.TOP_LOGPROBS, Names.TOP_IDS), axis=-1)
    graph.output(Names.TOP_LOGPROBS, "float32", [1, _LOGIT_ROWS, count])
    graph.output(Names.TOP_IDS, "int64", [1, _LOGIT_ROWS, count])
