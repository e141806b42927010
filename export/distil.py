"""What is still free in a rounded model learns to agree with the target, on text that the target wrote.

Speculative sampling accepts a token with probability sum_x min(p(x), q(x)) = 1 - TV(p, q), and
greedy decoding where the likeliest tokens of p and q are one (arXiv 2211.17192). Both follow the
divergence that is minimised here,

    KL(p || q) = sum_x p(x) (log p(x) - log q(x)),

the mean over all positions that predict a token of an answer: p the target's law, q the draft's,
at temperature 1, with the draft's weights and activations rounded as its operators round them
(knowledge distillation, arXiv 1503.02531). What moves are the scales and shifts of the weights'
groups, norms, biases and low-rank factors: a draft of the same size and speed.

A tenth of the texts is held out. What is returned is the state with the least divergence on
them, and that is the state that was given if nothing was better.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specedge.export.checkpoint import ReplacedTensors, Tensors
from specedge.export.texts import Text
from specedge.export.torch_decoder import NORM, TorchDecoder, plain_layers
from specedge.export.torch_layer import BIAS, DOWN, SCALE, SHIFT, UP, TorchLayer, fast_dtype
from specedge.models import Dimensions, Family
from specedge.quant.formats import Format
from specedge.quant.layer import Layer
from specedge.runtime.errors import MissingExtraError, NumericError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FREE", "RATES", "Distilled", "Settings", "Teacher", "distil"]

Matrix = NDArray[np.float32]

FREE = (SCALE, SHIFT, NORM, BIAS, DOWN, UP)
"""What costs nothing at run time."""

RATES: Mapping[str, float] = {SCALE: 2e-3, SHIFT: 2e-2, NORM: 1e-3, BIAS: 2e-4, DOWN: 1e-4, UP: 1e-4}
"""How far a number moves in a step, about, in a draft of 4 bits: scales and norms in shares of themselves, shifts
in units of the scale."""

_FINE = 0.25  # of these rates where all weights have 8 bits: less was rounded away
_WARM_UP = 4
_LAST_RATE = 0.05
_CHECKS = 6
_SLOWER = 0.25
_HELD_OUT = 10
_BETAS = (0.9, 0.95)
_LOGIT_ROWS = 256  # rows of logits at a time where nothing is differentiated


@dataclass(frozen=True)
class Settings:
    """How to distil.

    Attributes:
        steps: Steps of Adam.
        batch: Texts of a step.
        seconds: When to stop if the steps are not done by then; what comes out then depends on the
            machine's speed. None: never.
        seed: Of the held-out tenth and of the order of the others.
        rates: Learning rates, for what is free.
        free: What is free.
        bfloat16: Whether products are computed in bfloat16 while training; None: where the processor can.
    """

    steps: int = 40
    batch: int = 4
    seconds: float | None = None
    seed: int = 0
    rates: Mapping[str, float] = field(default_factory=lambda: RATES)
    free: Collection[str] = FREE
    bfloat16: bool | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} of the distillation is {getattr(self, name)}: give 1 or more")
        unknown = set(self.free) - set(RATES)
        if unknown:
            raise ValueError(f"nothing is called {sorted(unknown)}: there are {', '.join(RATES)}")


@dataclass(frozen=True)
class Teacher:
    """The target, in fp32."""

    family: Family
    sizes: Dimensions
    tensors: Tensors


@dataclass(frozen=True)
class Distilled:
    """What came out.

    Attributes:
        norms: Norms that changed, by tensor name.
        layers: All layers.
        before, after: Mean KL(p || q) over the held-out answers, nats a token.
        steps: Steps done; fewer than were asked for where time ran out.
    """

    norms: dict[str, Matrix]
    layers: dict[str, Layer]
    before: float
    after: float
    steps: int


def distil(
    family: Family,
    sizes: Dimensions,
    form: Format,
    tensors: Tensors,
    layers: Mapping[str, Layer],
    texts: Sequence[Text],
    *,
    teacher: Teacher,
    settings: Settings | None = None,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Distilled:
    """Distils a target into a rounded draft: its own copy, some of its layers, or another model with its tokens.

    Args:
        family, sizes: What the draft is.
        form: The draft's number format.
        tensors: The draft's, of which the norms are read (where scales were folded into them, they are others).
        layers: The draft's, by the names they are stored under.
        texts: What the target wrote; at least two.
        teacher: The target.
        settings: How; None: the defaults.
        progress: Told of steps done and steps in all.

    Raises:
        MissingExtraError: PyTorch is not installed.
        UsageError: There are fewer than two texts, or one without prompt or answer.
        NumericError: A model computes NaN or infinity.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError("torch", "train")
    settings = settings or Settings()
    _check(texts)
    learnt, held_out = _split(texts, settings.seed)
    models = _Models(family, sizes, form, tensors, teacher)
    tests = [_Batch.of(held_out[first : first + settings.batch]) for first in range(0, len(held_out), settings.batch)]
    return _train(models, _Judge(models, tests), layers, _batches(learnt, settings), settings, progress)


