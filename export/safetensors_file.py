"""A safetensors file: its header checked against its size, its tensors read one at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from specedge.export.reading import brief, check_finite, parse_json
from specedge.runtime.errors import CheckpointError, MissingExtraError, UnsupportedModelError

__all__ = ["SafetensorsFile", "SafetensorsTensors"]

# Layout: https://github.com/huggingface/safetensors, README: 8 bytes of length, a JSON header, the data without gaps.
# The safetensors package accepts a name twice and names with control characters, so the header is read here.
_MAX_HEADER_BYTES = 100_000_000
_STORED: dict[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}
# Never weights of a model that can be exported: sizes for checking the layout only.
_OTHER_BYTES = {"F64": 8, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_INTEGERS: dict[str, np.dtype[Any]] = {"I8": np.dtype("<i1"), "I32": np.dtype("<i4"), "I64": np.dtype("<i8")}
_OTHER_BYTES |= {"F8_E4M3": 1, "F8_E5M2": 1}
_ITEM_BYTES = {name: dtype.itemsize for name, dtype in _STORED.items()} | _OTHER_BYTES


@dataclass(frozen=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    offset: int


class SafetensorsFile:
    """One file; `entries` says where each tensor lies, `metadata` what its writer noted."""

    def __init__(self, path: Path) -> None:
        """Read and check the header; no tensor data.

        Raises:
            CheckpointError: The file is missing, no safetensors file, truncated or damaged.
        """
        self.path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                    raise CheckpointError(
                        f"{path} is truncated or no safetensors file: it declares a header of {length:,} bytes "
                        f"in a file of {size:,}; download it again"
                    )
                header = file.read(length)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing; is the checkpoint complete?") from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
        try:
            text = header.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path} is no safetensors file: its header is not UTF-8") from error
        declared = parse_json(text, f"the header of {path}")
        noted = declared.pop("__metadata__", None)
        self.metadata: Mapping[str, Any] = noted if isinstance(noted, dict) else {}
        self.entries = self._entries(declared, 8 + length, size)

    def _entries(self, declared: Mapping[str, Any], start: int, size: int) -> dict[str, _Entry]:
        """Check that the tensors lie one behind the other and fill the file."""
        spans: list[tuple[int, int]] = []
        entries: dict[str, _Entry] = {}
        for name, value in declared.items():
            dtype, shape, first, last = self._fields(name, value)
            entries[name] = _Entry(dtype, shape, start + first)
            spans.append((first, last))
        end = 0
        for first, last in sorted(spans):
            if first != end:
                raise CheckpointError(f"{self.path} is damaged: its tensors overlap or leave a gap at byte {end:,}")
            end = last
        if start + end != size:
            verb = "is truncated" if start + end > size else "has bytes behind its last tensor"
            raise CheckpointError(f"{self.path} {verb}: {size:,} bytes where {start + end:,} belong; download it again")
        return entries

    def _fields(self, name: str, value: object) -> tuple[str, tuple[int, ...], int, int]:
        if not name.isprintable():
            raise CheckpointError(f"{self.path} holds the tensor name {brief(name)}, which has control characters")
        if isinstance(value, dict):
            dtype, shape, span = value.get("dtype"), value.get("shape"), value.get("data_offsets")
            bytes_each = _ITEM_BYTES.get(dtype) if isinstance(dtype, str) else None
            if bytes_each is None:
                raise UnsupportedModelError(
                    f"{self.path}: tensor {name} has the unknown format {brief(dtype)}; save it as BF16"
                )
            if _counts(shape) and _counts(span) and len(span) == 2:
                first, last = span
                if last - first == math.prod(shape) * bytes_each:
                    return str(dtype), tuple(shape), first, last
        raise CheckpointError(f"{self.path} is damaged: shape and offsets of tensor {name} do not fit each other")

    def read(self, name: str) -> NDArray[np.float32]:
        """One tensor as float32.

        Raises:
            CheckpointError: The file became shorter, or the tensor holds NaN.
            MissingExtraError: ml_dtypes is not installed and the tensor is BF16.
            UnsupportedModelError: The tensor is not BF16, F16 or F32.
        """
        entry = self.entries[name]
        if entry.dtype not in _STORED:
            raise UnsupportedModelError(f"{self.path}: tensor {name} is {entry.dtype}; F32, F16 and BF16 can be read")
        data = self._data(entry, _STORED[entry.dtype])
        if entry.dtype == "BF16":
            data = data.view(_bfloat16())
        return check_finite(data.astype(np.float32, copy=False).reshape(entry.shape), name, self.path)

    def read_integers(self, name: str) -> NDArray[np.int64]:
        """One tensor of integers.

        Raises:
            CheckpointError: The file became shorter.
            UnsupportedModelError: The tensor is not I8, I32 or I64.
        """
        entry = self.entries[name]
        if entry.dtype not in _INTEGERS:
            raise UnsupportedModelError(f"{self.path}: tensor {name} is {entry.dtype} where integers belong")
        return self._data(entry, _INTEGERS[entry.dtype]).astype(np.int64).reshape(entry.shape)

    def _data(self, entry: _Entry, dtype: np.dtype[Any]) -> NDArray[Any]:
        count = math.prod(entry.shape)
        try:
            data = np.fromfile(self.path, dtype, count, offset=entry.offset)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror or error}") from error
        if data.size != count:
            raise CheckpointError(f"{self.path} became shorter while it was read")
        return data


class SafetensorsTensors:
    """The tensors of one or more files, as `checkpoint.Tensors` wants them."""

    def __init__(self, files: Mapping[str, SafetensorsFile], where: Path) -> None:
        """Wrap files.

        Args:
            files: The file of each tensor, by the tensor's name.
            where: The folder, for messages.
        """
        self._files, self._where = dict(files), where

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._files:
            raise CheckpointError(f"tensor {name} is missing in {self._where}")
        return self._files[name]

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        """The tensor as float32, in the file's own layout: [out, in] for a linear layer.

        Raises:
            CheckpointError: See `SafetensorsFile.read`, or the tensor is missing.
        """
        return self._file(name).read(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape, without reading the data.

        Raises:
            CheckpointError: The tensor is missing.
        """
        return self._file(name).entries[name].shape


def _bfloat16() -> Any:
    try:
        import ml_dtypes
    except ImportError as error:
        raise MissingExtraError("ml_dtypes", "export") from error
    return ml_dtypes.bfloat16


def _counts(value: object) -> TypeGuard[list[int]]:
    """Whether a value is a list of whole numbers from 0 on."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 60 for item in value)
