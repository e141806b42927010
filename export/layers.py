"""The layers of a decoder, the same in every graph of a model: its tensors, and the nodes that run them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specedge.export.attention import COSINES, SINES
from specedge.export.checkpoint import Checkpoint, Tensors
from specedge.export.linear import Linears
from specedge.export.nodes import GraphBuilder
from specedge.export.norms import add_and_norm, rms_norm
from specedge.export.rope import rotary_tables
from specedge.export.vocabulary import Vocabulary
from specedge.export.weights import WeightFile
from specedge.models import Dimensions, Family, find_family, read_dimensions
from specedge.quant.formats import EMBEDDING, HEAD, Format, nearest
from specedge.quant.layer import Layer, Quantiser, join_layers
from specedge.runtime.errors import CheckpointError, UnsupportedModelError

__all__ = ["Attention", "Decoder", "layer_modules", "linear_layers", "read_decoder"]

_FINAL_NORM = "model.norm.weight"
_GATE, _UP, _BOTH = "mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj"

Matrix = NDArray[np.float32]

Attention = Callable[[int, str], str]
"""Adds the attention of one layer: (layer, packed q, k and v) -> the heads' outputs, [B, S, heads * head_dim]."""


@dataclass(frozen=True)
class Decoder:
    """One model in one number format, ready to be written.

    Attributes:
        family, dimensions, form: What it is.
        capacity: Rows of the rotary tables.
        linears, vocabulary: Its matrices, as they are stored.
    """

    family: Family
    dimensions: Dimensions
    form: Format
    capacity: int
    linears: Linears
    vocabulary: Vocabulary

    def store(self, tensors: Tensors, weights: WeightFile, quantise: Quantiser | None = None) -> None:
        """Appends all tensors to the weight file, reading them one at a time.

        Args:
            tensors: The checkpoint's, or what folding scales into their neighbours made of them.
            weights: The weight file.
            quantise: Decides how each linear layer is stored; None: rounded to the nearest of its grid.

        Raises:
            CheckpointError: A tensor is missing or has another shape than the config says.
            UnsupportedModelError: There are tensors that the family's computation does not use.
        """
        _check_tensors(self, tensors)
        names, sizes, dtype = self.family, self.dimensions, self.form.dtype
        quantise = quantise or nearest(self.form, sizes.layers)
        self.vocabulary.store(weights, EMBEDDING, quantise(EMBEDDING, tensors[names.embedding], None))
        if not sizes.tied:
            self.vocabulary.store(weights, HEAD, quantise(HEAD, tensors[names.head], None))
        for name, table in zip((COSINES, SINES), rotary_tables(sizes, self.capacity), strict=True):
            weights.add(name, table.astype(dtype))
        for layer in range(sizes.layers):
            self._store_layer(_Layer(names, tensors, layer), layer, weights, quantise)
        weights.add(_FINAL_NORM, tensors[names.final_norm].astype(dtype))

    def _store_layer(self, source: _Layer, layer: int, weights: WeightFile, quantise: Quantiser) -> None:
        names = self.family
        weights.add(_attention_norm(layer), source.tensor(names.attention_norm).astype(self.form.dtype))
        weights.add(_mlp_norm(layer), source.tensor(names.mlp_norm).astype(self.form.dtype))
        gate, up = (_module(layer, name) for name in (_GATE, _UP))
        held: Layer | None = None
        for module, weight, bias in _of_layer(source, self.dimensions):
            rounded = quantise(module, weight, bias)
            if module == gate:
                held = rounded
                continue
            if module == up and held is not None:
                # Both read the same rows: in one product these are rounded and read once.
                both = join_layers(held, rounded)
                if both is not None:
                    self.linears.store(weights, _module(layer, _BOTH), both)
                    continue
                self.linears.store(weights, gate, held)
            self.linears.store(weights, module, rounded)

    def run(
        self,
        graph: GraphBuilder,
        ids: str,
        attention: Attention,
        hidden: str | None = None,
        taps: Collection[int] = (),
        inner: str | None = None,
    ) -> str:
        """Adds all layers.

        Args:
            graph: The graph to add to.
            ids: Name of the token ids, [B, S].
            attention: Adds the attention of a layer.
            hidden: Name for the result.
            taps: Layers whose inputs are wanted as well.
            inner: Name for these, one behind the other: [B, S, taps * hidden_size].

        Returns:
            The name of [B, S, hidden_size], after the final norm.
        """
        sizes, apply = self.dimensions, self.linears.apply
        residual = self.vocabulary.embed(graph, ids)
        rows = rms_norm(graph, residual, graph.weight(_attention_norm(0)), sizes.norm_eps)
        tapped = []
        for layer in range(sizes.layers):
            if layer in taps:
                tapped.append(residual)
            heads = attention(layer, apply(graph, rows, _module(layer, "self_attn.qkv_proj")))
            mixed = apply(graph, heads, _module(layer, "self_attn.o_proj"))
            rows, residual = self._norm(graph, mixed, residual, _mlp_norm(layer), f"layer_{layer}.mlp")
            gate, up = self._gate_and_up(graph, rows, layer)
            gated = graph.op("Mul", graph.op("Mul", gate, graph.op("Sigmoid", gate)), up)
            mixed = apply(graph, gated, _module(layer, "mlp.down_proj"))
            last = layer + 1 == sizes.layers
            norm = _FINAL_NORM if last else _attention_norm(layer + 1)
            label = hidden if last and hidden else f"layer_{layer + 1}.attention"
            rows, residual = self._norm(graph, mixed, residual, norm, label)
        if tapped:
            graph.op("Concat", *tapped, axis=-1, name=inner)
        return rows

    def _gate_and_up(self, graph: GraphBuilder, rows: str, layer: int) -> tuple[str, str]:
        """Both products of a feed-forward layer's input, or the halves of the one that they were stored as."""
        both = _module(layer, _BOTH)
        if both not in self.linears:
            gate, up = (self.linears.apply(graph, rows, _module(layer, name)) for name in (_GATE, _UP))
            return gate, up
        halves, size = (f"layer_{layer}.gate", f"layer_{layer}.up"), self.dimensions.mlp_size
        graph.ops("Split", (self.linears.apply(graph, rows, both), graph.integers(size, size)), halves, axis=-1)
        return halves

    def _norm(self, graph: GraphBuilder, x: str, residual: str, norm: str, label: str) -> tuple[str, str]:
        return add_and_norm(graph, x, residual, graph.weight(norm), self.dimensions.norm_eps, label)


