"""Types of all tensors of a graph that the exporter writes, and which type variable each input of a node has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

__all__ = ["tensor_types", "variables_of"]

# ONNX's own schemas do not know these; from ONNX Runtime's ContribOperators.md.
_CONTRIB: Mapping[str, tuple[str, ...]] = {
    "GatherBlockQuantized": ("T1", "Tind", "T2", "T1"),
    "GroupQueryAttention": ("T", "T", "T", "T_CACHE", "T_CACHE", "M", "M", "T", "T", "int64", "T"),
    "MatMulNBits": ("T1", "T2", "T1", "T3"),
    "RotaryEmbedding": ("T", "M", "T", "T"),
    "SkipSimplifiedLayerNormalization": ("T", "T", "T", "T"),
}
_NORM = ("T", "V")  # SimplifiedLayerNormalization, which lives in the standard domain and in no standard


def variables_of(node: NodeProto, opset: int) -> Sequence[str]:
    """The type variable of each input, by the operator's schema; a fixed type by its own name."""
    import onnx

    if node.op_type == "SimplifiedLayerNormalization":
        return _NORM
    if node.domain:
        return _CONTRIB[node.op_type]
    schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
    named = [each.type_str for each in schema.inputs]
    return named + named[-1:] * max(len(node.input) - len(named), 0)  # the last of a variadic one repeats


def tensor_types(model: ModelProto) -> dict[str, str]:
    """Types by tensor, as "float" or "int64": declared ones, and through the nodes what follows from them."""
    from onnx import TensorProto

    def name(kind: int) -> str:
        return str(TensorProto.DataType.Name(kind)).lower()

    types = {"": ""}
    types |= {value.name: name(value.type.tensor_type.elem_type) for value in model.graph.input}
    types |= {tensor.name: name(tensor.data_type) for tensor in model.graph.initializer}
    for node in model.graph.node:
        types |= dict(zip(node.output, _results(node, types, name), strict=False))
        types[""] = ""  # an output that is not wanted, an input that is not there
    return types


def _results(node: NodeProto, types: Mapping[str, str], name: Callable[[int], str]) -> list[str]:
    """The types of a node's outputs; those of nodes that nothing else is known of, that of the first input."""
    first = types[node.input[0]]
    if node.op_type == "Cast":
        return [name(next(attribute.i for attribute in node.attribute if attribute.name == "to"))]
    if node.op_type == "Shape":
        return ["int64"]
    if node.op_type == "TopK":
        return [first, "int64"]
    if node.op_type in ("QuantizeLinear", "GatherBlockQuantized"):
        return [types[node.input[2]]]  # the zero point's; the scales'
    if node.op_type in ("DequantizeLinear", "MatMulIntegerToFloat"):
        return [types[node.input[1 if node.op_type == "DequantizeLinear" else 2]]]
    if node.op_type in ("Equal", "GreaterOrEqual"):
        return ["bool"]
    return [first] * len(node.output)
