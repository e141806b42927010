"""Writes a decoder as ONNX: the speculative graph, its weights and, beside it, the standard graph.

The speculative graph is made for verification of token trees: the shapes depend on the rows S
and R only, the cache is a buffer of C rows that input and output share, attention sees what
`attention_bias` lets it see, and only wanted rows go through the vocabulary product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from specedge.export.checkpoint import Checkpoint, Tensors
from specedge.export.gguf_blocks import keep_blocks, rounded_tensors
from specedge.export.layers import COSINES, SINES, Decoder, read_decoder
from specedge.export.nodes import MICROSOFT, GraphBuilder
from specedge.export.standard import standard_graph
from specedge.export.weights import WeightFile
from specedge.quant.layer import Quantiser
from specedge.quant.recipe import Recipe, parse_recipe
from specedge.runtime.bundle import GraphSpec
from specedge.runtime.contracts import GraphNames as Names
from specedge.runtime.errors import StorageError, UsageError

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["STANDARD", "save_graph", "write_decoder"]

STANDARD = "model"
_ROWS, _LOGIT_ROWS, _CAPACITY = "rows", "logit_rows", "capacity"


def write_decoder(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    stem: str,
    precision: str,
    capacity: int,
    device: str = "cpu",
    standard: bool = False,
    draft: bool = False,
    taps: Sequence[int] = (),
    quantise: Quantiser | None = None,
    tensors: Tensors | None = None,
    on_tensor: Callable[[int], None] | None = None,
) -> GraphSpec:
    """Writes folder/<stem>.onnx, its weights and, with `standard`, folder/model.onnx over the same weights.

    The weight file is folder/model.onnx_data with `standard`, else folder/<stem>.onnx_data. Tensors
    are read, converted and appended one at a time.

    Args:
        checkpoint: The model.
        folder: Where to write; made if it is not there. The files must not be there yet.
        stem: Name of the speculative graph, "target" or "draft".
        precision: A recipe, as `parse_recipe` reads it; its methods are for the caller to have applied.
        capacity: Most rows the cache may hold.
        device: "cpu" or "cuda".
        standard: Also write the standard graph.
        draft: The model drafts: it gets the number format that is fastest for one row.
        taps: Layers whose inputs the speculative graph gives beside the hidden rows, ascending.
        quantise: Decides how each linear layer is stored; None: rounded to the nearest of its grid, or,
            with "gguf", kept as the file has it.
        tensors: To store instead of the checkpoint's own, under the same names.
        on_tensor: Told how many bytes were just written.

    Returns:
        What the manifest says of the speculative graph; its `file` is "<stem>.onnx".

    Raises:
        UsageError: An option out of range.
        CheckpointError: The checkpoint is broken, or (UnsupportedModelError) no builder covers it.
        StorageError: A file cannot be written.
    """
    recipe = parse_recipe(precision, device, draft=draft)
    decoder = read_decoder(checkpoint, recipe.form, capacity)
    sizes = decoder.dimensions
    if not 0 < capacity <= sizes.positions:
        raise UsageError(f"capacity is {capacity}: {checkpoint.name} takes 1 to {sizes.positions} positions")
    if quantise is None and recipe.form.name == "gguf":
        quantise = keep_blocks(rounded_tensors(checkpoint.tensors, checkpoint.name), decoder.family)
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / f"{STANDARD if standard else stem}.onnx_data"
    with WeightFile(data, on_tensor) as weights:
        decoder.store(checkpoint.tensors if tensors is None else tensors, weights, quantise)
        save_graph(_speculative_graph(decoder, weights, taps), folder / f"{stem}.onnx")
        if standard:
            save_graph(standard_graph(decoder, weights), folder / f"{STANDARD}.onnx")
    return replace(_spec(decoder, recipe, f"{stem}.onnx", weights.size), taps=tuple(taps))


def _spec(decoder: Decoder, recipe: Recipe, file: str, weight_bytes: int) -> GraphSpec:
    sizes, form = decoder.dimensions, decoder.form
    return GraphSpec(
        file=file,
        flavour="gqa",
        precision=form.name,
        recipe=recipe.name,
        layers=sizes.layers,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        hidden_size=sizes.hidden_size,
        vocab_size=sizes.vocab_size,
        capacity=decoder.capacity,
        cache_dtype=form.dtype,
        weight_bytes=weight_bytes,
    )


def _speculative_graph(decoder: Decoder, weights: WeightFile, taps: Sequence[int]) -> ModelProto:
    sizes, dtype = decoder.dimensions, decoder.form.dtype
    graph = GraphBuilder(weights, dtype)
    ids = graph.input(Names.INPUT_IDS, "int64", [1, _ROWS])
    graph.input(Names.POSITION_IDS, "int64", [1, _ROWS])
    graph.input(Names.ATTENTION_BIAS, dtype, [1, 1, _ROWS, _CAPACITY])
    graph.input(Names.LAST_INDEX, "int32", [1])
    graph.input(Names.TOTAL, "int32", [1])
    wanted = graph.input(Names.LOGIT_ROWS, "int64", [_LOGIT_ROWS])
    # The outputs are float32 whatever the activations are; the names belong to what leaves the graph.
    final, inner = (name if dtype == "float32" else f"{name}.{dtype}" for name in (Names.HIDDEN, Names.INNER))
    hidden = decoder.run(graph, ids, lambda layer, qkv: _tree_attention(decoder, graph, layer, qkv), final, taps, inner)
    flat = graph.op("Reshape", hidden, graph.integers(-1, sizes.hidden_size))
    scores = decoder.vocabulary.logits(graph, graph.op("Gather", flat, wanted, axis=0))
    if dtype != "float32":
        scores = graph.cast(scores, "float32")
        graph.cast(hidden, "float32", Names.HIDDEN)
        if taps:
            graph.cast(inner, "float32", Names.INNER)
    graph.op("Unsqueeze", scores, graph.integers(0), name=Names.LOGITS)
    graph.output(Names.LOGITS, "float32", [1, _LOGIT_ROWS, sizes.vocab_size])
    graph.output(Names.HIDDEN, "float32", [1, _ROWS, sizes.hidden_size])
    if taps:
        graph.output(Names.INNER, "float32", [1, _ROWS, len(taps) * sizes.hidden_size])
    cache: list[int | str] = [1, sizes.kv_heads, _CAPACITY, sizes.head_dim]
    for layer in range(sizes.layers):
        for kind in ("key", "value"):
            graph.input(Names.past(layer, kind), dtype, cache)
            graph.output(Names.present(layer, kind), dtype, cache)
    return graph.model("specedge_speculative")


def _tree_attention(decoder: Decoder, graph: GraphBuilder, layer: int, qkv: str) -> str:
    """GroupQueryAttention over the shared cache; it rotates q and k by `position_ids` itself.

    The total is always the capacity, so that no shape depends on how full the cache is; a
    causal order is built in, the bias takes away what is no ancestor.
    """
    sizes, heads = decoder.dimensions, f"layer_{layer}.heads"
    past = (Names.past(layer, "key"), Names.past(layer, "value"))
    inputs = (qkv, "", "", *past, Names.LAST_INDEX, Names.TOTAL, graph.weight(COSINES), graph.weight(SINES))
    graph.ops(
        "GroupQueryAttention",
        (*inputs, Names.POSITION_IDS, Names.ATTENTION_BIAS),
        (heads, Names.present(layer, "key"), Names.present(layer, "value")),
        domain=MICROSOFT,
        num_heads=sizes.heads,
        kv_num_heads=sizes.kv_heads,
        do_rotary=1,
    )
    return heads


def save_graph(model: ModelProto, path: Path) -> None:
    """Writes a graph file.

    Raises:
        StorageError: It cannot be written.
    """
    try:
        path.write_bytes(model.SerializeToString())
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror})") from error