def read_decoder(checkpoint: Checkpoint, form: Format, capacity: int) -> Decoder:
    """Reads a checkpoint's config into a decoder.

    Raises:
        UnsupportedModelError: No builder covers it.
        CheckpointError: The config makes no sense.
    """
    family = find_family(checkpoint.config.get("model_type"))
    dimensions = read_dimensions(family, checkpoint.config)
    if dimensions.window is not None and dimensions.window < capacity:
        raise UnsupportedModelError(
            f"config.json: attention over a window of {dimensions.window} rows has no builder; export with --capacity "
            f"{dimensions.window} or less, where the window does not matter"
        )
    exact = form.name == "gguf"  # nothing that its file says is rounded once more
    linears = Linears(form.dtype, exact=exact, explicit=form.explicit)
    vocabulary = Vocabulary(form.dtype, exact=exact)
    return Decoder(family, dimensions, form, capacity, linears, vocabulary)


@dataclass(frozen=True)
class _Layer:
    """Tensors of one layer of a checkpoint."""

    names: Family
    tensors: Tensors
    layer: int

    def tensor(self, module: str, kind: str = "weight") -> NDArray[np.float32]:
        return self.tensors[self.names.layer.format(layer=self.layer) + f"{module}.{kind}"]

    def joined(self, modules: tuple[str, ...], kind: str) -> NDArray[np.float32]:
        """The modules' tensors, one above the other."""
        parts = [self.tensor(module, kind) for module in modules]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def linear_layers(family: Family, sizes: Dimensions, tensors: Tensors) -> Iterator[tuple[str, Matrix, Matrix | None]]:
    """Name, weight and bias of every linear layer, as `Decoder.store` gives them to a quantiser."""
    yield EMBEDDING, tensors[family.embedding], None
    if not sizes.tied:
        yield HEAD, tensors[family.head], None
    for layer in range(sizes.layers):
        yield from _of_layer(_Layer(family, tensors, layer), sizes)


