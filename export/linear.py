"""Linear layers, one class for each kind of number format: how a weight is stored, and the nodes that apply it.

Every kind is row-invariant: a row's result does not depend on how many rows run with it, so a
token verified in a wide pass is the token that plain decoding gives.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specedge.export.nodes import GraphBuilder
from specedge.export.weights import WeightFile
from specedge.quant.formats import Format

__all__ = ["DenseLinear", "Linear", "linear_for"]

Matrix = NDArray[np.float32]


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
    return DenseLinear(form)


class DenseLinear:
    """Plain floats: MatMul with the weight as [in, out]."""

    def __init__(self, form: Format) -> None:
        self._form = form

    def store(self, weights: WeightFile, name: str, matrix: Matrix, bias: Matrix | None = None) -> None:
        weights.add(f"{name}.weight", matrix.T.astype(self._form.dtype, copy=False))
        _store_bias(weights, name, bias, self._form)

    def apply(self, graph: GraphBuilder, x: str, name: str) -> str:
        return _add_bias(graph, graph.op("MatMul", x, graph.weight(f"{name}.weight")), name)


def _store_bias(weights: WeightFile, name: str, bias: NDArray[Any] | None, form: Format) -> None:
    if bias is not None:
        weights.add(f"{name}.bias", bias.astype(form.dtype, copy=False))


def _add_bias(graph: GraphBuilder, y: str, name: str) -> str:
    bias = f"{name}.bias"
    return graph.op("Add", y, graph.weight(bias)) if bias in graph.weights else y