@dataclass(frozen=True)
class _Models:
    """Makes both models, from the arguments of `distil`."""

    family: Family
    sizes: Dimensions
    form: Format
    tensors: Tensors
    target: Teacher

    def teacher(self, dtype: Any = None) -> TorchDecoder:
        """The target; products are computed in `dtype`."""
        family, sizes, tensors = self.target.family, self.target.sizes, self.target.tensors
        layers = {name: TorchLayer(layer, dtype=dtype) for name, layer in plain_layers(family, sizes, tensors).items()}
        return TorchDecoder.build(family, sizes, tensors, layers)

    def draft(self, norms: Mapping[str, Matrix], layers: Mapping[str, Layer]) -> TorchDecoder:
        """The draft as it would be stored, in fp32."""
        made = {name: TorchLayer(layer, self.form) for name, layer in layers.items()}
        return TorchDecoder.build(self.family, self.sizes, ReplacedTensors(self.tensors, norms), made)

    def student(self, layers: Mapping[str, Layer], free: Collection[str], dtype: Any) -> TorchDecoder:
        """The draft with its free numbers."""
        made = {name: TorchLayer(layer, self.form, free=free, dtype=dtype) for name, layer in layers.items()}
        return TorchDecoder.build(self.family, self.sizes, self.tensors, made, free_norms=NORM in free)


@dataclass(frozen=True)
class _Batch:
    """Texts side by side.

    Attributes:
        ids: [B, S], filled up after the shorter ones: no row sees what comes later.
        rows: Which of the B * S rows give a token of an answer.
    """

    ids: Tensor
    rows: Tensor

    @classmethod
    def of(cls, texts: Sequence[Text]) -> _Batch:
        import torch

        length = max(len(text.tokens) for text in texts) - 1
        ids = np.zeros((len(texts), length), np.int64)
        rows: list[int] = []
        for number, text in enumerate(texts):
            ids[number, : len(text.tokens) - 1] = text.tokens[:-1]
            first = number * length + len(text.prompt) - 1
            rows += range(first, first + len(text.answer))
        return cls(torch.from_numpy(ids), torch.tensor(rows))

    def hidden(self, model: TorchDecoder) -> Tensor:
        """A model's last rows before the tokens of the answers, [n, hidden]."""
        return model.hidden(self.ids).flatten(0, 1)[self.rows]


class _Judge:
    """How far a draft is from the target on the texts held out."""

    def __init__(self, models: _Models, tests: Sequence[_Batch]) -> None:
        import torch

        teacher = models.teacher()
        self._models, self._tests, self._logits = models, tests, teacher.head.apply
        with torch.no_grad():
            self._hidden = [test.hidden(teacher) for test in tests]

    def score(self, norms: Mapping[str, Matrix], layers: Mapping[str, Layer]) -> float:
        """Mean KL(p || q) of a draft as it would be stored."""
        import torch

        draft = self._models.draft(norms, layers)
        total, count = 0.0, 0
        with torch.no_grad():
            for test, wanted in zip(self._tests, self._hidden, strict=True):
                given = test.hidden(draft)
                for first in range(0, len(given), _LOGIT_ROWS):
                    part = slice(first, first + _LOGIT_ROWS)
                    divergence = _divergence(self._logits(wanted[part]), draft.logits(given[part]))
                    total += float(divergence) * len(given[part])
                count += len(given)
        if not math.isfinite(total):
            raise NumericError("the target or its draft computes NaN or infinity, so nothing can be distilled")
        return total / count


def _train(
    models: _Models,
    judge: _Judge,
    layers: Mapping[str, Layer],
    batches: Iterator[_Batch],
    settings: Settings,
    progress: Callable[[int, int], None],
) -> Distilled:
    start = time.monotonic()
    before = judge.score({}, layers)
    best = Distilled({}, dict(layers), before, before, 0)
    dtype = _dtype(settings)
    teacher, student = models.teacher(dtype), models.student(layers, settings.free, dtype)
    optimiser = _Optimiser(student, settings)
    checks = {round(settings.steps * number / _CHECKS) for number in range(1, _CHECKS + 1)}
    done, ended = 0, False
    while not ended:
        progress(done, settings.steps)
        spent = 0.0 if settings.seconds is None else (time.monotonic() - start) / settings.seconds
        optimiser.step(_loss(teacher, student, next(batches)), max(done / settings.steps, spent))
        done += 1
        ended = done == settings.steps or spent >= 1
        if ended or done in checks:
            norms, new = _results(student)
            after = judge.score(norms, new)
            if after < best.after:
                best = Distilled(norms, new, before, after, done)
                optimiser.keep()
            else:
                optimiser.go_back()
    progress(settings.steps, settings.steps)
    return best


