"""Trains Medusa heads on rows of a frozen target (Medusa-1).

The loss is sum_k decay^k CE_k over the heads. CE_k is half against the token that the target wrote k
places behind the one it decided (it wrote greedily, unless it was asked otherwise: this is the token
that greedy decoding accepts), half against the law by which it decided it, over the tokens that heads
guess among: a law says more than a token, and heads learn it by heart less soon.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from specedge.runtime.errors import NumericError
from specedge.train.head_rows import Batch, HeadRows
from specedge.train.head_state import load_state, save_state
from specedge.train.medusa_heads import MedusaHeads
from specedge.train.settings import Settings
from specedge.train.target import fast_products

if TYPE_CHECKING:
    from accelerate import Accelerator
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["HeadLoss", "Report", "ranks", "train_heads"]

_CLIP = 1.0
_WARM_UP = 50
_LAST_RATE = 0.02
_BETAS = (0.9, 0.98)
_SAVE_SECONDS = 120.0
_REPORT_STEPS = 200


@dataclass(frozen=True)
class Report:
    """How far a training is.

    Attributes:
        step, steps: Done, and in all.
        loss: Mean of the last steps.
        top1, top5: For each head, of the last batch.
        seconds: Since it began.
    """

    step: int
    steps: int
    loss: float
    top1: tuple[float, ...]
    top5: tuple[float, ...]
    seconds: float


class HeadLoss(nn.Module):  # type: ignore[misc]  # torch is Any where it is not installed
    """The loss of a batch, and how often each head was right in it."""

    def __init__(self, heads: MedusaHeads, settings: Settings) -> None:
        super().__init__()
        self.heads, self._decay, self._soft = heads, settings.decay, settings.soft
        self._twice = settings.gradient_checkpointing

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss, and shares of right first and first five guesses, [2, heads]."""
        total = torch.zeros((), device=batch.hidden.device)
        shares = []
        states = self.heads.states(batch.hidden, batch.inner, batch.before)
        laws = self._laws(batch)
        for head, rows in enumerate(states):
            given = (head, rows, batch.wanted[head], batch.decided[head], laws)
            loss, share = (
                checkpoint(self._of_head, *given, use_reentrant=False) if self._twice else self._of_head(*given)
            )
            total = total + self._decay ** (head + 1) * loss
            shares.append(share)
        return total, torch.stack(shares, 1)

    def _laws(self, batch: Batch) -> Tensor | None:
        """The target's laws over the guessed tokens, [m, guesses]."""
        if not self._soft:
            return None
        with torch.no_grad():
            return self.heads.target_logits(batch.deciding).float().softmax(-1)

    def _of_head(
        self, head: int, rows: Tensor, wanted: Tensor, decided: Tensor, laws: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        known = wanted >= 0
        logits = self.heads.logits(head, rows[known]).float()
        count = known.sum().clamp_min(1)
        loss = cross_entropy(logits, wanted[known], reduction="sum") / count
        if laws is not None:
            soft = cross_entropy(logits, laws[decided[known]], reduction="sum") / count
            loss = self._soft * soft + (1 - self._soft) * loss
        with torch.no_grad():
            own = logits.gather(1, wanted[known][:, None])
            better = (logits > own).sum(1)
            share = torch.stack([(better < most).sum() / count for most in (1, 5)])
        return loss, share


def train_heads(
    heads: MedusaHeads,
    rows: HeadRows,
    settings: Settings,
    accelerator: Accelerator,
    *,
    state: Path | None = None,
    facts: Mapping[str, Any] | None = None,
    progress: Callable[[Report], None] = lambda _: None,
) -> float:
    """Trains heads in place.

    Args:
        heads: The heads.
        rows: What to train on.
        settings: How.
        accelerator: Says where, and with how many processes.
        state: File that keeps the state, from which a killed run goes on; None: it is not kept.
        facts: What the state depends on beside the settings.
        progress: Told every so often.

    Returns:
        The mean loss of the last steps.

    Raises:
        NumericError: The loss is no number.
        UsageError: The state is of another training.
    """
    share = (accelerator.process_index, accelerator.num_processes)
    steps = rows.steps(settings.epochs, settings.segments, share[1])
    loss_of: Any = HeadLoss(heads.train(), settings)
    optimiser: Any = torch.optim.AdamW(
        heads.parameters(), lr=settings.learning_rate, betas=_BETAS, weight_decay=settings.weight_decay
    )
    about = {**(facts or {}), **asdict(settings), "steps": steps}
    loss_of, optimiser = accelerator.prepare(loss_of, optimiser)
    parameters = heads.named_tensors()
    inner = getattr(optimiser, "optimizer", optimiser)
    done = load_state(state, parameters, inner, about) if state is not None else 0
    mean, began = math.nan, time.monotonic()
    saved = reported = began
    for step in range(done, steps):
        for group in optimiser.param_groups:
            group["lr"] = settings.learning_rate * _rate(step, steps)
        # What dropout leaves out depends on the step, so that a run that was killed goes on as it would have.
        torch.manual_seed((settings.seed * steps + step) * share[1] + share[0])
        with fast_products(accelerator.device):
            loss, right = loss_of(rows.batch(step, settings.segments, settings.seed, share))
        value = _descend(loss, heads, optimiser, accelerator, step)
        mean = value if math.isnan(mean) else 0.98 * mean + 0.02 * value
        now = time.monotonic()
        if (step + 1) % _REPORT_STEPS == 0 or step + 1 == steps or now - reported > _SAVE_SECONDS:
            reported = now
            top1, top5 = map(tuple, right.tolist())
            progress(Report(step + 1, steps, mean, top1, top5, now - began))
        if state is not None and now - saved > _SAVE_SECONDS and accelerator.is_main_process:
            saved = now
            save_state(state, parameters, inner, step + 1, about)
    heads.eval()
    return mean


def _descend(loss: Tensor, heads: MedusaHeads, optimiser: Any, accelerator: Accelerator, step: int) -> float:
    """One step down; the loss before it."""
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(heads.parameters(), _CLIP)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    value = float(loss.detach())
    if not math.isfinite(value):
        raise NumericError(f"the loss of step {step} is {value}: give a lower learning rate")
    return value


def ranks(heads: MedusaHeads, rows: HeadRows, accelerator: Accelerator) -> NDArray[np.int64]:
    """Where the right token stood among each head's guesses, as in use, on the rows held out.

    Returns:
        [rows, heads]; 10 or more: not among the first ten. Rows behind which fewer tokens come than there are heads
        are left out.
    """
    guesses = heads.config.listed
    found = []
    with torch.inference_mode(), fast_products(accelerator.device):
        for batch in rows.held_out():
            logits = heads.guess(batch.hidden, batch.inner, batch.before[0])
            places = [_place(each, wanted, guesses) for each, wanted in zip(logits, batch.wanted, strict=True)]
            found.append(torch.stack(places, 1)[batch.whole.to(places[0].device)].cpu().numpy())
    return np.concatenate(found) if found else np.zeros((0, heads.config.heads), np.int64)


def _place(logits: Tensor, wanted: Tensor, guesses: int) -> Tensor:
    right = logits.topk(guesses, -1).indices == wanted[:, None]
    return torch.where(right.any(1), right.int().argmax(1), guesses)


def _rate(step: int, steps: int) -> float:
    """Up in a straight line, down along a cosine."""
    warm = min(1.0, (step + 1) / min(_WARM_UP, steps))
    return warm * (_LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * step / steps)))
