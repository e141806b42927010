"""Where the tensors of a session live: in the host's memory, or on a device with a copy on the host.

A binding fills its inputs and reads its outputs through `Buffer.host`; on a device `push` and `pull`
carry them over. The addresses never change, which a captured graph relies on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

__all__ = ["Buffer", "DeviceMemory", "HostMemory", "Memory"]


class Buffer(Protocol):
    """One tensor.

    Attributes:
        host: Its values as the host sees them.
        pointer: Its address where the session runs.
    """

    host: NDArray[Any]
    pointer: int

    def push(self) -> None:
        """Carries what the host has written to where the session runs."""
        ...

    def pull(self) -> None:
        """Carries what the session has written to the host."""
        ...


class Memory(Protocol):
    """Makes buffers.

    Attributes:
        device: ONNX Runtime's name of it: "cpu" or "cuda".
        local: Whether the host reads and writes it directly.
    """

    device: str
    local: bool

    def buffer(self, shape: Sequence[int], dtype: DTypeLike) -> Buffer:
        """A tensor of zeros."""
        ...


class HostMemory:
    """The host's own memory: nothing is ever copied."""

    device = "cpu"
    local = True

    def buffer(self, shape: Sequence[int], dtype: DTypeLike) -> Buffer:
        """A tensor of zeros."""
        return _HostBuffer(np.zeros(shape, dtype))


class _HostBuffer:
    def __init__(self, host: NDArray[Any]) -> None:
        self.host = host
        self.pointer = int(host.ctypes.data)

    def push(self) -> None:
        """There is nothing to carry."""

    def pull(self) -> None:
        """There is nothing to carry."""


class DeviceMemory:
    """A device's memory, device 0.

    Args:
        device: "cuda", or "cpu" for a second place in the host's memory, by which the copying is tested.
    """

    local = False

    def __init__(self, device: str) -> None:
        self.device = device

    def buffer(self, shape: Sequence[int], dtype: DTypeLike) -> Buffer:
        """A tensor of zeros."""
        return _DeviceBuffer(np.zeros(shape, dtype), self.device)


class _DeviceBuffer:
    def __init__(self, host: NDArray[Any], device: str) -> None:
        import onnxruntime as ort

        self.host = host
        self._value = ort.OrtValue.ortvalue_from_shape_and_type(host.shape, host.dtype, device, 0)
        self.pointer = int(self._value.data_ptr())
        self.push()

    def push(self) -> None:
        self._value.update_inplace(self.host)

    def pull(self) -> None:
        np.copyto(self.host, self._value.numpy())