def _of_layer(source: _Layer, sizes: Dimensions) -> Iterator[tuple[str, Matrix, Matrix | None]]:
    biases = (sizes.qkv_bias, sizes.output_bias, sizes.mlp_bias, sizes.mlp_bias, sizes.mlp_bias)
    for (name, modules), bias in zip(layer_modules(source.names), biases, strict=True):
        joined = source.joined(modules, "bias") if bias else None
        yield _module(source.layer, name), source.joined(modules, "weight"), joined


def layer_modules(names: Family) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The linear layers of a decoder layer, and which of a checkpoint's modules stand in each, one above the other."""
    # One product for q, k and v reads the rows once, and GroupQueryAttention takes them packed.
    return (
        ("self_attn.qkv_proj", (names.q, names.k, names.v)),
        ("self_attn.o_proj", (names.output,)),
        (_GATE, (names.gate,)),
        (_UP, (names.up,)),
        ("mlp.down_proj", (names.down,)),
    )


def _module(layer: int, name: str) -> str:
    return f"model.layers.{layer}.{name}"


def _attention_norm(layer: int) -> str:
    return _module(layer, "input_layernorm.weight")


def _mlp_norm(layer: int) -> str:
    return _module(layer, "post_attention_layernorm.weight")


def _expected(decoder: Decoder) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of every tensor the computation uses."""
    names, sizes = decoder.family, decoder.dimensions
    hidden = sizes.hidden_size
    yield names.embedding, (sizes.vocab_size, hidden)
    yield names.final_norm, (hidden,)
    if not sizes.tied:
        yield names.head, (sizes.vocab_size, hidden)
    modules = (
        (names.q, sizes.q_size, hidden, sizes.qkv_bias),
        (names.k, sizes.kv_size, hidden, sizes.qkv_bias),
        (names.v, sizes.kv_size, hidden, sizes.qkv_bias),
        (names.output, hidden, sizes.q_size, sizes.output_bias),
        (names.gate, sizes.mlp_size, hidden, sizes.mlp_bias),
        (names.up, sizes.mlp_size, hidden, sizes.mlp_bias),
        (names.down, hidden, sizes.mlp_size, sizes.mlp_bias),
    )
    for layer in range(sizes.layers):
        prefix = names.layer.format(layer=layer)
        yield f"{prefix}{names.attention_norm}.weight", (hidden,)
        yield f"{prefix}{names.mlp_norm}.weight", (hidden,)
        for module, outputs, inputs, bias in modules:
            yield f"{prefix}{module}.weight", (outputs, inputs)
            if bias:
                yield f"{prefix}{module}.bias", (outputs,)


def _check_tensors(decoder: Decoder, tensors: Tensors) -> None:
    expected = dict(_expected(decoder))
    for name, shape in expected.items():
        if name not in tensors:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}; it may be incomplete, so fetch it again")
        found = tuple(tensors.shape(name))
        if found != shape:
            raise CheckpointError(f"tensor {name!r} has shape {list(found)} where config.json says {list(shape)}")
    # A copy of the embedding under the head's name is what some tools save for a tied model.
    known = {*expected, decoder.family.head}
    for name in tensors:
        if name not in known and not name.endswith(decoder.family.ignored):
            raise UnsupportedModelError(
                f"tensor {name!r} has no place in the computation of family {decoder.family.name}; "
                "the model is not what its model_type says"
            )
