"""A linear layer as it will be stored: its weight on a grid or in floats, and what compensates the rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specedge.quant.grid import Rounded, dequantise, join

__all__ = ["Layer", "LowRank", "Quantiser", "effective_weight", "join_layers"]

Matrix = NDArray[np.float32]


@dataclass(frozen=True)
class LowRank:
    """A correction y += (x A^T) B^T.

    Attributes:
        down: A, [rank, in].
        up: B, [out, rank].
    """

    down: Matrix
    up: Matrix


@dataclass(frozen=True)
class Layer:
    """y = x W^T + b, as it will be stored.

    Attributes:
        weight: [out, in], on a grid or in plain floats.
        bias: [out].
        low_rank: What is added to the weight.
        step: Static scale of the activations, which are rounded to int8 multiples of it; None:
            each row has its own, or activations are not rounded (the format says).
    """

    weight: Rounded | Matrix
    bias: Matrix | None = None
    low_rank: LowRank | None = None
    step: float | None = None


def effective_weight(layer: Layer) -> Matrix:
    """The weight [out, in] that the layer amounts to, its low-rank part included."""
    weight = dequantise(layer.weight) if isinstance(layer.weight, Rounded) else layer.weight
    return weight if layer.low_rank is None else weight + layer.low_rank.up @ layer.low_rank.down


def join_layers(first: Layer, second: Layer) -> Layer | None:
    """Two layers of the same input as one, the first's outputs before the second's.

    Returns:
        None where one product cannot do for both: other grids or steps, low-rank parts, a bias of one alone; and
        where weights are plain floats, which in one product were no faster (measured: feed-forward layers alone 0
        to 2 % slower in fp32, where a whole pass of 8 bits gains 2 to 9 %).
    """
    one, other = first.weight, second.weight
    if not (isinstance(one, Rounded) and isinstance(other, Rounded)):
        return None
    alike = (one.grid, one.width, first.step) == (other.grid, other.width, second.step)
    if not alike or first.low_rank or second.low_rank or (first.bias is None) != (second.bias is None):
        return None
    weight = Rounded(one.grid, np.concatenate([one.codes, other.codes]), join([one.group, other.group]), one.width)
    bias = None if first.bias is None or second.bias is None else np.concatenate([first.bias, second.bias])
    return Layer(weight, bias, step=first.step)


class Quantiser(Protocol):
    """Decides how one linear layer is stored."""

    def __call__(self, name: str, weight: Matrix, bias: Matrix | None) -> Layer:
        """The layer to store.

        Args:
            name: "model.layers.0.self_attn.qkv_proj", ".self_attn.o_proj", ".mlp.gate_proj",
                ".mlp.up_proj", ".mlp.down_proj"; "model.embed_tokens" for the embedding (which is the
                head too where they are tied), "lm_head" for a head of its own.
            weight: [out, in].
            bias: [out].
        """
        ...
