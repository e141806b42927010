"""Linear layers, one class for each kind of number format: how a weight is stored, and the nodes that apply it.

Every kind is row-invariant: a row's result does not depend on how many rows run with it, so a
token verified in a wide pass is the token that plain decoding gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specedge.export.nodes import MICROSOFT, GraphBuilder
from specedge.export.weights import WeightFile
from specedge.quant.affine import ROUNDS, quantise_affine, summing_matrix
from specedge.quant.blocks import Blocks, quantise_blocks
from specedge.quant.columns import quantise_columns
from specedge.quant.formats import Format

__all__ = [
    "AffineLinear",
    "BlockLinear",
    "ColumnLinear",
    "DenseLinear",
    "Linear",
    "block_parameters",
    "linear_for",
    "multiply_blocks",
    "multiply_columns",
    "store_blocks",
    "store_columns",
]

Matrix = NDArray[np.float32]

_TOP, _MIDDLE = 127, 128  # of rounded activations, which are uint8 because x86 multiplies uint8 by int8
_TINIEST = 1e-10  # a row of zeros is not divided by zero


class Linear(Protocol):
    """A way to store and apply y = x W^T + b."""

    def store(self, weights: WeightFile, name: str, matrix: Matrix, bias: Matrix | None = None) -> None:
        """Appends a layer's tensors.

        Args:
            weights: The weight file.
            name: Name of the layer; its tensors' names begin with it.
            matrix: [out, in].
            bias: [out].
        """
        ...

    def apply(self, graph: GraphBuilder, x: str, name: str) -> str:
        """Adds the nodes that apply a stored layer to x, [..., in]; returns the name of [..., out]."""
        ...


def linear_for(form: Format) -> Linear:
    """The way a number format stores and applies linear layers."""
    return _KINDS[form.kind](form)


class DenseLinear:
    """Plain floats: MatMul with the weight as [in, out]."""

    def __init__(self, form: Format) -> None:
        self._form = form

    def store(self, weights: WeightFile, name: str, matrix: Matrix, bias: Matrix | None = None) -> None:
        weights.add(f"{name}.weight", matrix.T.astype(self._form.dtype, copy=False))
        _store_bias(weights, name, bias, self._form)

    def apply(self, graph: GraphBuilder, x: str, name: str) -> str:
        return _add_bias(graph, graph.op("MatMul", x, graph.weight(f"{name}.weight")), name)


class BlockLinear:
    """Integers in blocks: MatMulNBits, which rounds activations to int8 by blocks of their own row."""

    def __init__(self, form: Format) -> None:
        self._form = form
        self._inputs: dict[str, int] = {}  # the stored shape has only whole blocks

    def store(self, weights: WeightFile, name: str, matrix: Matrix, bias: Matrix | None = None) -> None:
        self._inputs[name] = matrix.shape[1]
        store_blocks(weights, f"{name}.weight", matrix, self._form)
        _store_bias(weights, name, bias, self._form)

    def apply(self, graph: GraphBuilder, x: str, name: str) -> str:
        return _add_bias(graph, multiply_blocks(graph, x, f"{name}.weight", self._form, self._inputs[name]), name)


class AffineLinear:
    """4-bit blocks with a real minimum: sums of the input over blocks are further inputs (quant/affine.py).

    Products of the same input share its sums. A width of partial blocks falls back to plain blocks.
    """

    def __init__(self, form: Format) -> None:
        self._form = form
        self._plain = BlockLinear(form)
        self._inputs: dict[str, tuple[int, int]] = {}

    def store(self, weights: WeightFile, name: str, matrix: Matrix, bias: Matrix | None = None) -> None:
        width, size = matrix.shape[1], self._form.block_size
        if width % size:
            self._plain.store(weights, name, matrix, bias)
            return
        blocks = quantise_affine(matrix, block_size=size, scale_dtype=self._form.dtype)
        _add_blocks(weights, f"{name}.weight", blocks)
        _store_bias(weights, name, bias, self._form)
        sums = _sums(width)
        if sums not in weights:
            weights.add(sums, summing_matrix(width, size).astype(self._form.dtype))
        self._inputs[name] = (width, blocks.width)

    def apply(self, graph: GraphBuilder, x: str, name: str) -> str:
        if name not in self._inputs:
            return self._plain.apply(graph, x, name)
        width, total = self._inputs[name]
        sums = graph.shared("MatMul", x, graph.weight(_sums(width)))
        wide = graph.shared("Concat", x, *[sums] * ROUNDS, axis=-1)
        return _add_bias(graph, multiply_blocks(graph, wide, f"{name}.weight", self._form, total), name)


class ColumnLinear:
    """int8 with a scale for each output, times activations rounded to int8 with a scale for each row."""

    def __init__(self, form: Format) -> None:
        self._form = form

    def store(self, weights: WeightFile, name: str, matrix: Matrix, bias: Matrix | None = None) -> None:
        store_columns(weights, f"{name}.weight", matrix)
        _store_bias(weights, name, bias, self._form)

    def apply(self, graph: GraphBuilder, x: str, name: str) -> str:
        return _add_bias(graph, multiply_columns(graph, x, f"{name}.weight"), name)


_KINDS: dict[str, Callable[[Format], Linear]] = {
    "dense": DenseLinear,
    "blocks": BlockLinear,
    "affine": AffineLinear,
    "columns": ColumnLinear,
}


def store_blocks(weights: WeightFile, name: str, matrix: Matrix, form: Format) -> None:
    """Appends a weight [out, in] in blocks: name, name.scales and, if asymmetric, name.zero_points."""
    blocks = quantise_blocks(
        matrix, bits=form.bits, block_size=form.block_size, symmetric=form.symmetric, scale_dtype=form.dtype
    )
    _add_blocks(weights, name, blocks)


def block_parameters(graph: GraphBuilder, name: str) -> tuple[str, ...]:
    """Names of a stored weight's scales and, if asymmetric, zero points."""
    parameters = (f"{name}.scales", f"{name}.zero_points")
    return tuple(graph.weight(parameter) for parameter in parameters if parameter in graph.weights)


