"""An ONNX graph under construction: nodes in order, their weights in an external file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specedge.export.dialects import GQA, Dialect
from specedge.export.weights import WeightFile

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto

__all__ = ["IR_VERSION", "MICROSOFT", "GraphBuilder"]

MICROSOFT = "com.microsoft"
IR_VERSION = 10


class GraphBuilder:
    """Collects nodes. Tensors are known by name; a name is given once."""

    def __init__(self, weights: WeightFile, dtype: str, dialect: Dialect = GQA) -> None:
        """Starts an empty graph.

        Args:
            weights: Where its weights are.
            dtype: numpy name of the activations.
            dialect: Which operators it is made of.
        """
        self.weights = weights
        self.dtype = dtype
        self.dialect = dialect
        self._nodes: list[NodeProto] = []
        self._initialisers: dict[str, TensorProto] = {}
        self._inputs: list[ValueInfoProto] = []
        self._outputs: list[ValueInfoProto] = []
        self._shared: dict[tuple[Any, ...], str] = {}

    def input(self, name: str, dtype: str, shape: Sequence[int | str]) -> str:
        """Declares a graph input; a text in the shape is a symbolic dimension."""
        self._inputs.append(_value_info(name, dtype, shape))
        return name

    def output(self, name: str, dtype: str, shape: Sequence[int | str]) -> None:
        """Declares a tensor a graph output."""
        self._outputs.append(_value_info(name, dtype, shape))

    def op(self, kind: str, *inputs: str, domain: str = "", name: str | None = None, **attributes: Any) -> str:
        """Adds a node with one output and returns that output's name; an empty input name is an absent input."""
        output = name or f"{kind}_{len(self._nodes)}"
        self.ops(kind, inputs, (output,), domain=domain, **attributes)
        return output

    def ops(
        self, kind: str, inputs: Sequence[str], outputs: Sequence[str], *, domain: str = "", **attributes: Any
    ) -> None:
        """Adds a node with the outputs named; an empty name is an output that is not wanted."""
        from onnx import helper

        name = f"{kind}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, inputs, outputs, name=name, domain=domain or None, **attributes))

    def shared(self, kind: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Like `op`, but a node that stands already is used again."""
        key = (kind, inputs, domain, tuple(sorted(attributes.items())))
        if key not in self._shared:
            self._shared[key] = self.op(kind, *inputs, domain=domain, **attributes)
        return self._shared[key]

    def constant(self, value: NDArray[Any]) -> str:
        """A small constant, kept inside the graph file."""
        from onnx import numpy_helper

        array = np.asarray(value)
        text = "x".join(map(str, array.reshape(-1).tolist()))
        name = f"const_{array.dtype}_{array.ndim}d_{text}"
        if name not in self._initialisers:
            self._initialisers[name] = numpy_helper.from_array(array, name)
        return name

    def integers(self, *values: int) -> str:
        """An int64 vector as a constant."""
        return self.constant(np.array(values, np.int64))

    def number(self, value: float, dtype: str | None = None) -> str:
        """A scalar of the activations' type (or another) as a constant."""
        return self.constant(np.array(value, dtype or self.dtype))

    def weight(self, name: str) -> str:
        """A tensor of the weight file."""
        if name not in self._initialisers:
            self._initialisers[name] = self.weights.tensor(name)
        return name

    def floats(self, name: str) -> str:
        """A tensor of the weight file as the activations' type; a runtime folds the Cast when it loads the graph."""
        kind = _onnx_type(self.dtype)
        stored = self.weight(name)
        return stored if self.weights.tensor(name).data_type == kind else self.shared("Cast", stored, to=kind)

    def cast(self, x: str, dtype: str, name: str | None = None) -> str:
        """Casts to a numpy type."""
        return self.op("Cast", x, name=name, to=_onnx_type(dtype))

    def model(self, title: str) -> ModelProto:
        """The finished model."""
        from onnx import helper

        graph = helper.make_graph(self._nodes, title, self._inputs, self._outputs, list(self._initialisers.values()))
        opsets = [helper.make_opsetid("", self.dialect.opset)]
        if self.dialect.contrib:
            opsets.append(helper.make_opsetid(MICROSOFT, 1))
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="specedge")


def _onnx_type(dtype: str) -> int:
    from onnx import helper

    return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def _value_info(name: str, dtype: str, shape: Sequence[int | str]) -> ValueInfoProto:
    from onnx import helper

    return helper.make_tensor_value_info(name, _onnx_type(dtype), shape)
