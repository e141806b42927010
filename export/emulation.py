"""Runs graphs in bfloat16 where there is no kernel for it: each node in fp32, and what it gives rounded to bfloat16.

The inputs, outputs, nodes and weight files are the exported graph's, so that what is checked on a CPU is what
a GPU will run, but for how a kernel rounds inside of a node.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from specedge.export.tensor_types import tensor_types
from specedge.runtime.bundle import GraphSpec

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

__all__ = ["emulated", "emulated_file"]

_SHORT = "bfloat16"


@contextmanager
def emulated(folder: Path, spec: GraphSpec) -> Iterator[GraphSpec]:
    """A graph that a CPU can run: the graph itself, or while the block lasts one beside it.

    Args:
        folder: That its paths start from; writable.
        spec: The graph.
    """
    if spec.cache_dtype != _SHORT:
        yield spec
        return
    files = {"": ""} | {file: _other(file) for file in spec.files}
    try:
        for file in spec.files:
            _write(folder / file, folder / files[file])
        yield replace(spec, file=files[spec.file], chains=files[spec.chains], compact=files[spec.compact])
    finally:
        for file in spec.files:
            (folder / files[file]).unlink(missing_ok=True)


@contextmanager
def emulated_file(folder: Path, file: str, cache_dtype: str) -> Iterator[str]:
    """The same for the standard graph; gives its path. Its inputs and outputs are fp32: it is fed numpy arrays."""
    if cache_dtype != _SHORT:
        yield file
        return
    other = _other(file)
    try:
        _write(folder / file, folder / other, wide=True)
        yield other
    finally:
        (folder / other).unlink(missing_ok=True)


def _other(file: str) -> str:
    """A path beside a graph's, and so beside its weights."""
    path = PurePosixPath(file)
    return str(path.with_name(f".{path.name}"))


def _write(path: Path, other: Path, *, wide: bool = False) -> None:
    import onnx

    from specedge.export.decoder import save_graph

    model = onnx.load(str(path), load_external_data=False)
    _emulate(model)
    if wide:
        _widen(model)
    save_graph(model, other)


def _emulate(model: ModelProto) -> None:
    """Puts a Cast to fp32 before, and one to bfloat16 behind, every node that reads or writes bfloat16."""
    from onnx import TensorProto, helper

    types, wide = tensor_types(model), dict[str, str]()
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        if node.op_type == "Cast":  # a CPU casts to and from bfloat16 as it is
            nodes.append(node)
            continue
        for place, name in enumerate(node.input):
            if types[name] != _SHORT:  # an absent input has no name, and no type
                continue
            if name not in wide:
                wide[name] = f"{name}.wide"
                nodes.append(helper.make_node("Cast", [name], [wide[name]], to=TensorProto.FLOAT))
            node.input[place] = wide[name]
        nodes.append(node)
        for place, name in enumerate(node.output):
            if types[name] == _SHORT:
                node.output[place] = f"{name}.unrounded"
                nodes.append(helper.make_node("Cast", [f"{name}.unrounded"], [name], to=TensorProto.BFLOAT16))
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _widen(model: ModelProto) -> None:
    """Makes inputs and outputs in bfloat16 fp32."""
    from onnx import TensorProto, helper

    outputs = {value.name for value in model.graph.output}
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.BFLOAT16:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
            if value.name in outputs:
                node = next(node for node in model.graph.node if value.name in node.output)
                node.output[0] = f"{value.name}.short"
                model.graph.node.append(helper.make_node("Cast", [node.output[0]], [value.name], to=TensorProto.FLOAT))
