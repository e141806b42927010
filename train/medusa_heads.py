"""Medusa heads in PyTorch, to be trained; the arithmetic is that of models/medusa.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import dropout, linear, silu

from specedge.models.medusa import NORM_EPS, HeadsConfig, tensor_shapes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MedusaHeads"]


class MedusaHeads(nn.Module):  # type: ignore[misc]  # torch is Any where it is not installed
    """Heads under training.

    Args:
        config: What they are made of.
        head: The target's vocabulary matrix, [guesses, hidden_size], rows of the guessed tokens only.
        embedding: The target's embedding of the same tokens.
        seed: Of what is not zero at first.
        dropout: Share of what a block reads, and of its inside, that is left out while it learns.
    """

    _head: Tensor
    _embedding: Tensor

    def __init__(
        self, config: HeadsConfig, head: Tensor, embedding: Tensor, seed: int = 0, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.config, self._dropout = config, dropout
        self.register_buffer("_head", head, persistent=False)
        self.register_buffer("_embedding", _norm(embedding), persistent=False)
        generator = torch.Generator().manual_seed(seed)
        for name, shape in tensor_shapes(config):
            self.register_parameter(_attribute(name), nn.Parameter(_first_value(name, shape, head, generator)))

    def named_tensors(self) -> dict[str, Tensor]:
        """The tensors under the names of `tensor_shapes`."""
        return {name: self._tensor(name) for name, _ in tensor_shapes(self.config)}

    def states(self, hidden: Tensor, inner: Tensor | None, tokens: Sequence[Tensor]) -> list[Tensor]:
        """Rows of every head before its vocabulary product, [n, hidden_size] each.

        Args:
            hidden: [n, hidden_size].
            inner: [n, taps * hidden_size].
            tokens: For each head the tokens [n] before those it guesses, as places among the guessed tokens, -1 for
                others; heads that are no chain do not look at them.
        """
        result = []
        state = self._start(hidden, inner)
        for head in range(self.config.heads):
            rows = self._blocks(head, state, tokens[head] if self.config.chain else None)
            state = rows if self.config.chain else state
            result.append(rows)
        return result

    def guess(self, hidden: Tensor, inner: Tensor | None, token: Tensor) -> Iterator[Tensor]:
        """Logits of every head, [n, guesses] each, as in use: each head reads the likeliest guess of the one before.

        Args:
            hidden, inner: As above.
            token: [n], what the target has decided, as a place; -1 for tokens that are never guessed.
        """
        state = self._start(hidden, inner)
        for head in range(self.config.heads):
            rows = self._blocks(head, state, token if self.config.chain else None)
            logits = self.logits(head, rows)
            state, token = rows if self.config.chain else state, logits.argmax(-1)
            yield logits

    def target_logits(self, rows: Tensor) -> Tensor:
        """The target's own vocabulary product, over the guessed tokens."""
        return linear(rows, self._head)

    def logits(self, head: int, rows: Tensor) -> Tensor:
        """The vocabulary product of a head, [n, guesses]."""
        if self.config.lm_head == "own":
            return linear(rows, self._tensor(f"heads.{head}.lm_head.weight"))
        logits = self.target_logits(rows)
        if self.config.lm_head == "lowrank":
            down, up = self._tensor(f"heads.{head}.lm_head.down"), self._tensor(f"heads.{head}.lm_head.up")
            logits = logits + linear(linear(rows, down), up)
        return logits

    def _start(self, hidden: Tensor, inner: Tensor | None) -> Tensor:
        if not self.config.taps:
            return hidden
        assert inner is not None
        parts = [_norm(part) for part in inner.split(self.config.hidden_size, -1)]
        return hidden + linear(torch.cat(parts, -1), self._tensor("fuse.weight"))

    def _blocks(self, head: int, rows: Tensor, before: Tensor | None) -> Tensor:
        for block in range(self.config.blocks):
            prefix = f"heads.{head}.blocks.{block}"
            if not self.config.width:
                weight, bias = self._tensor(f"{prefix}.square.weight"), self._tensor(f"{prefix}.square.bias")
                rows = rows + silu(linear(rows, weight, bias))
                continue
            read = _norm(rows)
            if before is not None and not block:
                read = torch.cat([read, self._embed(before)], -1)
            weight, bias = self._tensor(f"{prefix}.wide.weight"), self._tensor(f"{prefix}.wide.bias")
            wide = silu(linear(self._drop(read), weight, bias))
            rows = rows + linear(self._drop(wide), self._tensor(f"{prefix}.narrow.weight"))
        return rows

    def _drop(self, x: Tensor) -> Tensor:
        return dropout(x, self._dropout, self.training)

    def _embed(self, places: Tensor) -> Tensor:
        return self._embedding[places.clamp_min(0)] * (places >= 0).unsqueeze(-1)

    def _tensor(self, name: str) -> Tensor:
        tensor: Tensor = getattr(self, _attribute(name))
        return tensor


def _attribute(name: str) -> str:
    return name.replace(".", "_")


def _norm(rows: Tensor) -> Tensor:
    rows = rows.float()
    return rows * (rows.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt()


def _first_value(name: str, shape: tuple[int, ...], head: Tensor, generator: torch.Generator) -> Tensor:
    """Every head begins as the target's own vocabulary product: what a block adds is zero at first."""
    if name.endswith("lm_head.weight"):
        return head.detach().clone().float()
    if name.endswith((".wide.weight", ".down")):
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5
    return torch.zeros(shape)
