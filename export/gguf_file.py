"""A GGUF file: its structure checked against its size, its tensors dequantised one at a time."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specedge.export.gguf_blocks import block_grids, take_rows, unpack_blocks
from specedge.export.reading import brief, check_finite
from specedge.quant.grid import Grid, Rounded
from specedge.runtime.errors import CheckpointError, MissingExtraError, UnsupportedModelError

__all__ = ["GgufFile", "GgufTensors", "TensorInfo"]

# Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The gguf package's own reader is not used for
# it: it trusts the declared lengths (an array of 2^60 bytes keeps it busy for ever) and takes 100 times as long.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DEPTH = 4
_CHUNK = 1 << 22
"""Elements dequantised at a time: bounds what the intermediate arrays take."""


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies.

    Attributes:
        shape: As numpy has it, slowest first: [out, in] for a linear layer.
        kind: The GGML number format.
        offset: First byte in the file.
        size: Bytes.
    """

    shape: tuple[int, ...]
    kind: int
    offset: int
    size: int


class _Cursor:
    """Reads forward through a buffer; never past its end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0

    def take(self, size: int) -> int:
        """Step over `size` bytes; give where they start."""
        if size > len(self.data) - self.at:
            raise CheckpointError(
                f"{self.path} is truncated or damaged: it declares {size:,} bytes at {self.at:,} "
                f"but is {len(self.data):,} long; download it again"
            )
        start = self.at
        self.at += size
        return start

    def scalar(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.data, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        size = self.scalar("Q")
        start = self.take(size)
        try:
            return self.data[start : start + size].decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path} holds text that is not UTF-8 at byte {start:,}") from error

    def count(self, number: int, each: int) -> int:
        """A declared number of items, each at least `each` bytes long."""
        if number * each > len(self.data) - self.at:
            raise CheckpointError(
                f"{self.path} is truncated or damaged: it declares {number:,} items at byte {self.at:,} "
                f"but is {len(self.data):,} long; download it again"
            )
        return number

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth == _MAX_DEPTH:
            raise CheckpointError(f"{self.path} holds a value of unknown type {kind} at byte {self.at:,}")
        kind, length = self.scalar("I"), self.scalar("Q")
        if kind in _SCALARS:
            dtype = np.dtype("<" + _SCALARS[kind])
            start = self.take(self.count(length, dtype.itemsize) * dtype.itemsize)
            return np.frombuffer(self.data, dtype, length, start).copy()
        return [self.value(kind, depth + 1) for _ in range(self.count(length, 8))]


class GgufFile:
    """An open GGUF file.

    Attributes:
        path: The file.
        size: Its bytes.
        metadata: Its key-value pairs; numeric arrays are numpy arrays.
        tensors: Where each tensor lies, by GGUF name.
    """

    def __init__(self, path: Path) -> None:
        """Read and check the structure; no tensor data.

        Raises:
            CheckpointError: The file is missing, no GGUF file, truncated or damaged.
            MissingExtraError: gguf is not installed.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                head = file.read(8)
                if head[:4] != b"GGUF":
                    raise CheckpointError(f"{path} is no GGUF file: it starts with {head[:4]!r}, not b'GGUF'")
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} does not exist; give the path of a GGUF file") from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
        # Mapped for its head only: tensors are read, so that a file which shrinks meanwhile is an error, not a crash.
        with data:
            self.size = len(data)
            self._read_structure(_Cursor(data, path))

    def _read_structure(self, cursor: _Cursor) -> None:
        cursor.take(4)
        version = cursor.scalar("I")
        if version not in (2, 3):
            hint = "it is big-endian" if version in (2 << 24, 3 << 24) else f"it has format version {version}"
            raise CheckpointError(f"{self.path}: {hint}; little-endian versions 2 and 3 can be read: convert it again")
        tensor_count, pair_count = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata = self._pairs(cursor, pair_count)
        parts = self.metadata.get("split.count", 1)
        if not isinstance(parts, int) or parts > 1:
            raise CheckpointError(f"{self.path} is one part of several; join them first: llama-gguf-split --merge")
        self.tensors = self._infos(cursor, tensor_count)

    def _pairs(self, cursor: _Cursor, count: int) -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        for _ in range(cursor.count(count, 13)):
            key = cursor.string()
            if key in pairs:
                raise CheckpointError(f"{self.path} holds the key {brief(key)} twice")
            pairs[key] = cursor.value(cursor.scalar("I"))
        return pairs

    def _infos(self, cursor: _Cursor, count: int) -> dict[str, TensorInfo]:
        found: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(cursor.count(count, 28)):
            name, rank = cursor.string(), cursor.scalar("I")
            if name in found or not 1 <= rank <= 4:
                raise CheckpointError(f"{self.path}: tensor {brief(name)} stands twice or has {rank} dimensions")
            shape = tuple(reversed([cursor.scalar("Q") for _ in range(rank)]))
            found[name] = (shape, cursor.scalar("I"), cursor.scalar("Q"))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(f"{self.path}: general.alignment {brief(alignment)} is not a power of two")
        start = -(-cursor.at // alignment) * alignment
        return {name: self._info(name, start, *fields) for name, fields in found.items()}

    def _info(self, name: str, start: int, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
        sizes = _quant_sizes()
        if kind not in sizes:
            raise CheckpointError(
                f"{self.path}: tensor {brief(name)} has the unknown number format {kind}; update gguf"
            )
        block, block_size = sizes[kind]
        if 0 in shape or shape[-1] % block:
            raise CheckpointError(
                f"{self.path}: tensor {brief(name)} of shape {shape} is not made of blocks of {block}"
            )
        size = math.prod(shape) // block * block_size
        if start + offset + size > self.size:
            raise CheckpointError(
                f"{self.path} is truncated: tensor {brief(name)} ends at byte {start + offset + size:,} "
                f"of {self.size:,}; download it again"
            )
        return TensorInfo(shape, kind, start + offset, size)

    def read(self, name: str) -> NDArray[np.float32]:
        """One tensor, dequantised.

        Raises:
            CheckpointError: The tensor is missing, of a format that cannot be dequantised, or holds NaN.
        """
        raw = self._raw(name)
        info = self.tensors[name]
        result = np.empty((len(raw), info.shape[-1]), np.float32)
        step = max(_CHUNK // info.shape[-1], 1)
        for first in range(0, len(raw), step):
            result[first : first + step] = self._dequantize(raw[first : first + step], name, info.kind)
        return check_finite(result.reshape(info.shape), name, self.path)

    def grid(self, name: str) -> Grid | None:
        """The grid that a tensor's blocks lie on; None: plain floats.

        Raises:
            CheckpointError: The tensor is missing.
            UnsupportedModelError: No grid here has its blocks.
        """
        from gguf import GGMLQuantizationType

        kind, grids = self._info_of(name).kind, block_grids()
        if kind not in grids:
            known = ", ".join(GGMLQuantizationType(each).name for each in sorted(grids))
            raise UnsupportedModelError(
                f"{self.path}: tensor {name} is {GGMLQuantizationType(kind).name}, which cannot be kept as it is "
                f"({known} can); export with int4 or int8 instead of gguf"
            )
        return grids[kind]

    def read_rounded(self, name: str) -> Rounded | None:
        """One matrix as its blocks have it, without dequantising; None: it has plain floats.

        Raises:
            CheckpointError: As `grid` and `read`.
        """
        grid = self.grid(name)
        if grid is None:
            return None
        rounded = unpack_blocks(self._raw(name), grid)
        for array in (rounded.group.scale, rounded.group.shift):
            if array is not None:
                check_finite(array, name, self.path)
        return rounded

    def _info_of(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise CheckpointError(f"tensor {name} is missing in {self.path}")
        return self.tensors[name]

    def _raw(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor, a row for each of its rows."""
        info = self._info_of(name)
        try:
            raw = np.fromfile(self.path, np.uint8, info.size, offset=info.offset)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror or error}") from error
        if raw.size != info.size:
            raise CheckpointError(f"{self.path} became shorter while it was read")
        return raw.reshape(math.prod(info.shape[:-1]), -1)

    def _dequantize(self, raw: NDArray[np.uint8], name: str, kind: int) -> NDArray[Any]:
        from gguf import GGMLQuantizationType, quants

        if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            return raw.view("<f4" if kind == GGMLQuantizationType.F32 else "<f2")
        try:
            # Scales of damaged blocks may overflow; check_finite then names the tensor.
            with np.errstate(all="ignore"):
                return np.asarray(quants.dequantize(raw, GGMLQuantizationType(kind)))
        except (NotImplementedError, ValueError, KeyError) as error:
            form = GGMLQuantizationType(kind).name
            raise CheckpointError(f"{self.path}: tensor {name} is {form}, which cannot be dequantised") from error


class GgufTensors:
    """The tensors of a GGUF file under their Hugging Face names, as `checkpoint.Tensors` wants them."""

    def __init__(self, file: GgufFile, names: Mapping[str, str], interleaved: Mapping[str, int]) -> None:
        """Wrap a file.

        Args:
            file: The file.
            names: GGUF name by Hugging Face name.
            interleaved: Number of heads by the Hugging Face names of tensors stored for interleaved rotation.
        """
        self._file, self._names, self._interleaved = file, dict(names), dict(interleaved)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def _stored(self, name: str) -> str:
        if name not in self._names:
            raise CheckpointError(f"tensor {name} is missing in {self._file.path}")
        return self._names[name]

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        """The tensor as float32, [out, in], q and k for half-split rotation.

        Raises:
            CheckpointError: See `GgufFile.read`.
        """
        tensor = self._file.read(self._stored(name))
        return tensor[self._order(name)] if name in self._interleaved else tensor

    def grid(self, name: str) -> Grid | None:
        """See `GgufFile.grid`."""
        return self._file.grid(self._stored(name))

    def rounded(self, name: str) -> Rounded | None:
        """The matrix on the file's own grid, its rows as `__getitem__` has them; see `GgufFile.read_rounded`."""
        rounded = self._file.read_rounded(self._stored(name))
        if rounded is None or name not in self._interleaved:
            return rounded
        return take_rows(rounded, self._order(name))

    def _order(self, name: str) -> NDArray[np.int64]:
        """Where each row of q or k stands in the file.

        llama.cpp's converter stores the pair (i, i + d/2) of a head's rows side by side; this puts it back.
        """
        rows = self.shape(name)[0]
        return np.arange(rows).reshape(self._interleaved[name], -1, 2).swapaxes(1, 2).reshape(-1)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape, without reading the data.

        Raises:
            CheckpointError: The tensor is missing.
        """
        return self._file.tensors[self._stored(name)].shape


def _quant_sizes() -> dict[int, tuple[int, int]]:
    """Elements and bytes of a block, by number format."""
    try:
        from gguf import GGML_QUANT_SIZES
    except ImportError as error:
        raise MissingExtraError("gguf", "export") from error
    return {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}
