"""Medusa-2: heads and target learn together, and a new target comes out.

The target gets low-rank additions (LoRA, arXiv 2106.09685) to its linear layers, which are merged
into its weights at the end. Its own loss is KL(p || p') to the target as it was, on answers that it
wrote, so that it stays what it is (self-distillation, arXiv 2401.10774, section 2.3.2); the heads'
loss is that of Medusa-1, weighed with a factor that grows from 0. Heads have been trained before
(the warm-up), and learn at a rate of their own.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint as twice

from specedge.export.checkpoint import ReplacedTensors
from specedge.export.head_trees import calibration_of
from specedge.export.heads_file import read_heads
from specedge.export.layers import layer_modules
from specedge.export.torch_decoder import CausalAttention, TorchAttention, TorchDecoder, plain_layers
from specedge.export.torch_layer import DOWN, UP, TorchLayer
from specedge.export.writer import check_name, staged
from specedge.models import find_family
from specedge.quant.formats import EMBEDDING, HEAD
from specedge.quant.layer import Layer, LowRank, effective_weight
from specedge.runtime.errors import NumericError, UsageError
from specedge.train.head_rows import HELD_OUT, Batch, HeadRows, held_out
from specedge.train.hf_folder import write_model
from specedge.train.medusa import HeadLoss, Report, ranks
from specedge.train.options import Progress, TrainOptions
from specedge.train.run import Prepared, make_accelerator, prepare, write_trained
from specedge.train.shards import Rows
from specedge.train.target import fast_dtype, load_target

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Joint", "train_joint"]

_RANK = 16
_TARGET_RATE = 2e-4
_HEADS_RATE = 5e-4
_HEADS_WEIGHT = 0.2
_RAMP = 0.25
_TEXTS = 4
_CLIP = 1.0
_TESTS = 64
_REPORT_STEPS = 10


@dataclass(frozen=True)
class Joint:
    """What came out.

    Attributes:
        before, after: Perplexity of the held-out answers under the old target and the new.
        divergence: Mean KL(p || p') of the last steps, nats a token.
    """

    before: float
    after: float
    divergence: float


@dataclass(frozen=True)
class _Text:
    """A prompt, its answer, and which rows are the answer's."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    rows: Rows


def train_joint(
    model: str,
    output: Path,
    folder: Path,
    options: TrainOptions,
    steps: int,
    *,
    progress: Progress = lambda *_: None,
    report: Callable[[Report], None] = lambda _: None,
) -> Joint:
    """Tunes a model and its heads, which `train_medusa` has written, together.

    Args:
        model: As `train_medusa` had it.
        output: The file of heads; it is replaced.
        folder: Where the new model goes, in Hugging Face layout.
        options: As `train_medusa` had them.
        steps: Steps to take.
        progress, report: As in `train_medusa`.

    Raises:
        UsageError, CheckpointError, StorageError: As `train_medusa`.
        NumericError: The loss is no number.
    """
    check_name(folder, force=False)
    accelerator = make_accelerator()
    ready = prepare(model, output, options, accelerator, progress)
    stored = read_heads(output, ready.sizes.vocab_size)
    if stored.config != ready.config:
        raise UsageError(f"{output} holds heads of another make; train them with the same options first")
    rows = ready.store.load()
    guessed = torch.arange(ready.sizes.vocab_size) if stored.vocabulary is None else torch.from_numpy(stored.vocabulary)
    heads = ready.heads(guessed, options.settings).to(accelerator.device)
    with torch.no_grad():
        for name, tensor in heads.named_tensors().items():
            tensor.copy_(torch.from_numpy(stored.tensors[name]))
    learnt, tests = _texts(ready, rows)
    pair = _Pair(ready, accelerator.device, options.settings.gradient_checkpointing)
    before = pair.perplexity(pair.old, tests)
    losses = HeadLoss(heads, replace(options.settings, gradient_checkpointing=False))
    arranged = _Arranged(ready, guessed, accelerator.device)
    divergence = _train(pair, losses, arranged, learnt, options, steps, accelerator, report)
    after = pair.perplexity(pair.new, tests)
    moved = [replace(text, rows=pair.rows(text)) for text in tests]
    shares = ranks(heads, arranged.of(moved), accelerator)
    if accelerator.is_main_process:
        with staged(folder) as staging:
            write_model(staging, ready.checkpoint, ReplacedTensors(ready.checkpoint.tensors, pair.merged()))
        calibration = calibration_of(shares, ready.config.listed, f"held-out answers, target {folder.name}")
        write_trained(output, heads, guessed, calibration, options.precision, f"folder:{folder.name}")
    return Joint(before, after, divergence)


class _Pair:
    """The target as it was, and the one that learns."""

    def __init__(self, ready: Prepared, device: Any, gradient_checkpointing: bool) -> None:
        checkpoint, sizes = ready.checkpoint, ready.sizes
        family = find_family(checkpoint.config.get("model_type"))
        dtype = fast_dtype(device)
        self._taps, self._device = ready.config.taps, device
        self.old = load_target(checkpoint, dtype, device)
        kind = _Checkpointed if gradient_checkpointing else TorchDecoder
        layers = {}
        for number, (name, layer) in enumerate(plain_layers(family, sizes, checkpoint.tensors).items()):
            fixed = name in (EMBEDDING, HEAD)
            free = () if fixed else (DOWN, UP)
            layers[name] = TorchLayer(
                layer if fixed else _with_low_rank(layer, number), free=free, dtype=dtype, device=device
            )
        self.new = kind.build(family, sizes, checkpoint.tensors, layers, device=device)
        self._checkpoint = checkpoint

    def parameters(self) -> list[Tensor]:
        """What is free of the new target."""
        return [number for numbers in self.new.free.values() for number in numbers]

    def run(self, decoder: TorchDecoder, text: _Text) -> tuple[Tensor, Tensor | None]:
        """Hidden and inner rows before each token of an answer."""
        ids = torch.tensor([[*text.prompt, *text.answer]], device=self._device)[:, :-1]
        hidden, inner = decoder.run(ids, CausalAttention(decoder.sizes, ids.shape[1]), self._taps)
        first = len(text.prompt) - 1
        return hidden[0, first:], torch.cat([part[0, first:] for part in inner], -1) if inner else None

    def rows(self, text: _Text) -> Rows:
        """The new target's rows of an answer, to guess from."""
        with torch.no_grad():
            hidden, inner = self.run(self.new, text)
        return replace(
            text.rows, hidden=hidden.bfloat16().cpu(), inner=None if inner is None else inner.bfloat16().cpu()
        )

    def perplexity(self, decoder: TorchDecoder, texts: Sequence[_Text]) -> float:
        """exp of the mean negative log-likelihood of a token of the answers."""
        total, count = 0.0, 0
        with torch.no_grad():
            for text in texts:
                laws = decoder.logits(self.run(decoder, text)[0]).log_softmax(-1)
                wanted = torch.tensor(text.answer, device=self._device)
                total -= float(laws.gather(1, wanted[:, None]).sum())
                count += len(text.answer)
        return math.exp(total / count)

    def divergence(self, text: _Text, hidden: Tensor) -> Tensor:
        """KL(p || p') of each row, the mean of an answer's."""
        with torch.no_grad():
            old = self.old.logits(text.rows.hidden.to(self._device).float()).log_softmax(-1)
        new = self.new.logits(hidden).log_softmax(-1)
        return (old.exp() * (old - new)).sum(-1).mean()

    def merged(self) -> Mapping[str, np.ndarray]:
        """The new target's tensors under the checkpoint's names."""
        family, tensors = find_family(self._checkpoint.config.get("model_type")), self._checkpoint.tensors
        result: dict[str, np.ndarray] = {}
        for layer in range(self.new.sizes.layers):
            prefix = family.layer.format(layer=layer)
            for name, modules in layer_modules(family):
                whole = effective_weight(self.new.layers[f"model.layers.{layer}.{name}"].result())
                first = 0
                for module in modules:
                    key = f"{prefix}{module}.weight"
                    rows = tensors.shape(key)[0]
                    result[key] = whole[first : first + rows]
                    first += rows
        return result


class _Checkpointed(TorchDecoder):
    """A decoder that computes its layers twice in place of keeping what they gave."""

    def _layer(self, rows: Tensor, layer: int, attention: TorchAttention) -> Tensor:
        result: Tensor = twice(super()._layer, rows, layer, attention, use_reentrant=False)
        return result


@dataclass(frozen=True)
class _Arranged:
    """Makes batches for heads of rows that a decoder just gave."""

    ready: Prepared
    guessed: Tensor
    device: Any

    def of(self, texts: Sequence[_Text]) -> HeadRows:
        """Rows of texts, all of which count as held out."""
        parts = [text.rows for text in texts]
        inner = [part.inner for part in parts if part.inner is not None]
        apart = HELD_OUT * self.ready.asked.prompts  # a number for each text, of a prompt that is held out
        numbers = [torch.full_like(part.numbers, apart * place) for place, part in enumerate(parts)]
        rows = Rows(
            torch.cat([part.tokens for part in parts]),
            torch.cat([part.hidden for part in parts]),
            torch.cat(inner) if inner else None,
            torch.cat(numbers),
        )
        config = self.ready.config
        return HeadRows(rows, self.ready.asked.prompts, config.heads, self.guessed, config.vocab_size, self.device)

    def batch(self, text: _Text, hidden: Tensor, inner: Tensor | None) -> Batch:
        """One answer as a batch, through which gradients flow."""
        plain = self.of([text])
        (batch,) = plain.held_out(segments=1 << 20)
        return replace(batch, hidden=hidden, inner=inner)


def _with_low_rank(layer: Layer, seed: int) -> Layer:
    outputs, inputs = layer.weight.shape  # type: ignore[union-attr]
    rank = min(_RANK, outputs, inputs)
    down = np.random.default_rng(seed).standard_normal((rank, inputs)).astype(np.float32) * inputs**-0.5
    return replace(layer, low_rank=LowRank(down, np.zeros((outputs, rank), np.float32)))


def _texts(ready: Prepared, rows: Rows) -> tuple[list[_Text], list[_Text]]:
    """Texts to learn from, and some held out."""
    prompts = {each.number: each.prompt for each in ready.asked.questions}
    numbers = rows.numbers
    starts = [0, *(torch.nonzero(numbers[1:] != numbers[:-1]).flatten() + 1).tolist(), len(rows)]
    learnt: list[_Text] = []
    tests: list[_Text] = []
    for first, last in itertools.pairwise(starts):
        part = rows[first:last]
        number = int(part.numbers[0])
        text = _Text(prompts[number], tuple(part.tokens.tolist()), part)
        (tests if bool(held_out(part.numbers[:1], ready.asked.prompts)) else learnt).append(text)
    if not learnt or not tests:
        raise UsageError("too few answers to hold some out; give more data")
    return learnt, tests[:_TESTS]


def _train(
    pair: _Pair,
    losses: HeadLoss,
    arranged: _Arranged,
    texts: Sequence[_Text],
    options: TrainOptions,
    steps: int,
    accelerator: Any,
    report: Callable[[Report], None],
) -> float:
    groups: list[dict[str, Any]] = [
        {"params": pair.parameters(), "lr": _TARGET_RATE, "rate": _TARGET_RATE},
        {"params": list(losses.heads.parameters()), "lr": _HEADS_RATE, "rate": _HEADS_RATE},
    ]
    optimiser = accelerator.prepare(torch.optim.AdamW(groups, weight_decay=0.0))
    order = _order(len(texts), options.settings.seed)
    mean, began = math.nan, time.monotonic()
    for step in range(steps):
        factor = 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimiser.param_groups:
            group["lr"] = group["rate"] * factor
        weight = _HEADS_WEIGHT * min(1.0, (step + 1) / (steps * _RAMP))
        divergence, shares = 0.0, []
        for _ in range(min(_TEXTS, len(texts))):
            text = texts[next(order)]
            hidden, inner = pair.run(pair.new, text)
            apart = pair.divergence(text, hidden)
            loss, share = losses(arranged.batch(text, hidden, inner))
            accelerator.backward((apart + weight * loss) / _TEXTS)
            divergence += float(apart.detach()) / _TEXTS
            shares.append(share)
        if not math.isfinite(divergence):
            raise NumericError(f"the loss of step {step} is {divergence}: the target computes NaN or infinity")
        accelerator.clip_grad_norm_([each for group in groups for each in group["params"]], _CLIP)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        mean = divergence if math.isnan(mean) else 0.9 * mean + 0.1 * divergence
        if (step + 1) % _REPORT_STEPS == 0 or step + 1 == steps:
            top1, top5 = map(tuple, torch.stack(shares).mean(0).tolist())
            report(Report(step + 1, steps, mean, top1, top5, time.monotonic() - began))
    return mean


def _order(count: int, seed: int) -> Iterator[int]:
    """Places of texts, each once an epoch."""
    epoch = 0
    while True:
        yield from np.random.default_rng([seed, epoch]).permutation(count).tolist()
        epoch += 1