def multiply_blocks(graph: GraphBuilder, x: str, name: str, form: Format, inputs: int) -> str:
    """x, [..., inputs], times a weight that `store_blocks` wrote."""
    return graph.op(
        "MatMulNBits",
        x,
        graph.weight(name),
        *block_parameters(graph, name),
        domain=MICROSOFT,
        K=inputs,
        N=graph.weights.tensor(name).dims[0],
        bits=form.bits,
        block_size=form.block_size,
        accuracy_level=4,
    )


def store_columns(weights: WeightFile, name: str, matrix: Matrix) -> None:
    """Appends a weight [out, in] as int8 [in, out], name, and its scales [out], name.scales."""
    columns = quantise_columns(matrix)
    weights.add(name, columns.values.T)
    weights.add(f"{name}.scales", columns.scales)


def multiply_columns(graph: GraphBuilder, x: str, name: str) -> str:
    """x, [..., in], times a weight that `store_columns` wrote; products of the same x share its rounding."""
    unit, middle = graph.number(1 / _TOP), graph.number(_MIDDLE, "uint8")
    # One scale for all rows (DynamicQuantizeMatMul) would make a row depend on its neighbours.
    largest = graph.shared("ReduceMax", graph.shared("Abs", x), graph.integers(-1), keepdims=1)
    largest = graph.shared("Max", largest, graph.number(_TINIEST))
    rows = graph.shared("QuantizeLinear", graph.shared("Div", x, largest), unit, middle)
    weight, scales = graph.weight(name), graph.weight(f"{name}.scales")
    product = graph.op("MatMulIntegerToFloat", rows, weight, unit, scales, middle, domain=MICROSOFT)
    return graph.op("Mul", product, largest)


def _add_blocks(weights: WeightFile, name: str, blocks: Blocks) -> None:
    weights.add(name, blocks.values)
    weights.add(f"{name}.scales", blocks.scales)
    if blocks.zero_points is not None:
        weights.add(f"{name}.zero_points", blocks.zero_points)


def _sums(width: int) -> str:
    return f"block_sums_{width}"


def _store_bias(weights: WeightFile, name: str, bias: NDArray[Any] | None, form: Format) -> None:
    if bias is not None:
        weights.add(f"{name}.bias", bias.astype(form.dtype, copy=False))


def _add_bias(graph: GraphBuilder, y: str, name: str) -> str:
    bias = f"{name}.bias"
    return graph.op("Add", y, graph.weight(bias)) if bias in graph.weights else y
