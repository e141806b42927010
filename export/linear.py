"""The linear layers of a model: a product (export/products.py), and what is added to it.

Layers of one model may be stored in different ways: each says itself what it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specedge.export.nodes import GraphBuilder
from specedge.export.products import Product, store_product
from specedge.export.qdq import QdqProduct
from specedge.export.weights import WeightFile
from specedge.quant.grid import Rounded
from specedge.quant.layer import Layer

__all__ = ["Linears", "add_corrections", "store_corrections"]


@dataclass
class Linears:
    """The layers of one model by name, as they were stored.

    Attributes:
        dtype: numpy name of the activations.
        exact: Shifts of affine grids are stored as they are.
        explicit: Rounding is written out (see `Format`).
    """

    dtype: str
    exact: bool = False
    explicit: bool = False

    def __post_init__(self) -> None:
        self._products: dict[str, Product] = {}

    def store(self, weights: WeightFile, name: str, layer: Layer) -> None:
        """Appends a layer's tensors; their names begin with the layer's."""
        weight = f"{name}.weight"
        if self.explicit and isinstance(layer.weight, Rounded):
            self._products[name] = QdqProduct(weights, weight, layer.weight, self.dtype, layer.step)
        else:
            self._products[name] = store_product(weights, weight, layer, self.dtype, exact=self.exact)
        store_corrections(weights, name, layer, self.dtype)

    def __contains__(self, name: str) -> bool:
        return name in self._products

    def apply(self, graph: GraphBuilder, x: str, name: str) -> str:
        """Adds the nodes that apply a stored layer to x, [..., in]; returns the name of [..., out]."""
        return add_corrections(graph, x, self._products[name].multiply(graph, x), name)


def store_corrections(weights: WeightFile, name: str, layer: Layer, dtype: str) -> None:
    """Appends a layer's low-rank factors and bias.

    The factors are float16 in the file: they correct errors of a rounding that is far coarser.
    """
    if layer.low_rank is not None:
        for part, factor in (("down", layer.low_rank.down), ("up", layer.low_rank.up)):
            half = factor.astype(np.float16) if np.abs(factor).max() <= np.finfo(np.float16).max else factor
            weights.add(f"{name}.{part}", half.T)
    if layer.bias is not None:
        weights.add(f"{name}.bias", layer.bias.astype(dtype, copy=False))


def add_corrections(graph: GraphBuilder, x: str, y: str, name: str) -> str:
    """Adds a layer's low-rank part of x and its bias to its product y, where it has them."""
    if f"{name}.down" in graph.weights:
        inner = graph.op("MatMul", x, graph.floats(f"{name}.down"))
        y = graph.op("Add", y, graph.op("MatMul", inner, graph.floats(f"{name}.up")))
    return graph.op("Add", y, graph.weight(f"{name}.bias")) if f"{name}.bias" in graph.weights else y
