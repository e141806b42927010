"""The weight file of a graph: tensors appended one at a time, so that never more than one is in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specedge.runtime.errors import StorageError

if TYPE_CHECKING:
    from onnx import TensorProto

__all__ = ["WeightFile", "is_half"]

_ALIGN = 64
_PAGE = 4096
_CHUNK = 16 << 20


class WeightFile:
    """External data of one or more ONNX models, written in the order tensors are added.

    Large tensors start on a page of their own, so that a runtime can map them.
    """

    def __init__(self, path: Path, on_tensor: Callable[[int], None] | None = None) -> None:
        """Creates the file.

        Args:
            path: Where to write; graphs beside it refer to it by its name.
            on_tensor: Told how many bytes each tensor took.

        Raises:
            StorageError: The file cannot be created.
        """
        import ml_dtypes  # noqa: F401  by which numpy knows bfloat16

        self.path = path
        self.size = 0
        self._on_tensor = on_tensor
        self._tensors: dict[str, TensorProto] = {}
        try:
            self._stream = path.open("xb")
        except OSError as error:
            raise StorageError(f"{path}: cannot be created ({error.strerror})") from error

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._stream.close()
        except OSError as failure:
            raise self._full(failure) from failure

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def add(self, name: str, array: NDArray[Any]) -> None:
        """Appends a tensor.

        Raises:
            StorageError: It cannot be written.
        """
        from onnx import TensorProto, helper

        if name in self._tensors:
            raise ValueError(f"tensor {name!r} is written twice")
        data = np.ascontiguousarray(array)
        align = _PAGE if data.nbytes >= _PAGE else _ALIGN
        start = -(-self.size // align) * align
        self._write(data, start)
        tensor = TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(data.dtype), dims=data.shape)
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", self.path.name), ("offset", start), ("length", data.nbytes)):
            tensor.external_data.add(key=key, value=str(value))
        self._tensors[name] = tensor
        written, self.size = start + data.nbytes - self.size, start + data.nbytes
        if self._on_tensor is not None:
            self._on_tensor(written)

    def add_floats(self, name: str, array: NDArray[np.float32], dtype: str) -> None:
        """Appends floats as `dtype`, or as float16 where that loses nothing; `GraphBuilder.floats` reads them."""
        self.add(name, array.astype(np.float16 if is_half(array) else dtype))

    def alias(self, name: str, source: str, shape: Sequence[int]) -> None:
        """Gives a stored tensor's bytes a second name and shape, as operators that share it may ask for."""
        tensor = type(self._tensors[source])()
        tensor.CopyFrom(self._tensors[source])
        tensor.name = name
        tensor.dims[:] = shape
        self._tensors[name] = tensor

    def tensor(self, name: str) -> TensorProto:
        """The initialiser that stands for a tensor of this file, for any graph in the same folder."""
        return self._tensors[name]

    def _write(self, data: NDArray[Any], start: int) -> None:
        raw = data.reshape(-1).view(np.uint8)
        try:
            self._stream.write(b"\0" * (start - self.size))
            for position in range(0, raw.nbytes, _CHUNK):
                self._stream.write(raw[position : position + _CHUNK].data)
        except OSError as error:
            raise self._full(error) from error

    def _full(self, error: OSError) -> StorageError:
        return StorageError(
            f"{self.path}: cannot be written ({error.strerror}); free some space or choose another folder"
        )


def is_half(array: NDArray[np.float32]) -> bool:
    """Whether float16 holds every value exactly."""
    with np.errstate(over="ignore"):
        return bool((array.astype(np.float16).astype(np.float32) == array).all())