def _loss(teacher: TorchDecoder, student: TorchDecoder, batch: _Batch) -> Tensor:
    import torch

    with torch.no_grad():
        wanted = teacher.logits(batch.hidden(teacher))
    return _divergence(wanted, student.logits(batch.hidden(student)))


class _Optimiser:
    """Adam, whose rates fall by half a cosine, and which starts again, more slowly, from the best state so far.

    How large a step is right depends on how much was rounded away, by 4 bits or by 8; too large a
    one costs the steps up to the next check.
    """

    def __init__(self, student: TorchDecoder, settings: Settings) -> None:
        import torch

        pace = 1.0 if any(layer.bits < 8 for layer in student.layers.values()) else _FINE
        groups = [{"params": numbers, "rate": settings.rates[kind] * pace} for kind, numbers in student.free.items()]
        if not groups:
            raise UsageError("the draft has nothing that distillation could change; export it in a rounded format")
        self._adam: Any = torch.optim.Adam(groups, betas=_BETAS)
        self._numbers: list[Tensor] = [tensor for numbers in student.free.values() for tensor in numbers]
        self._share, self._since = 1.0, 0
        self.keep()

    def step(self, loss: Tensor, spent: float) -> None:
        """One step; `spent`: how much of the time is over, 0 to 1."""
        import torch

        self._since += 1
        fall = _LAST_RATE + (1 - _LAST_RATE) * (1 + math.cos(math.pi * min(spent, 1.0))) / 2
        for group in self._adam.param_groups:
            group["lr"] = group["rate"] * self._share * fall * min(1.0, self._since / _WARM_UP)
        self._adam.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        self._adam.step()

    def keep(self) -> None:
        """This state is the best so far."""
        self._best = [numbers.detach().clone() for numbers in self._numbers]

    def go_back(self) -> None:
        """To the best state so far, and on from there with smaller steps."""
        import torch

        with torch.no_grad():
            for numbers, best in zip(self._numbers, self._best, strict=True):
                numbers.copy_(best)
        self._adam.state.clear()
        self._share, self._since = self._share * _SLOWER, 0


def _dtype(settings: Settings) -> Any:
    """bfloat16 where the processor multiplies it: a third of the time, and gradients as good."""
    import torch

    if settings.bfloat16 is None:
        return fast_dtype(torch.device("cpu"))
    return torch.bfloat16 if settings.bfloat16 else torch.float32


def _divergence(wanted: Tensor, given: Tensor) -> Tensor:
    """Mean KL(p || q) of rows of logits, [n, vocab] each; over the tokens of both, where one is padded wider."""
    from torch.nn.functional import kl_div

    common = min(wanted.shape[-1], given.shape[-1])
    wanted, given = wanted[:, :common], given[:, :common]
    return kl_div(given.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="batchmean")


def _results(student: TorchDecoder) -> tuple[dict[str, Matrix], dict[str, Layer]]:
    norms = {name: student.norm(name).detach().numpy().copy() for name in student.free_norms}
    return norms, {name: layer.result() for name, layer in student.layers.items()}


def _batches(texts: Sequence[Text], settings: Settings) -> Iterator[_Batch]:
    """Batches without end, in a new order each time through."""
    random = np.random.default_rng(settings.seed)
    while True:
        order = random.permutation(len(texts)).tolist()
        for first in range(0, len(order), settings.batch):
            yield _Batch.of([texts[number] for number in order[first : first + settings.batch]])


def _split(texts: Sequence[Text], seed: int) -> tuple[list[Text], list[Text]]:
    """The texts to learn from, and the tenth held out."""
    order = np.random.default_rng(seed).permutation(len(texts)).tolist()
    count = max(1, len(texts) // _HELD_OUT)
    return [texts[number] for number in order[count:]], [texts[number] for number in order[:count]]


def _check(texts: Sequence[Text]) -> None:
    if len(texts) < 2:
        raise UsageError(f"{len(texts)} texts to distil on: give at least 2, of which one is held out")
    for number, text in enumerate(texts, start=1):
        if not text.prompt or not text.answer:
            raise UsageError(f"text {number}: its {'prompt' if not text.prompt else 'answer'} is empty; leave it out")
