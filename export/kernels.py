"""Whether a device can run a graph, looked up before anything runs: every node's operator, version and types.

The tables are what the projects publish, as data beside this file, each with its source:
ONNX Runtime's OperatorKernels.md, and the TensorRT parser's operators.md (of 10.15, and of 10.6, the
nearest to JetPack 6's 10.3 that could be read). A node that no table has would silently run on the CPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from specedge.export.dialects import Dialect
from specedge.export.tensor_types import tensor_types, variables_of
from specedge.runtime.errors import ExportError

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

__all__ = ["KernelTable", "check_kernels", "find_table", "problems"]

_FORBIDDEN = ("If", "Loop", "Scan", "NonZero", "Unique", "Compress", "Range", "NonMaxSuppression")
"""Control flow, and operators whose result's shape depends on values."""

_WIDTHS = {"rows", "logit_rows", "moved_rows", "capacity"}
"""Symbolic dimensions that a graph may have; the capacity is fixed as long as a session lives."""

_MOST_TOP = 3840
_ATTENTION_INPUTS = 4


@dataclass(frozen=True)
class KernelTable:
    """What one execution provider has kernels for.

    Attributes:
        source: Where the table is from.
        version: Of the provider.
        opset: The newest it reads; None: any.
        ops: By "domain:operator": versions, and the types of each type variable, or of the first input ("*").
    """

    source: str
    version: str
    ops: Mapping[str, Any]
    opset: int | None = None

    def allows(self, domain: str, kind: str, opset: int, variable: str, dtype: str) -> bool | None:
        """Whether an operator takes a type at an input; None: the table does not have the operator at this version.

        Args:
            domain: "" for the standard one.
            kind: The operator.
            opset: Version of its domain.
            variable: Name of the input's type variable; one the table does not know means any of its types.
            dtype: "float", "float16", "int64" …
        """
        rows = self.ops.get(f"{domain or 'ai.onnx'}:{kind}", ())
        fitting = [row for row in rows if row["first"] <= opset and (row["last"] is None or opset <= row["last"])]
        if not fitting:
            return None
        return any(dtype in row["types"].get(variable, _all(row["types"])) for row in fitting)

    @property
    def by_first_input(self) -> bool:
        """Whether it says nothing of the types of further inputs."""
        return self.opset is not None


def find_table(device: str, attention: str) -> KernelTable | None:
    """The table of a device for a way to attend; None for the CPU, where everything is run before it is kept."""
    if device == "cpu":
        return None
    if device == "cuda":
        return _read("cuda")
    return _read("tensorrt-10.15" if attention == "onnx24" else "tensorrt-10.6")


def check_kernels(model: ModelProto, dialect: Dialect, name: str) -> None:
    """Looks a graph up.

    Args:
        model: The graph.
        dialect: What it is made of, and for.
        name: What to call it.

    Raises:
        ExportError: A node has no kernel on the device.
    """
    table = find_table(dialect.device, dialect.attention)
    found = None if table is None else next(problems(model, table), None)
    if table is not None and found is not None:
        raise ExportError(
            f"graph {name!r}: {found} in {table.version}; nothing was kept; choose another --attention or --precision, "
            "and please report this model"
        )


def problems(model: ModelProto, table: KernelTable) -> Iterator[str]:
    """What a provider with this table could not run of a graph."""
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    if table.opset is not None and opsets[""] > table.opset:
        yield f"opset {opsets['']} is newer than {table.opset}, the newest"
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param and dim.dim_param not in _WIDTHS:
                yield f"{value.name}: dimension {dim.dim_param!r} is no width, which is the only one to change"
    types = tensor_types(model)
    inputs = {value.name for value in model.graph.input}
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        yield from _problems_of(node, table, opsets[node.domain], types)
        if node.op_type == "Shape" and node.input[0] not in inputs:
            yield f"{node.name}: the shape of {node.input[0]!r} is asked for, which is no input of the graph"
        rule = _RULES.get(node.op_type)
        if rule is not None and not node.domain and (broken := rule(node, constants)):
            yield f"{node.op_type} {node.name}: {broken}"


def _problems_of(node: NodeProto, table: KernelTable, opset: int, types: Mapping[str, str]) -> Iterator[str]:
    what = f"{node.op_type} {node.name}"
    if node.op_type in _FORBIDDEN:
        yield f"{what} is control flow, or has a shape that depends on values, which no captured graph may have,"
        return
    variables = ["*"] if table.by_first_input else variables_of(node, opset)
    for name, variable in zip(node.input, variables, strict=False):
        if not name:
            continue
        allowed = table.allows(node.domain, node.op_type, opset, variable, types[name])
        if allowed is None:
            yield f"{what} has no kernel for opset {opset}"
            return
        if not allowed:
            yield f"{what} has no kernel for {types[name]} as {variable} ({name})"


def _top_k(node: NodeProto, constants: Mapping[str, Any]) -> str:
    from onnx import numpy_helper

    if node.input[1] not in constants:
        return "K is no constant"
    count = int(numpy_helper.to_array(constants[node.input[1]]).reshape(-1)[0])
    return f"K is {count}, and has to be below {_MOST_TOP}" if count >= _MOST_TOP else ""


def _reduce(node: NodeProto, constants: Mapping[str, Any]) -> str:
    return "" if len(node.input) < 2 or node.input[1] in constants else "its axes are no constant"


def _attention(node: NodeProto, constants: Mapping[str, Any]) -> str:
    if len(node.output) > 1 or len(node.input) > _ATTENTION_INPUTS:
        return "it has inputs or outputs beside q, k, v and the mask"
    return ""


def _scatter(node: NodeProto, constants: Mapping[str, Any]) -> str:
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), -2)
    return "" if axis == -2 else f"axis is {axis}, and has to be -2"


# What TensorRT's table says beside types; it harms no other device to keep to it.
_RULES: Mapping[str, Callable[[NodeProto, Mapping[str, Any]], str]] = {
    "Attention": _attention,
    "ReduceMean": _reduce,
    "TensorScatter": _scatter,
    "TopK": _top_k,
}


def _all(types: Mapping[str, list[str]]) -> set[str]:
    # What a row leaves out has one fixed type, which the operator's schema has checked.
    return {kind for kinds in types.values() for kind in kinds} | {"int32", "int64"}


@cache
def _read(name: str) -> KernelTable:
    text = files("specedge.export").joinpath("kernel_tables", f"{name}.json").read_text("utf-8")
    return KernelTable(**json.loads(text))
