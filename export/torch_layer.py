"""A linear layer in PyTorch, with those of its numbers free that may change when it is already rounded.

A weight on a grid is, with a and c free, zero to begin with and one for each group,

    W = scale (1 + a) (code - zero) + shift + |scale| c,

so that its codes stay and what moves is stored anyway. Rounding of activations passes the gradient
straight through (Bengio and others, arXiv 1308.3432).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specedge.quant.formats import Format
from specedge.quant.grid import Group, Rounded
from specedge.quant.layer import Layer, LowRank

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BIAS", "DOWN", "SCALE", "SHIFT", "UP", "TorchLayer", "fast_dtype", "round_activations", "rounding_of"]

Matrix = NDArray[np.float32]

SCALE, SHIFT, BIAS, DOWN, UP = "scale", "shift", "bias", "down", "up"
"""What is free in a layer: of its weight, and beside it."""

_ROWS, _STATIC = -1, -2
_TOP = 127
_BFLOAT16 = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
_TINIEST = 1e-10  # a row of zeros is not divided by zero; as in the graphs


class TorchLayer:
    """y = x W^T + b + (x A^T) B^T, as a `Layer` says and a number format's operators compute.

    Attributes:
        free: The free numbers, by what they are.
    """

    def __init__(
        self,
        layer: Layer,
        form: Format | None = None,
        *,
        free: Collection[str] = (),
        dtype: Any = None,
        device: Any = "cpu",
    ) -> None:
        """Takes a layer.

        Args:
            layer: The layer.
            form: Says how its input is rounded; None: it is not.
            free: Kinds of numbers that are free, where the layer has them.
            dtype: What products are computed in; None: float32.
            device: Where.
        """
        import torch

        self.free: dict[str, Tensor] = {}
        self._layer, self._dtype, self._device = layer, dtype or torch.float32, device
        self._rounding = rounding_of(form, layer)
        if isinstance(layer.weight, Rounded):
            self._read_grid(layer.weight, free)
        else:
            self._values = torch.from_numpy(np.array(layer.weight, np.float32)).to(device, self._dtype)
        self._bias = None if layer.bias is None else self._number(layer.bias, BIAS in free and BIAS)
        self._low_rank: tuple[Tensor, Tensor] | None = None
        if layer.low_rank is not None:
            down, up = layer.low_rank.down, layer.low_rank.up
            self._low_rank = self._number(down, DOWN in free and DOWN), self._number(up, UP in free and UP)

    @property
    def bits(self) -> int:
        """Of a weight on a grid; 32 of one in floats."""
        weight = self._layer.weight
        return weight.grid.bits if isinstance(weight, Rounded) else 32

    def apply(self, x: Tensor) -> Tensor:
        """[..., out] of x, [..., in]."""
        from torch.nn.functional import linear

        rounded = round_activations(x, self._rounding, self._layer.step).to(self._dtype)
        if self._whole_rows:
            # The scale of an output is a factor of it: its gradient needs no product of its own.
            y = linear(rounded, self._codes[:, 0].to(self._dtype)).float() * self._scale()[:, 0]
        else:
            y = linear(rounded, self._weight().to(self._dtype)).float()
        if self._low_rank is not None:
            y = y + linear(linear(x, self._low_rank[0]), self._low_rank[1])
        return y if self._bias is None else y + self._bias

    def look_up(self, ids: Tensor) -> Tensor:
        """Rows of the weight, [..., in]: what an embedding gives for ids, [...]."""
        if not isinstance(self._layer.weight, Rounded):
            return self._values[ids].float()
        return self._weight(ids)

    def result(self) -> Layer:
        """The layer with what the free numbers have become, in numbers that can be stored."""
        weight, bias, low_rank = self._layer.weight, self._layer.bias, self._layer.low_rank
        if isinstance(weight, Rounded):
            scale = _array(self._scale()).astype(weight.grid.scale_dtype).astype(np.float32)
            shift = self._shift()
            group = Group(scale, weight.group.zero, None if shift is None else _array(shift))
            weight = replace(weight, group=group)
        if BIAS in self.free:
            bias = _array(self.free[BIAS])
        if low_rank is not None and self._low_rank is not None:
            low_rank = LowRank(*map(_array, self._low_rank))
        return replace(self._layer, weight=weight, bias=bias, low_rank=low_rank)

    @property
    def _whole_rows(self) -> bool:
        weight = self._layer.weight
        return isinstance(weight, Rounded) and not weight.grid.group and weight.group.shift is None

    def _read_grid(self, rounded: Rounded, free: Collection[str]) -> None:
        import torch

        group = rounded.group
        rows, count = group.scale.shape
        codes = rounded.codes.reshape(rows, count, -1).astype(np.float32)
        if group.zero is not None:
            codes -= group.zero[..., None]
        self._first_scale = torch.from_numpy(group.scale).to(self._device)
        self._first_shift = None if group.shift is None else torch.from_numpy(group.shift).to(self._device)
        # [out, groups, size], less their zero; bfloat16 holds all of -256 to 256 and every float8.
        self._codes = torch.from_numpy(codes).to(self._device, torch.bfloat16)
        if SCALE in free:
            self._number(np.zeros_like(group.scale), SCALE)
        if SHIFT in free and group.shift is not None:
            self._number(np.zeros_like(group.shift), SHIFT)

    def _number(self, value: Matrix, kind: str | bool) -> Tensor:
        import torch

        tensor = torch.from_numpy(np.array(value, np.float32)).to(self._device)
        if isinstance(kind, str):
            self.free[kind] = tensor.requires_grad_()
        return tensor

    def _scale(self, ids: Tensor | None = None) -> Tensor:
        scale = _at(self._first_scale, ids)
        return scale * (1 + _at(self.free[SCALE], ids)) if SCALE in self.free else scale

    def _shift(self, ids: Tensor | None = None) -> Tensor | None:
        if self._first_shift is None:
            return None
        shift = _at(self._first_shift, ids)
        if SHIFT in self.free:
            shift = shift + _at(self._first_scale, ids).abs() * _at(self.free[SHIFT], ids)
        return shift

    def _weight(self, ids: Tensor | None = None) -> Tensor:
        weight = self._layer.weight
        if not isinstance(weight, Rounded):
            return self._values
        shift = self._shift(ids)
        whole = _at(self._codes, ids).float() * self._scale(ids)[..., None]
        if shift is not None:
            whole = whole + shift[..., None]
        return whole.flatten(-2)[..., : weight.width]


def rounding_of(form: Format | None, layer: Layer) -> int:
    """How the operator of a layer rounds its input: 0: not; -1: each row; -2: a static step; n: each n of a row."""
    weight = layer.weight
    if form is None or form.emulated or not isinstance(weight, Rounded) or weight.grid.kind == "float8":
        return 0
    if weight.grid.group:
        return weight.grid.group
    return _ROWS if layer.step is None else _STATIC


def fast_dtype(device: Any) -> Any:
    """What products are computed in: bfloat16 where the device can, else float32."""
    import torch

    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    able = any(getattr(torch.cpu, name, lambda: False)() for name in _BFLOAT16)
    return torch.bfloat16 if able else torch.float32


def round_activations(x: Tensor, rounding: int, step: float | None = None) -> Tensor:
    """x as a layer's operator sees it; the gradient passes straight through.

    Args:
        x: [..., in].
        rounding: As `rounding_of` says: a row, or n of it, in 127 steps to its largest.
        step: Of static rounding.
    """
    import torch
    from torch.nn.functional import pad

    if not rounding:
        return x
    with torch.no_grad():
        if rounding == _STATIC:
            assert step is not None
            values = (x / step).round().clamp(-_TOP - 1, _TOP) * step
        elif rounding == _ROWS:
            largest = x.abs().amax(-1, keepdim=True).clamp_min(_TINIEST)
            unit = torch.tensor(1 / _TOP)
            values = ((x / largest) / unit).round() * unit * largest
        else:
            parts = pad(x, (0, -x.shape[-1] % rounding)).reshape(*x.shape[:-1], -1, rounding)
            units = parts.abs().amax(-1, keepdim=True).clamp_min(_TINIEST) / _TOP
            values = ((parts / units).round() * units).flatten(-2)[..., : x.shape[-1]]
        missed = values - x
    return x + missed


def _at(values: Tensor, ids: Tensor | None) -> Tensor:
    return values if ids is None else values[ids]


def _array(values: Tensor) -> Matrix:
    result: Matrix = values.detach().float().cpu().numpy().copy()
    return result
