"""Products whose rounding stands in the graph: QuantizeLinear, DequantizeLinear and a MatMul of floats between.

A compiler (TensorRT) fuses the three into a product of 8-bit numbers. Zero points are zero, as it wants them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specedge.export.nodes import GraphBuilder
from specedge.export.weights import WeightFile
from specedge.quant.activations import TOP
from specedge.quant.columns import pack_columns
from specedge.quant.grid import Rounded
from specedge.runtime.errors import NumericError

__all__ = ["QdqProduct"]

_LARGEST_FLOAT8 = 448.0  # of e4m3 (OCP 8-bit floating point specification, revision 1.0)


class QdqProduct:
    """8-bit weights with a scale for each output, times activations rounded by a calibrated step."""

    def __init__(self, weights: WeightFile, name: str, rounded: Rounded, dtype: str, step: float | None) -> None:
        """Appends the tensors.

        Args:
            weights: The weight file.
            name: Name of the weight.
            rounded: Weights in whole rows around zero, of integers or 8-bit floats.
            dtype: numpy name of the activations.
            step: What an int8 activation counts in; an 8-bit float covers the same range.

        Raises:
            NumericError: A scale does not fit into `dtype`.
        """
        if step is None:
            raise ValueError(f"{name}: activations without a step")
        columns = pack_columns(rounded)
        self._name, self._kind = name, columns.values.dtype
        floats = rounded.grid.kind == "float8"
        self._step = step * TOP / _LARGEST_FLOAT8 if floats else step
        weights.add(name, columns.values)
        weights.add(f"{name}.scales", _fitting(columns.scales, name, dtype))
        _fitting(np.array([self._step], np.float32), name, dtype)

    def multiply(self, graph: GraphBuilder, x: str) -> str:
        zero: NDArray[Any] = np.zeros((), self._kind)
        step, middle = graph.number(self._step), graph.constant(zero)
        rounded = graph.shared("QuantizeLinear", x, step, middle)
        rows = graph.shared("DequantizeLinear", rounded, step, middle)
        stored, scales = graph.weight(self._name), graph.weight(f"{self._name}.scales")
        return graph.op("MatMul", rows, graph.op("DequantizeLinear", stored, scales, axis=1))


def _fitting(scales: NDArray[np.float32], name: str, dtype: str) -> NDArray[Any]:
    """Scales as `dtype`, none of them rounded to nothing."""
    stored = scales.astype(dtype)
    if not (np.isfinite(stored).all() and (stored[scales > 0] > 0).all()):
        raise NumericError(f"{name}: a scale that does not fit into {dtype}; choose fp16")
    return stored
