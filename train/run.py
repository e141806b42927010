"""`specedge train medusa`: the target answers, the heads learn, a file of heads comes out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specedge import __version__
from specedge.export.calibration_texts import open_text
from specedge.export.checkpoint import Checkpoint
from specedge.export.head_trees import calibration_of
from specedge.export.heads_file import write_heads_file
from specedge.export.sources import resolve
from specedge.models import Dimensions, find_family, read_dimensions
from specedge.models.medusa import HeadsConfig
from specedge.runtime.calibration import HeadCalibration
from specedge.runtime.errors import StorageError, UsageError
from specedge.runtime.files import check_writable
from specedge.train.collect import collect, row_facts
from specedge.train.head_rows import HeadRows, frequent_tokens
from specedge.train.head_state import state_path
from specedge.train.medusa import Report, ranks, train_heads
from specedge.train.medusa_heads import MedusaHeads
from specedge.train.options import Progress, TrainOptions
from specedge.train.questions import Asked, of_prompts, read_questions
from specedge.train.self_questions import self_questions
from specedge.train.settings import Settings
from specedge.train.shards import Rows, RowStore
from specedge.train.target import check_packages

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["Prepared", "Trained", "make_accelerator", "prepare", "train_medusa", "write_trained"]

_log = logging.getLogger("specedge.train")
_QUESTION_ANSWER = 100  # tokens of an answer to a question of the target's own, about


@dataclass(frozen=True)
class Trained:
    """What came out.

    Attributes:
        loss: Of the last steps.
        calibration: On held-out answers.
        train_tokens, held_out_tokens: Rows trained on and held out.
        parameters: Of the heads.
    """

    loss: float
    calibration: HeadCalibration
    train_tokens: int
    held_out_tokens: int
    parameters: int


@dataclass(frozen=True)
class Prepared:
    """Everything that training needs.

    Attributes:
        checkpoint, sizes: The target.
        asked: What it was asked.
        store: What it gave.
        config: The heads.
    """

    checkpoint: Checkpoint
    sizes: Dimensions
    asked: Asked
    store: RowStore
    config: HeadsConfig

    def heads(self, guessed: torch.Tensor, settings: Settings) -> MedusaHeads:
        """New heads."""
        family, tensors = find_family(self.checkpoint.config.get("model_type")), self.checkpoint.tensors
        embedding = torch.from_numpy(tensors[family.embedding])[guessed]
        head = embedding if self.sizes.tied else torch.from_numpy(tensors[family.head])[guessed]
        return MedusaHeads(self.config, head, embedding, settings.seed, settings.dropout)

    def guessed(self, rows: Rows) -> torch.Tensor:
        """Ids of the tokens that heads guess: the most frequent in answers and prompts."""
        prompts = {each.number % self.asked.prompts: each.prompt for each in self.asked.questions}
        asked = torch.tensor([token for prompt in prompts.values() for token in prompt])
        return frequent_tokens([rows.tokens, asked], self.config.vocabulary, self.sizes.vocab_size)


def train_medusa(
    model: str,
    output: Path,
    options: TrainOptions,
    *,
    progress: Progress = lambda *_: None,
    report: Callable[[Report], None] = lambda _: None,
) -> Trained:
    """Trains heads for a model and writes them.

    Args:
        model: A folder, a hub id, a GGUF file or a built-in name.
        output: The file of heads.
        options: What to train, and on what.
        progress: Told of downloads and of the target's answers.
        report: Told how the training goes.

    Raises:
        UsageError: An option out of range, or data that is none.
        CheckpointError: The model cannot be read, or (UnsupportedModelError) no builder covers it.
        MissingExtraError: A package of the train extra is missing.
        StorageError: A file cannot be written.
    """
    accelerator = make_accelerator()
    output = check_writable(output)
    ready = prepare(model, output, options, accelerator, progress)
    rows = ready.store.load()
    guessed = ready.guessed(rows)
    heads = ready.heads(guessed, options.settings).to(accelerator.device)
    arranged = HeadRows(
        rows, ready.asked.prompts, ready.config.heads, guessed, ready.sizes.vocab_size, accelerator.device
    )
    arranged.check()
    state = state_path(output)
    facts = {"config": ready.config.to_json(), "rows": len(rows)}
    loss = train_heads(heads, arranged, options.settings, accelerator, state=state, facts=facts, progress=report)
    text = f"answers of {ready.checkpoint.name} to prompts that were held out"
    calibration = calibration_of(ranks(heads, arranged, accelerator), ready.config.listed, text)
    if accelerator.is_main_process:
        write_trained(output, heads, guessed, calibration, options.precision, ready.checkpoint.source)
        state.unlink(missing_ok=True)
    parameters = sum(parameter.numel() for parameter in heads.parameters())
    return Trained(loss, calibration, arranged.train_tokens, arranged.held_out_tokens, parameters)


def write_trained(
    path: Path, heads: MedusaHeads, guessed: torch.Tensor, calibration: HeadCalibration, precision: str, target: str
) -> None:
    """Writes heads as they stand, with what was measured of them and which target they are for."""
    write_heads_file(
        path,
        heads.config,
        {name: tensor.detach().float().cpu().numpy() for name, tensor in heads.named_tensors().items()},
        guessed.numpy() if heads.config.vocabulary else None,
        calibration,
        precision=precision,
        notes={"target": target, "specedge": __version__},
    )


def make_accelerator() -> Accelerator:
    """One CPU, one GPU, or as many as `accelerate launch` started.

    Raises:
        MissingExtraError: A package of the train extra is missing.
    """
    check_packages()
    from accelerate import Accelerator

    return Accelerator()


def prepare(model: str, output: Path, options: TrainOptions, accelerator: Accelerator, progress: Progress) -> Prepared:
    """Lets the target answer what it has not answered yet."""
    checkpoint = resolve(model, progress=progress)
    sizes = read_dimensions(find_family(checkpoint.config.get("model_type")), checkpoint.config)
    config = options.config(sizes)
    text, ends = open_text(checkpoint, sizes.vocab_size)
    folder = options.rows if options.rows is not None else output.with_name(f"{output.name}.rows")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder.parent}: cannot be made ({error.strerror}); give another folder") from None
    capacity = min(options.context, sizes.positions)
    seed, length = options.settings.seed, min(options.length, capacity // 2)
    tokens = options.tokens
    if options.self_tokens:
        tokens = options.self_tokens if tokens is None else tokens
        prompts = self_questions(
            checkpoint,
            text,
            -(-tokens // _QUESTION_ANSWER),
            folder.with_name(f"{folder.name}.questions.json"),
            ends=ends,
            seed=seed,
            device=accelerator.device,
            progress=progress,
        )
        asked = of_prompts(prompts, length=length, temperatures=options.temperatures)
    else:
        asked = read_questions(
            [Path(each) for each in options.data],
            text,
            length=length,
            capacity=capacity,
            temperatures=options.temperatures,
            ends=ends,
        )
        if asked.left_out:
            _log.info("%s lines are too long for a context of %s tokens and are left out", asked.left_out, capacity)
    facts = row_facts(checkpoint, asked.questions, config.taps, seed)
    store = RowStore(folder, facts, accelerator.process_index)
    collect(
        checkpoint,
        asked.questions,
        store,
        ends=ends,
        taps=config.taps,
        seed=seed,
        device=accelerator.device,
        share=(accelerator.process_index, accelerator.num_processes),
        tokens=tokens,
        progress=progress,
    )
    accelerator.wait_for_everyone()
    if not store.done():
        raise UsageError("the target answered nothing; give other data")
    return Prepared(checkpoint, sizes, asked, store, config)
