"""`specedge train`: parses, makes one call, and prints; PyTorch is imported when a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from specedge.train.medusa import Report

__all__ = ["train"]


@click.group()
def train() -> None:
    """Train what drafts for a model."""


@train.command()
@click.argument("model")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="File of heads, .safetensors.")
@click.option(
    "--data",
    multiple=True,
    default=("self",),
    show_default=True,
    help="File of JSON lines (turns to answer, chats or texts), may be repeated; self[:N]: the model asks itself, "
    "for about N tokens of answers.",
)
@click.option("--heads", type=click.IntRange(1, 16), default=4, show_default=True)
@click.option("--width", type=int, default=640, show_default=True, help="Of a block inside; 0: the plain block.")
@click.option("--blocks", type=click.IntRange(1, 16), default=1, show_default=True)
@click.option("--chain/--no-chain", default=True, show_default=True, help="Heads read the token before their guess.")
@click.option("--inner/--no-inner", default=True, show_default=True, help="Heads read inner layers too.")
@click.option("--vocabulary", type=int, default=8192, show_default=True, help="Most frequent tokens only; 0: all.")
@click.option("--own", is_flag=True, help="A vocabulary matrix for each head.")
@click.option("--rank", type=int, default=0, help="A low-rank vocabulary matrix for each head, added to the model's.")
@click.option("--length", type=int, default=160, show_default=True, help="Most tokens of an answer.")
@click.option("--context", type=int, default=768, show_default=True, help="Most tokens of prompt and answer.")
@click.option(
    "--temperature", "temperatures", type=float, multiple=True, default=(0.0,), show_default=True,
    help="Of the answers; may be repeated: each prompt is answered once at each.",
)  # fmt: skip
@click.option("--tokens", type=click.IntRange(1), help="Enough answer tokens.  [default: every prompt is answered]")
@click.option("--rows", type=click.Path(path_type=Path), help="Folder for the model's rows.  [default: OUTPUT.rows]")
@click.option("--precision", default="int8", show_default=True, help="Of the file: float16 or int8.")
@click.option("--epochs", type=float, default=4.0, show_default=True)
@click.option("--batch", "segments", type=int, default=16, show_default=True, help="Pieces of 32 tokens in a step.")
@click.option("--learning-rate", type=float, default=2e-3, show_default=True)
@click.option("--soft", type=float, default=0.5, show_default=True, help="Share of the loss against the model's law.")
@click.option("--dropout", type=float, default=0.1, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--gradient-checkpointing", is_flag=True, help="Less memory, more time.")
@click.option(
    "--joint", type=click.Path(path_type=Path), help="Medusa-2: tune the model too; folder for the new model."
)
@click.option("--joint-steps", type=click.IntRange(1), default=200, show_default=True)
def medusa(model: str, output: Path, **chosen: Any) -> None:
    """Train Medusa heads for MODEL on its own answers.

    What the model gives is kept in a folder, and a training that was killed goes on where it was.
    """
    from specedge.runtime.errors import UsageError
    from specedge.runtime.progress import Phases
    from specedge.train.target import check_packages

    check_packages()
    from specedge.train.options import TrainOptions
    from specedge.train.run import train_medusa
    from specedge.train.settings import Settings

    names = ("epochs", "segments", "learning_rate", "soft", "dropout", "seed", "gradient_checkpointing")
    settings = Settings(**{name: chosen.pop(name) for name in names})
    joint, steps = chosen.pop("joint"), chosen.pop("joint_steps")
    if joint is not None and joint.exists():
        raise UsageError(f"{joint} exists already; give another folder for the new model")
    options = TrainOptions(**chosen, settings=settings)
    with Phases() as phases:
        done = train_medusa(model, output, options, progress=phases, report=_print)
    for head, row in enumerate(done.calibration.top, start=1):
        click.echo(f"head {head}: top-1 {row[0]:.3f}, top-5 {row[min(4, len(row) - 1)]:.3f}", err=True)
    tau = ", ".join(f"{nodes} nodes {done.calibration.expected(nodes):.2f}" for nodes in (3, 7, 15, 63))
    click.echo(f"expected tokens a pass: {tau}", err=True)
    click.echo(f"Done: {output} ({done.parameters / 1e6:.1f} M parameters, {done.train_tokens:,} tokens)", err=True)
    if joint is not None:
        from specedge.train.joint import train_joint

        with Phases() as phases:
            result = train_joint(model, output, joint, options, steps, progress=phases, report=_print)
        click.echo(f"Done: {joint}, perplexity {result.before:.3f} -> {result.after:.3f}", err=True)


def _print(report: Report) -> None:
    shares = "  ".join(f"{one:.2f}/{five:.2f}" for one, five in zip(report.top1, report.top5, strict=True))
    click.echo(
        f"step {report.step:,} of {report.steps:,}, {report.seconds:.0f} s: loss {report.loss:.4f}, "
        f"top-1/top-5 {shares}",
        err=True,
    )
