"""Products x W^T, one class for each way a weight is stored: its tensors, and the nodes that multiply.

Those that a target may be stored in are row-invariant: a row's result does not depend on how many
rows run with it, so a token verified in a wide pass is the token that plain decoding gives.
Blocks larger than `is_row_invariant` (quant/formats.py) lets pass are not; they draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specedge.export.nodes import MICROSOFT, GraphBuilder
from specedge.export.weights import WeightFile, is_half
from specedge.quant.affine import ROUNDS, pack_affine, summing_matrix
from specedge.quant.blocks import Blocks, pack_blocks
from specedge.quant.columns import pack_columns
from specedge.quant.grid import Rounded, dequantise
from specedge.quant.layer import Layer
from specedge.runtime.errors import NumericError

__all__ = [
    "AffineProduct",
    "BlockProduct",
    "ColumnProduct",
    "DenseProduct",
    "Float8Product",
    "Product",
    "block_parameters",
    "in_blocks",
    "in_columns",
    "store_floats",
    "store_product",
]

Matrix = NDArray[np.float32]

_TOP, _MIDDLE = 127, 128  # of rounded activations, which are uint8 because x86 multiplies uint8 by int8


class Product(Protocol):
    """A stored weight [out, in]."""

    def multiply(self, graph: GraphBuilder, x: str) -> str:
        """Adds the nodes that multiply x, [..., in]; returns the name of [..., out]."""
        ...


def store_product(weights: WeightFile, name: str, layer: Layer, dtype: str, *, exact: bool) -> Product:
    """Stores a layer's weight in the way that its grid has an operator for.

    Args:
        weights: The weight file.
        name: Name of the weight; its tensors' names begin with it.
        layer: The layer.
        dtype: numpy name of the activations.
        exact: Shifts of an affine grid are stored as they are, where the fast way rounds them once more; and plain
            floats in 16 bits where these hold them.
    """
    weight = layer.weight
    if not isinstance(weight, Rounded):
        return DenseProduct(weights, name, weight, dtype, exact=exact)
    grid = weight.grid
    if grid.kind == "float8":
        return Float8Product(weights, name, weight)
    if in_columns(weight):
        return ColumnProduct(weights, name, weight, layer.step)
    if not in_blocks(weight):
        return DenseProduct(weights, name, dequantise(weight), dtype)
    # The sums fill whole blocks of inputs, so that in wider blocks they would be mostly padding.
    if grid.kind == "affine" and grid.bits == 4 and grid.group == 32 and not exact and weight.width % 32 == 0:
        return AffineProduct(weights, name, weight, dtype)
    return BlockProduct(weights, name, weight, dtype, exact=exact)


def in_blocks(weight: Rounded) -> bool:
    """Whether MatMulNBits multiplies it."""
    return weight.grid.bits in (4, 8) and weight.grid.group >= 16 and weight.grid.kind != "float8"


def in_columns(weight: Rounded) -> bool:
    """Whether a product of integers multiplies it: whole rows around zero."""
    grid, group = weight.grid, weight.group
    return grid.kind == "integer" and grid.bits == 8 and not grid.group and group.zero is None and group.shift is None


class DenseProduct:
    """Plain floats: MatMul with the weight as [in, out]."""

    def __init__(self, weights: WeightFile, name: str, matrix: Matrix, dtype: str, *, exact: bool = False) -> None:
        self._name = name
        store_floats(weights, name, matrix.T, dtype, exact=exact)

    def multiply(self, graph: GraphBuilder, x: str) -> str:
        return graph.op("MatMul", x, graph.floats(self._name))


class BlockProduct:
    """Integers in blocks: MatMulNBits, which rounds activations to int8 by blocks of their own row.

    The shift of an affine grid is added: sums of x over its blocks, shared by the products of
    the same x, times the shifts, which are 16-bit floats in the file unless they must be exact.
    """

    def __init__(self, weights: WeightFile, name: str, rounded: Rounded, dtype: str, *, exact: bool = False) -> None:
        self.name = name
        self.shape = _store_blocks(weights, name, pack_blocks(rounded), dtype)
        self.shifted = rounded.group.shift is not None
        if rounded.group.shift is not None:
            _store_shift(weights, name, rounded, rounded.group.shift, dtype, exact=exact)
            self._sums = _store_sums(weights, rounded, dtype)

    def multiply(self, graph: GraphBuilder, x: str) -> str:
        y = _multiply_blocks(graph, x, self.name, self.shape)
        if not self.shifted:
            return y
        sums = graph.shared("MatMul", x, graph.floats(self._sums))
        shift = graph.shared("Transpose", self.shift(graph), perm=(1, 0))
        return graph.op("Add", y, graph.op("MatMul", sums, shift))

    def shift(self, graph: GraphBuilder) -> str:
        """Adds the nodes that make up the shift, [out, blocks]; a runtime folds them when it loads the graph."""
        low = f"{self.name}.low"
        if low not in graph.weights:
            return graph.floats(f"{self.name}.shift")
        middle = graph.number(1 << (self.shape.bits - 1))
        return graph.shared("Add", graph.floats(low), graph.shared("Mul", graph.floats(f"{self.name}.scales"), middle))


class AffineProduct:
    """4-bit blocks with a real minimum: sums of the input over blocks are further inputs (quant/affine.py).

    Products of the same input share its sums.
    """

    def __init__(self, weights: WeightFile, name: str, rounded: Rounded, dtype: str) -> None:
        self._name = name
        self._shape = _store_blocks(weights, name, pack_affine(rounded), dtype)
        self._sums = _store_sums(weights, rounded, dtype, rounded.grid.group)

    def multiply(self, graph: GraphBuilder, x: str) -> str:
        sums = graph.shared("MatMul", x, graph.floats(self._sums))
        wide = graph.shared("Concat", x, *[sums] * ROUNDS, axis=-1)
        return _multiply_blocks(graph, wide, self._name, self._shape)


class ColumnProduct:
    """int8 with a scale for each output, times activations rounded to int8.

    The activations' scale is one for each row (one for all rows, as DynamicQuantizeMatMul has it,
    would make a row depend on its neighbours), or a calibrated step. Products of the same x share the rounding.
    """

    def __init__(self, weights: WeightFile, name: str, rounded: Rounded, step: float | None) -> None:
        self.name = name
        self._step = step
        columns = pack_columns(rounded)
        weights.add(name, columns.values)
        weights.add(f"{name}.scales", columns.scales)

    def multiply(self, graph: GraphBuilder, x: str) -> str:
        middle = graph.number(_MIDDLE, "uint8")
        if self._step is not None:
            step = graph.number(self._step)
            return self._product(graph, graph.shared("QuantizeLinear", x, step, middle), step, middle)
        unit = graph.number(1 / _TOP)
        largest = graph.shared("ReduceMax", graph.shared("Abs", x), graph.integers(-1), keepdims=1)
        # In a row of zeros 0 / 0 is rounded to whatever integer; what comes of it is multiplied by the zero.
        rows = graph.shared("QuantizeLinear", graph.shared("Div", x, largest), unit, middle)
        return graph.op("Mul", self._product(graph, rows, unit, middle), largest)

    def _product(self, graph: GraphBuilder, rows: str, step: str, middle: str) -> str:
        weight, scales = graph.weight(self.name), graph.weight(f"{self.name}.scales")
        return graph.op("MatMulIntegerToFloat", rows, weight, step, scales, middle, domain=MICROSOFT)


class Float8Product:
    """8-bit floats with a scale for each output, in memory and in arithmetic plain floats.

    No operator of a CPU multiplies them: the runtime folds the Cast and the scale when it loads
    the graph, so what is small is the file.
    """

    def __init__(self, weights: WeightFile, name: str, rounded: Rounded) -> None:
        self._name = name
        columns = pack_columns(rounded)
        weights.add(name, columns.values)
        weights.add(f"{name}.scales", columns.scales)

    def multiply(self, graph: GraphBuilder, x: str) -> str:
        weight = graph.shared("Mul", graph.floats(self._name), graph.weight(f"{self._name}.scales"))
        return graph.op("MatMul", x, weight)


def store_floats(weights: WeightFile, name: str, matrix: Matrix, dtype: str, *, exact: bool) -> None:
    """Appends plain floats; `exact`: in 16 bits where that loses nothing, as a checkpoint may have had them."""
    if exact:
        weights.add_floats(name, matrix, dtype)
    else:
        with np.errstate(over="ignore"):
            stored = matrix.astype(dtype, copy=False)
        if stored.itemsize < matrix.itemsize and not np.isfinite(stored).all():
            raise NumericError(f"{name}: weights that do not fit into 16 bits; choose fp32 or int8")
        weights.add(name, stored)


@dataclass(frozen=True)
class BlockShape:
    """What is known of stored blocks: size of `in` and `out`, blocks of an output, bits, and weights of a block."""

    width: int
    outputs: int
    blocks: int
    bits: int
    size: int


def _store_blocks(weights: WeightFile, name: str, blocks: Blocks, dtype: str) -> BlockShape:
    weights.add(name, blocks.values)
    weights.add_floats(f"{name}.scales", blocks.scales, dtype)
    if blocks.zero_points is not None:
        weights.add(f"{name}.zero_points", blocks.zero_points)
    outputs, count, _ = blocks.values.shape
    return BlockShape(blocks.width, outputs, count, blocks.bits, blocks.block_size)


def _multiply_blocks(graph: GraphBuilder, x: str, name: str, shape: BlockShape) -> str:
    return graph.op(
        "MatMulNBits",
        x,
        graph.weight(name),
        *block_parameters(graph, name),
        domain=MICROSOFT,
        K=shape.width,
        N=shape.outputs,
        bits=shape.bits,
        block_size=shape.size,
        accuracy_level=4,
    )


def block_parameters(graph: GraphBuilder, name: str) -> tuple[str, ...]:
    """Names of a stored weight's scales and, if asymmetric, zero points."""
    zeros = f"{name}.zero_points"
    scales = graph.floats(f"{name}.scales")
    return (scales, graph.weight(zeros)) if zeros in graph.weights else (scales,)


def _store_shift(weights: WeightFile, name: str, rounded: Rounded, shift: Matrix, dtype: str, *, exact: bool) -> None:
    """Stores a shift; an exact one as the smallest value of each block where that fits into 16 bits."""
    middle = np.float32(1 << (rounded.grid.bits - 1))
    low = shift - middle * rounded.group.scale
    if exact and is_half(low) and (low + middle * rounded.group.scale == shift).all():
        weights.add_floats(f"{name}.low", low, dtype)
    else:
        weights.add_floats(f"{name}.shift", shift if exact else shift.astype(np.float16).astype(np.float32), dtype)


def _store_sums(weights: WeightFile, rounded: Rounded, dtype: str, multiple: int = 1) -> str:
    """The matrix that sums x over its blocks, once for all weights of this width; returns its name."""
    width, size = rounded.width, rounded.grid.group
    name = f"block_sums_{width}_{size}_{multiple}"
    if name not in weights:
        weights.add_floats(name, summing_matrix(width, size, multiple), dtype)
    return name
