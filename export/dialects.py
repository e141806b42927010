"""Which operators a graph is made of, by what will run it.

    attention   opset   operators of com.microsoft   runs on
    gqa         21      yes                          CPU; CUDA from onnxruntime-gpu 1.29 on
    onnx24      24      on CUDA and CPU              TensorRT from 10.15 on; CUDA from onnxruntime-gpu 1.26 on
    plain       19      on CUDA and CPU              TensorRT 10.3 (JetPack 6), and all others

`gqa` is GroupQueryAttention over a cache that input and output share. `onnx24` writes the cache with
TensorScatter and reads it with the standard Attention. `plain` does both with operators that every
version has. TensorRT's parser knows no operator of com.microsoft: one would split the model in two.
"""

from __future__ import annotations

from dataclasses import dataclass

from specedge.runtime.errors import UsageError
from specedge.runtime.specs import TREE_FLAVOURS

__all__ = ["ATTENTIONS", "GQA", "SCATTERS", "Dialect", "find_dialect"]

ATTENTIONS = TREE_FLAVOURS


@dataclass(frozen=True)
class Dialect:
    """The operators of one graph.

    Attributes:
        attention: One of `ATTENTIONS`.
        opset: Version of the standard operators.
        contrib: Whether operators of com.microsoft may stand beside them.
        fixed: Whether the cache's rows are a number in the graph, which a compiled engine wants.
        selects: Whether the graph finds the likeliest tokens itself, so that logits may stay on the device.
        device: What will run it.
    """

    attention: str
    opset: int
    device: str = "cpu"
    contrib: bool = True
    fixed: bool = False
    selects: bool = False


GQA = Dialect("gqa", 21)
"""What everything that runs here is made of: 21 is the newest opset that onnxruntime 1.23 has on all providers."""

SCATTERS = 24
"""The first opset that has TensorScatter."""

_OPSETS = {"gqa": 21, "onnx24": SCATTERS, "plain": 19}
_DEFAULT = {"cpu": "gqa", "cuda": "gqa", "tensorrt": "onnx24"}


def find_dialect(device: str, attention: str | None = None) -> Dialect:
    """The operators for a device.

    Args:
        device: "cpu", "cuda" or "tensorrt".
        attention: One of `ATTENTIONS`; None: the device's own.

    Raises:
        UsageError: There is no such attention, or not on this device.
    """
    attention = _DEFAULT[device] if attention is None else attention
    if attention not in ATTENTIONS:
        raise UsageError(f"attention is {attention!r}: choose one of {', '.join(ATTENTIONS)}")
    if device == "tensorrt" and attention == "gqa":
        raise UsageError(
            "attention 'gqa' on device 'tensorrt': TensorRT does not know GroupQueryAttention; choose onnx24 "
            "(TensorRT 10.15 or newer) or plain (JetPack 6)"
        )
    compiled = device == "tensorrt"
    return Dialect(attention, _OPSETS[attention], device, not compiled, fixed=compiled, selects=device != "cpu")
