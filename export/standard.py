"""The standard graph, `onnx/model.onnx`: inputs and outputs as Optimum, transformers.js and onnxruntime-genai expect.

It computes what the speculative graph computes, from the same weights, with a cache that
grows. Batches may be padded on the left. GroupQueryAttention takes several rows on top of a
past only for a batch of one; prompts and single tokens have no such limit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specedge.export.attention import COSINES, SINES
from specedge.export.layers import Decoder
from specedge.export.nodes import MICROSOFT, GraphBuilder
from specedge.export.weights import WeightFile
from specedge.runtime.contracts import GraphNames as Names

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["standard_graph"]

# The names of the axes are Optimum's, which looks them up.
_BATCH, _ROWS, _PAST = "batch_size", "sequence_length", "past_sequence_length"
_TOTAL = f"{_PAST} + {_ROWS}"

# Added to the score of a masked key. Finite, as a row of padding may look at nothing but padding,
# and small enough for float16; exp(-1e4) is zero in every format.
_MASKED = 1e4


def standard_graph(decoder: Decoder, weights: WeightFile) -> ModelProto:
    """Builds the standard graph over weights that `Decoder.store` has written."""
    sizes, dtype = decoder.dimensions, decoder.form.dtype
    graph = GraphBuilder(weights, dtype)
    ids = graph.input(Names.INPUT_IDS, "int64", [_BATCH, _ROWS])
    graph.input(Names.ATTENTION_MASK, "int64", [_BATCH, _TOTAL])
    graph.input(Names.POSITION_IDS, "int64", [_BATCH, _ROWS])
    mask = _mask(graph)
    hidden = decoder.run(graph, ids, lambda layer, qkv: _attention(decoder, graph, layer, qkv, mask))
    flat = graph.op("Reshape", hidden, graph.integers(-1, sizes.hidden_size))
    scores = graph.cast(decoder.vocabulary.logits(graph, flat), "float32")
    shape = graph.op("Concat", graph.shared("Shape", ids), graph.integers(sizes.vocab_size), axis=0)
    graph.op("Reshape", scores, shape, name=Names.LOGITS)
    graph.output(Names.LOGITS, "float32", [_BATCH, _ROWS, sizes.vocab_size])
    for layer in range(sizes.layers):
        for kind in ("key", "value"):
            graph.input(Names.past(layer, kind), dtype, [_BATCH, sizes.kv_heads, _PAST, sizes.head_dim])
            graph.output(Names.present(layer, kind), dtype, [_BATCH, sizes.kv_heads, _TOTAL, sizes.head_dim])
    return graph.model("specedge_standard")


def _mask(graph: GraphBuilder) -> tuple[str, str, str]:
    """From attention_mask: last index of each sequence int32 [B], total int32 [], bias [B, 1, S, total]."""
    batch = graph.shared("Shape", Names.INPUT_IDS, start=0, end=1)
    rows = graph.shared("Shape", Names.INPUT_IDS, start=1, end=2)
    total = graph.shared("Shape", Names.ATTENTION_MASK, start=1, end=2)
    short_total = graph.cast(graph.op("Squeeze", total), "int32")
    last = graph.op("Sub", short_total, graph.number(1, "int32"))
    lasts = graph.op("Expand", last, batch)
    kept = graph.cast(Names.ATTENTION_MASK, graph.dtype)
    bias = graph.op("Mul", graph.op("Sub", kept, graph.number(1.0)), graph.number(_MASKED))
    bias = graph.op("Unsqueeze", bias, graph.integers(1, 2))
    shape = graph.op("Concat", batch, graph.integers(1), rows, total, axis=0)
    return lasts, short_total, graph.op("Expand", bias, shape)


def _attention(decoder: Decoder, graph: GraphBuilder, layer: int, qkv: str, mask: tuple[str, str, str]) -> str:
    """Rotates q and k outside of GroupQueryAttention, whose own positions a padded prompt would not follow."""
    sizes, label = decoder.dimensions, f"layer_{layer}"
    lasts, total, bias = mask
    parts = tuple(f"{label}.{part}" for part in ("q", "k", "v"))
    graph.ops("Split", (qkv, graph.integers(sizes.q_size, sizes.kv_size, sizes.kv_size)), parts, axis=-1)
    tables = (Names.POSITION_IDS, graph.weight(COSINES), graph.weight(SINES))
    q, k = (graph.op("RotaryEmbedding", part, *tables, domain=MICROSOFT) for part in parts[:2])
    past = (Names.past(layer, "key"), Names.past(layer, "value"))
    graph.ops(
        "GroupQueryAttention",
        (q, k, parts[2], *past, lasts, total, "", "", "", bias),
        (f"{label}.heads", Names.present(layer, "key"), Names.present(layer, "value")),
        domain=MICROSOFT,
        num_heads=sizes.heads,
        kv_num_heads=sizes.kv_heads,
    )
    return f"{label}.heads"
