"""Writes a decoder as ONNX: the speculative graph, its weights and, beside it, the standard graph.

The speculative graph is made for verification of token trees: the shapes depend on the rows S
and R only, the cache is a buffer of C rows that input and output share, attention sees what
`attention_bias` lets it see, and only wanted rows go through the vocabulary product. For a GPU
further small graphs stand beside it, over the same weights: a twin without a mask, which the fastest
kernels need, and one that moves rows of the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specedge.export.attention import store_count
from specedge.export.checkpoint import Checkpoint, Tensors
from specedge.export.dialects import Dialect, find_dialect
from specedge.export.gguf_blocks import keep_blocks, rounded_tensors
from specedge.export.kernels import check_kernels
from specedge.export.layers import Decoder, read_decoder
from specedge.export.speculative import TOP, compacting_graph, speculative_graph
from specedge.export.standard import standard_graph
from specedge.export.weights import WeightFile
from specedge.quant.layer import Quantiser
from specedge.quant.recipe import Recipe, parse_recipe
from specedge.runtime.bundle import GraphSpec
from specedge.runtime.errors import StorageError, UsageError

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["STANDARD", "save_graph", "write_decoder"]

STANDARD = "model"
_CHAINS, _COMPACT = "chains", "compact"


def write_decoder(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    stem: str,
    precision: str,
    capacity: int,
    device: str = "cpu",
    attention: str | None = None,
    standard: bool = False,
    draft: bool = False,
    taps: Sequence[int] = (),
    quantise: Quantiser | None = None,
    tensors: Tensors | None = None,
    on_tensor: Callable[[int], None] | None = None,
) -> GraphSpec:
    """Writes folder/<stem>.onnx, its weights and, with `standard`, folder/model.onnx over the same weights.

    The weight file is folder/model.onnx_data with `standard`, else folder/<stem>.onnx_data.

    Args:
        checkpoint: The model.
        folder: Where to write; made if it is not there. The files must not be there yet.
        stem: Name of the speculative graph, "target" or "draft".
        precision: A recipe, as `parse_recipe` reads it; its methods are for the caller to have applied.
        capacity: Most rows the cache may hold.
        device: "cpu", "cuda" or "tensorrt".
        attention: How it attends, as `find_dialect` reads it; None: as is best on the device.
        standard: Also write the standard graph.
        draft: The model drafts: it gets the number format that is fastest for one row.
        taps: Layers whose inputs the speculative graph gives beside the hidden rows, ascending.
        quantise: How a linear layer is stored; None: rounded to the nearest, or with "gguf" kept as in the file.
        tensors: To store instead of the checkpoint's own, under the same names.
        on_tensor: Told how many bytes were just written.

    Returns:
        What the manifest says of the speculative graph; its `file` is "<stem>.onnx".

    Raises:
        UsageError: An option out of range.
        CheckpointError: The checkpoint is broken, or (UnsupportedModelError) no builder covers it.
        StorageError: A file cannot be written.
        ExportError: The device has no kernel for a node.
    """
    recipe, dialect = parse_recipe(precision, device, draft=draft), find_dialect(device, attention)
    decoder = read_decoder(checkpoint, recipe.form, capacity)
    _check_capacity(capacity, decoder, checkpoint.name)
    if quantise is None and recipe.form.name == "gguf":
        quantise = keep_blocks(rounded_tensors(checkpoint.tensors, checkpoint.name), decoder.family)
    folder.mkdir(parents=True, exist_ok=True)
    with WeightFile(folder / f"{STANDARD if standard else stem}.onnx_data", on_tensor) as weights:
        decoder.store(checkpoint.tensors if tensors is None else tensors, weights, quantise)
        graphs = _graphs(decoder, weights, dialect, stem, taps, draft=draft)
        for name, model in graphs.items():
            check_kernels(model, dialect, name)
            save_graph(model, folder / f"{name}.onnx")
        if standard:
            save_graph(standard_graph(decoder, weights), folder / f"{STANDARD}.onnx")
    return _spec(decoder, recipe, dialect, weights.size, stem, taps, graphs)


def _check_capacity(capacity: int, decoder: Decoder, name: str) -> None:
    if not 0 < capacity <= decoder.dimensions.positions:
        raise UsageError(f"capacity is {capacity}: {name} takes 1 to {decoder.dimensions.positions} positions")


def _graphs(
    decoder: Decoder, weights: WeightFile, dialect: Dialect, stem: str, taps: Sequence[int], *, draft: bool
) -> dict[str, ModelProto]:
    """The speculative graph, and what a device that is no CPU runs beside it, by the files' stems."""
    if dialect.attention == "plain":
        store_count(decoder, weights)
    graphs = {stem: speculative_graph(decoder, weights, dialect, taps)}
    if not dialect.selects:  # this device reads and moves the cache where it is
        return graphs
    if dialect.attention == "gqa":
        graphs[_CHAINS] = speculative_graph(decoder, weights, dialect, taps, masked=False)
    if not draft:  # a draft is a chain, of which nothing moves
        graphs[_COMPACT] = compacting_graph(decoder, weights, dialect)
    return graphs


def _spec(
    decoder: Decoder,
    recipe: Recipe,
    dialect: Dialect,
    weight_bytes: int,
    stem: str,
    taps: Sequence[int],
    graphs: Mapping[str, ModelProto],
) -> GraphSpec:
    sizes, form = decoder.dimensions, decoder.form
    return GraphSpec(
        file=f"{stem}.onnx",
        flavour=dialect.attention,
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
        taps=tuple(taps),
        fixed=dialect.fixed,
        top=min(TOP, sizes.vocab_size) if dialect.selects else 0,
        chains=f"{_CHAINS}.onnx" if _CHAINS in graphs else "",
        compact=f"{_COMPACT}.onnx" if _COMPACT in graphs else "",
    )


def save_graph(model: ModelProto, path: Path) -> None:
    """Writes a graph file.

    Raises:
        StorageError: It cannot be written.
    """
    try:
        path.write_bytes(model.SerializeToString())
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror})") from error
