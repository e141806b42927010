"""`specedge tune`: measure a bundle on this device, or predict it for another."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specedge.runtime.errors import UsageError

if TYPE_CHECKING:
    from specedge.runtime.tune import Report

__all__ = ["tune"]

_MOST_PROMPTS = 24
_LONGEST_PROMPT = 512


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--prompts", type=click.Path(path_type=Path), help="JSON lines of prompts.  [default: ten of its own]")
@click.option("--threads", type=click.IntRange(1), help="Threads to compute with.")
@click.option("--device", help="Where to run, or whose tuning to predict from.  [default: what the bundle is for]")
@click.option("--out", type=click.Path(path_type=Path), help="Write the numbers as JSON here too.")
@click.option("--plot", "picture", type=click.Path(path_type=Path), help="Draw predicted against measured as PNG.")
@click.option(
    "--device-profile",
    "profile",
    help="Predict, do not measure: a device's name or a JSON file of its numbers; this: this machine.",
)
def tune(
    bundle: Path,
    prompts: Path | None,
    threads: int | None,
    device: str | None,
    out: Path | None,
    picture: Path | None,
    profile: str | None,
) -> None:
    """Measure BUNDLE on this device and keep in it what makes it fastest.

    Method auto begins with what was found, on devices of the same processor (or GPU) and number of threads.
    """
    import json

    from specedge.runtime.files import check_writable, write_bytes, write_text
    from specedge.runtime.plotting import check_plotting
    from specedge.runtime.providers import share_threads
    from specedge.runtime.show import show
    from specedge.runtime.tune import as_json
    from specedge.runtime.tune_report import plot, table

    if profile is not None and (prompts is not None or picture is not None):
        raise UsageError("--prompts and --plot go with a measurement; leave them out with --device-profile")
    for path in filter(None, (out, picture)):
        check_writable(path)
    if picture is not None:
        check_plotting()
    share_threads(threads)
    if profile is not None:
        from specedge.runtime.roofline_command import predict_for

        predict_for(bundle, profile, threads, out, device)
        return
    report, written = _measure(bundle, prompts, threads, device)
    show(table(report.tuning), sys.stdout)
    for warning in report.warnings:
        click.echo(f"Warning: {warning}", err=True)
    if picture is not None:
        write_bytes(picture, plot(report.tuning))
    if out is not None:
        write_text(out, json.dumps(as_json(report), indent=1) + "\n")
    click.echo(f"Written to {written}; method auto uses it from now on", err=True)


def _measure(bundle: Path, prompts: Path | None, threads: int | None, device: str | None) -> tuple[Report, Path]:
    from specedge.runtime.engine import Engine
    from specedge.runtime.progress import Phases
    from specedge.runtime.prompts import read_prompts
    from specedge.runtime.providers import default_threads
    from specedge.runtime.tune import tune as measure
    from specedge.runtime.tuning import check_tuning_writable, write_tuning
    from specedge.runtime.tuning_prompts import TUNING_PROMPTS

    asked = TUNING_PROMPTS if prompts is None else tuple(read_prompts(prompts, labelled=False))
    count = default_threads() if threads is None else threads
    with Engine(bundle, threads=threads, tuned=False, device=device) as engine, Phases() as phases:
        ids = [engine.text.chat_prompt([{"role": "user", "content": prompt.text}]) for prompt in asked]
        check_tuning_writable(engine.bundle, count, device)
        fitting = [each for each in ids if len(each) <= min(_LONGEST_PROMPT, engine.capacity // 2)][:_MOST_PROMPTS]
        if not fitting:
            raise UsageError(f"no prompt has at most {_LONGEST_PROMPT} tokens: give shorter ones")
        where = device or engine.manifest.device
        note = f"{engine.manifest.name} {engine.manifest.target.precision}, {where}, {count} threads"
        report = measure(engine, fitting, threads=count, note=note, progress=phases)
        return report, write_tuning(engine.bundle, report.tuning, device)
