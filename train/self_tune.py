"""Moves a model off the grid of its file: a short full fine-tune on text that it wrote itself.

A checkpoint that was in 4 bits once (the built-in one, a GGUF file) makes drafts on that grid look
better than they are on a model that never was. Training every weight a little on the model's own
samples leaves its law nearly what it was (the expected gradient of the log-likelihood on a model's
own samples is zero; what moves the weights is the noise of the batch) and its weights between the
grid's values. Run it as

    python -m specedge.train.self_tune MODEL -o FOLDER

and export FOLDER like any checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from specedge.runtime.errors import MissingExtraError, SpecEdgeError, UsageError

__all__ = ["Settings", "main", "self_tune"]

_BATCH_OF_WRITING = 16
_CLIP = 1.0
_WARM_UP = 10


@dataclass(frozen=True)
class Settings:
    """How to tune.

    Attributes:
        texts: Sequences the model writes.
        length: Tokens of each.
        epochs: Times that each is trained on.
        batch: Sequences of a step.
        learning_rate: Of AdamW; about how far a weight moves in a step.
        seed: Of the samples and their order.
    """

    texts: int = 256
    length: int = 128
    epochs: int = 2
    batch: int = 8
    learning_rate: float = 1e-4
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("texts", "epochs", "batch"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}: give 1 or more")
        if self.length < 2:
            raise UsageError(f"length is {self.length}: give 2 or more")
        if not 0 < self.learning_rate < 1:
            raise UsageError(f"learning rate is {self.learning_rate}: give a number between 0 and 1")


def self_tune(
    model: str, output: Path, settings: Settings, progress: Callable[[str, int, int], None] = lambda *_: None
) -> dict[str, float]:
    """Tunes a model and writes it in Hugging Face layout, fp32.

    Args:
        model: A folder, a hub id, a GGUF file or a built-in name.
        output: Folder to write; it must not exist.
        settings: How.
        progress: Told of the phase, steps done and steps in all.

    Returns:
        "loss": mean loss of the last epoch, nats a token; "moved": mean |change| of a weight of the linear
        layers, in units of their standard deviation.

    Raises:
        UsageError: The model names no begin-of-text token.
        CheckpointError: The checkpoint cannot be read.
        MissingExtraError: A package of the train extra is missing.
        StorageError: The name is taken, or the disk refuses.
    """
    from specedge.export.sources import resolve
    from specedge.export.writer import check_name, staged
    from specedge.train.hf_folder import write_tokenizer

    _check_packages()
    check_name(output, force=False)
    checkpoint = resolve(model, progress=progress)
    network = _load(checkpoint.path)
    start = next(
        (token for token in (network.config.bos_token_id, network.config.eos_token_id) if token is not None), None
    )
    if not isinstance(start, int):
        raise UsageError(f"{model}: its config names no begin-of-text token to write from")
    texts = _write(network, start, settings, progress)
    before = _weights(network)
    loss = _train(network, texts, settings, progress)
    moved = _moved(before, network)
    with staged(output) as folder:
        network.save_pretrained(folder, safe_serialization=True)
        write_tokenizer(folder, checkpoint)
    return {"loss": loss, "moved": moved}


def _check_packages() -> None:
    import importlib.util

    for name in ("torch", "transformers", "accelerate"):
        if importlib.util.find_spec(name) is None:
            raise MissingExtraError(name, "train")


def _load(path: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    # the annotations of from_pretrained differ between transformers 4 and 5
    from_pretrained: Any = AutoModelForCausalLM.from_pretrained
    if path.is_file():
        network = from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
        # All of it is plain floats by now, and transformers does not save what it holds for quantised.
        network.hf_quantizer = None
        if hasattr(network.config, "quantization_config"):
            del network.config.quantization_config
        return network
    return from_pretrained(str(path), dtype=torch.float32, use_safetensors=True, local_files_only=True)


def _write(network: Any, start: int, settings: Settings, progress: Callable[[str, int, int], None]) -> Any:
    """[texts, length] token ids that the model samples at temperature 1; an end of text does not end them."""
    import torch

    torch.manual_seed(settings.seed)
    network.eval()
    parts = []
    for done in range(0, settings.texts, _BATCH_OF_WRITING):
        progress("write texts", done, settings.texts)
        count = min(_BATCH_OF_WRITING, settings.texts - done)
        ids = torch.full((count, 1), start)
        with torch.inference_mode():
            parts.append(
                network.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    repetition_penalty=1.0,
                    min_new_tokens=settings.length - 1,
                    max_new_tokens=settings.length - 1,
                    pad_token_id=start,
                )
            )
    progress("write texts", settings.texts, settings.texts)
    return torch.cat(parts).clone()


def _train(network: Any, texts: Any, settings: Settings, progress: Callable[[str, int, int], None]) -> float:
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator()
    optimiser: Any = torch.optim.AdamW(network.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    network, optimiser = accelerator.prepare(network, optimiser)
    network.train()
    batches = list(_batches(len(texts), settings))
    losses: list[float] = []
    for step, rows in enumerate(batches):
        progress("tune", step, len(batches))
        for group in optimiser.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, (step + 1) / _WARM_UP)
        batch = texts[list(rows)].to(accelerator.device)
        loss = network(input_ids=batch, labels=batch, use_cache=False).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(network.parameters(), _CLIP)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
    progress("tune", len(batches), len(batches))
    last = losses[-max(1, len(batches) // settings.epochs) :]
    return sum(last) / len(last)


def _batches(count: int, settings: Settings) -> Iterator[Sequence[int]]:
    """Rows of each step, in a new order every epoch."""
    import numpy as np

    random = np.random.default_rng(settings.seed)
    for _ in range(settings.epochs):
        order = random.permutation(count).tolist()
        yield from (order[first : first + settings.batch] for first in range(0, count, settings.batch))


def _weights(network: Any) -> dict[str, Any]:
    return {name: value.detach().clone() for name, value in network.named_parameters() if value.ndim == 2}


def _moved(before: dict[str, Any], network: Any) -> float:
    changes = [
        float((value.detach() - before[name]).abs().mean() / before[name].std())
        for name, value in network.named_parameters()
        if name in before
    ]
    return sum(changes) / len(changes)


@click.command()
@click.argument("model")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder to write.")
@click.option("--texts", default=Settings.texts, show_default=True)
@click.option("--length", default=Settings.length, show_default=True)
@click.option("--epochs", default=Settings.epochs, show_default=True)
@click.option("--batch", default=Settings.batch, show_default=True)
@click.option("--learning-rate", default=Settings.learning_rate, show_default=True)
@click.option("--seed", default=Settings.seed, show_default=True)
def main(model: str, output: Path, **chosen: Any) -> None:
    """Tune MODEL on its own text and write it to a folder, which specedge export takes."""
    try:
        result = self_tune(model, output, Settings(**chosen), _print_progress)
    except SpecEdgeError as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"{output}: loss {result['loss']:.3f}, weights moved by {result['moved']:.1%} of their spread", err=True)


def _print_progress(phase: str, done: int, total: int) -> None:
    if done * 10 // total != (done - 1) * 10 // total or done == total:
        click.echo(f"{phase}: {done:,} of {total:,}", err=True)


if __name__ == "__main__":
    main()
