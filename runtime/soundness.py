"""Whether a graph's weights are numbers: NaN or infinity anywhere is found when the graph is opened.

Arithmetic alone would not show it. A graph that rounds activations to integers turns a NaN into
some number, and goes on with laws that look sound. So the stored floats are looked at: scales,
norms and tables, and the weights themselves where they are floats.

The few fields of an ONNX file that say where its tensors lie are read here, as the runtime has no
onnx package (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto: ModelProto.graph = 7,
GraphProto.initializer = 5, and TensorProto's fields below).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specedge.runtime.errors import BundleError, NumericError

__all__ = ["check_weights"]

_GRAPH, _INITIALISER = 7, 5
_DATA_TYPE, _FLOATS, _NAME, _RAW, _EXTERNAL = 2, 4, 8, 9, 13
_KEY, _VALUE = 1, 2
_CHUNK = 1 << 22


def _all_ones(mask: int) -> Callable[[NDArray[Any]], bool]:
    """Finds numbers whose exponent bits are all ones: what is no number, or infinite."""
    return lambda bits: bool(((bits & mask) == mask).any())


def _is_value(mask: int, value: int) -> Callable[[NDArray[Any]], bool]:
    return lambda bits: bool(((bits & mask) == value).any())


# How a type of TensorProto.DataType is stored, and what shows that one of them is no finite number.
_TYPES: Mapping[int, tuple[str, Callable[[NDArray[Any]], bool]]] = {
    1: ("<u4", _all_ones(0x7F80_0000)),  # FLOAT
    10: ("<u2", _all_ones(0x7C00)),  # FLOAT16
    11: ("<u8", _all_ones(0x7FF0_0000_0000_0000)),  # DOUBLE
    16: ("<u2", _all_ones(0x7F80)),  # BFLOAT16
    17: ("u1", _is_value(0x7F, 0x7F)),  # FLOAT8E4M3FN has one NaN, of either sign, and no infinity
    18: ("u1", _is_value(0xFF, 0x80)),  # FLOAT8E4M3FNUZ: NaN stands where -0 would
    19: ("u1", _all_ones(0x7C)),  # FLOAT8E5M2
    20: ("u1", _is_value(0xFF, 0x80)),  # FLOAT8E5M2FNUZ
    24: ("u1", _is_value(0xFF, 0xFF)),  # FLOAT8E8M0
}


def check_weights(path: Path) -> None:
    """Looks at every float among the weights of a graph, its external file included.

    Args:
        path: The .onnx file. ONNX Runtime has opened it before, so that it is well formed.

    Raises:
        NumericError: A weight holds NaN or infinity.
        BundleError: The file is not what ONNX Runtime opened.
    """
    try:
        data = path.read_bytes()
        for graph in _messages(memoryview(data), _GRAPH):
            for tensor in _messages(graph, _INITIALISER):
                _check_tensor(tensor, path)
    except (IndexError, ValueError, OverflowError) as error:
        raise BundleError(f"{path}: its weights cannot be read ({error}); export the bundle again") from None


def _check_tensor(tensor: memoryview, path: Path) -> None:
    kind, name, raw, where = 0, "", memoryview(b""), {}
    for field, value in _fields(tensor):
        if field == _DATA_TYPE and isinstance(value, int):
            kind = value
        elif isinstance(value, memoryview):
            if field == _NAME:
                name = _text(value)
            elif field in (_RAW, _FLOATS):
                raw = value
            elif field == _EXTERNAL:
                entry = {number: _text(text) for number, text in _fields(value) if isinstance(text, memoryview)}
                where[entry.get(_KEY, "")] = entry.get(_VALUE, "")
    if kind not in _TYPES:
        return
    stored, broken = _TYPES[kind]
    if any(broken(part) for part in _parts(raw, where, path, np.dtype(stored))):
        raise NumericError(f"{path}: weight {name!r} holds NaN or infinity; export the bundle again")


def _parts(raw: memoryview, where: Mapping[str, str], path: Path, kind: np.dtype[Any]) -> Iterator[NDArray[Any]]:
    """A tensor's numbers as bits, some at a time."""
    if not where:
        yield np.frombuffer(raw, kind)
        return
    location = where.get("location", "")
    if Path(location).name != location:
        raise ValueError(f"{location!r} is not beside it")
    file = path.parent / location
    start, size = int(where.get("offset", "0")), int(where.get("length", "0"))
    if start < 0 or size < 0 or start + size > file.stat().st_size:
        raise ValueError(f"{location!r} is shorter than it says")
    with file.open("rb") as stream:
        stream.seek(start)
        while size > 0:
            part = stream.read(min(size, _CHUNK))
            size -= len(part)
            yield np.frombuffer(part, kind)


def _messages(data: memoryview, wanted: int) -> Iterator[memoryview]:
    for field, value in _fields(data):
        if field == wanted and isinstance(value, memoryview):
            yield value


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Fields of a protobuf message: number, and a value or the bytes of it."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        wire = key & 7
        if wire == 0:
            value, place = _varint(data, place)
            yield key >> 3, value
            continue
        if wire == 2:
            size, place = _varint(data, place)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"no such wire type as {wire}")
        if place + size > len(data):
            raise ValueError("a field goes beyond its end")
        yield key >> 3, data[place : place + size]
        place += size


def _varint(data: memoryview, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if not byte & 0x80:
            return value, place
        if shift > 63:
            raise ValueError("a number without an end")


def _text(data: memoryview) -> str:
    return bytes(data).decode("utf-8", "replace")
