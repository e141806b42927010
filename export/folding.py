"""Scales folded into a checkpoint's tensors: the model computes what it did, and its weights round better.

    attention norm -> q, k, v      norm / s, columns of q, k and v times s
    mlp norm -> gate, up           norm / s, columns of gate and up times s
    up -> down                     rows and bias of up / s, columns of down times s

Values could be scaled for the output product likewise, but they stand in the cache, and a draft works in its
target's: keys and values are the checkpoint's own in every format. (With scaled values an INT4 draft of
SmolLM2-135M agreed at .80 in a cache of its own, and at .20 in its target's.) The last norm is left alone:
what leaves it is an output of the graph, and a tied head could not follow.
Scales are searched (quant/scaling.py) when a layer's first tensor is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specedge.export.checkpoint import Tensors
from specedge.export.layers import Decoder
from specedge.quant.formats import grid_for
from specedge.quant.moments import Calibration
from specedge.quant.scaling import search_scale

__all__ = ["FoldedTensors"]

Matrix = NDArray[np.float32]


@dataclass(frozen=True)
class _Change:
    """What is done to a tensor: rows (or entries) divided, columns multiplied; by site, None: nothing."""

    rows: str | None = None
    columns: str | None = None


class FoldedTensors:
    """A checkpoint's tensors with scales folded in, under the same names and in the same shapes."""

    def __init__(
        self, decoder: Decoder, tensors: Tensors, calibration: Calibration, *, second_order: bool = False
    ) -> None:
        """Searches nothing yet.

        Args:
            decoder: The model and its number format.
            tensors: The checkpoint's.
            calibration: Moments of every linear layer.
            second_order: GPTQ follows.
        """
        self._decoder = decoder
        self._tensors = tensors
        self._calibration = calibration
        self._second_order = second_order
        self._changes = dict(_changes(decoder))
        self._scales: dict[int, Mapping[str, Matrix]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __getitem__(self, name: str) -> Matrix:
        tensor = self._tensors[name]
        layer, change = self._changes.get(name, (0, _Change()))
        if change.columns is not None:
            tensor = tensor * self._layer(layer)[change.columns]
        if change.rows is not None:
            scale = self._layer(layer)[change.rows]
            tensor = tensor / (scale if tensor.ndim == 1 else scale[:, None])
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors.shape(name)

    def scale(self, name: str) -> Matrix | None:
        """What the input of a linear layer is divided by, [in]; None: nothing."""
        prefix, _, rest = name.removeprefix("model.layers.").partition(".")
        if not prefix.isdigit() or rest not in _SITES:
            return None
        return self._layer(int(prefix))[_SITES[rest]]

    def _layer(self, layer: int) -> Mapping[str, Matrix]:
        if layer not in self._scales:
            self._scales[layer] = self._search(layer)
        return self._scales[layer]

    def _search(self, layer: int) -> Mapping[str, Matrix]:
        family = self._decoder.family
        return {
            "attention": self._one(layer, "self_attn.qkv_proj", [family.q, family.k, family.v]),
            "mlp": self._one(layer, "mlp.gate_proj", [family.gate, family.up]),
            "down": self._one(layer, "mlp.down_proj", [family.down]),
        }

    def _one(self, layer: int, module: str, weights: list[str]) -> Matrix:
        form, name = self._decoder.form, f"model.layers.{layer}.{module}"
        moments, grid = self._calibration[name], grid_for(form, name, self._decoder.dimensions.layers)
        if grid is None:
            return np.ones_like(moments.largest)
        prefix = self._decoder.family.layer.format(layer=layer)
        matrices = [self._tensors[f"{prefix}{weight}.weight"] for weight in weights]
        return search_scale(
            matrices,
            grid,
            moments,
            rounds_rows=grid.rounds_rows,
            static=form.static,
            second_order=self._second_order,
        )


_SITES = {
    "self_attn.qkv_proj": "attention",
    "mlp.gate_proj": "mlp",
    "mlp.up_proj": "mlp",
    "mlp.down_proj": "down",
}


def _changes(decoder: Decoder) -> Iterator[tuple[str, tuple[int, _Change]]]:
    """By tensor: the layer it is in, and what is done to it."""
    family = decoder.family
    modules = {
        family.attention_norm: _Change(rows="attention"),
        family.q: _Change(columns="attention"),
        family.k: _Change(columns="attention"),
        family.v: _Change(columns="attention"),
        family.mlp_norm: _Change(rows="mlp"),
        family.gate: _Change(columns="mlp"),
        family.up: _Change(columns="mlp", rows="down"),
        family.down: _Change(columns="down"),
    }
    for layer in range(decoder.dimensions.layers):
        prefix = family.layer.format(layer=layer)
        for module, change in modules.items():
            yield f"{prefix}{module}.weight", (layer, change)
            if change.columns and change.rows:
                yield f"{prefix}{module}.bias", (layer, _Change(rows=change.rows))
