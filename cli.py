"""The commands: each parses, makes one call into the library, and prints."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specedge import __version__
from specedge.runtime.errors import MissingExtraError, PromptError, SpecEdgeError, UsageError
from specedge.runtime.options import DEFAULT_DRAFT_LENGTH, Options
from specedge.runtime.reply_options import reply_options
from specedge.runtime.tune_command import tune
from specedge.train.command import train

if TYPE_CHECKING:
    from specedge.runtime.engine import Engine

__all__ = ["main"]

_INTERRUPTED = 130
_EXPORT_PACKAGES = ("onnx", "onnx_ir", "ml_dtypes", "safetensors", "gguf", "huggingface_hub")


class _Group(click.Group):
    """The one place where an error of the library becomes a line on stderr and an exit status."""

    def invoke(self, ctx: click.Context) -> Any:
        from specedge.runtime.terminal import clean_line

        try:
            return super().invoke(ctx)
        except UsageError as error:
            raise click.UsageError(clean_line(error)) from None
        except SpecEdgeError as error:
            raise click.ClickException(clean_line(error)) from None
        except BrokenPipeError:
            raise
        except OSError as error:
            _abandon_output()
            where = error.filename or "cannot write the output"
            raise click.ClickException(clean_line(f"{where}: {error.strerror or error}")) from None


def _abandon_output() -> None:
    """Lets nothing be flushed at exit to an output that refuses: it would fail once more, with a traceback."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_missing_streams() -> None:
    """A program started with a standard stream closed has None in its place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115  open until the end


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="specedge")
def main() -> None:
    """Exact speculative decoding for language models on edge devices.

    \b
    specedge export MODEL -o BUNDLE    turn a checkpoint into a bundle
    specedge chat BUNDLE               talk to it
    """
    _open_missing_streams()
    # What is logged while a reply streams is shown in its notes; a text that the terminal's
    # encoding lacks must not end the reply.
    logging.getLogger("specedge").addHandler(logging.NullHandler())
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


main.add_command(train)
main.add_command(tune)


@main.command()
@click.argument("model")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder of the bundle.")
@click.option(
    "--precision", help="A recipe: fp32, fp16, int8, int4:b32:sym+gptq … [default: fp32 on a CPU, fp16 elsewhere]"
)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or tensorrt.")
@click.option("--attention", help="gqa, onnx24 or plain.  [default: gqa; for TensorRT onnx24, on JetPack 6 take plain]")
@click.option("--draft-device", help="Where drafts run.  [default: where the model does]")
@click.option(
    "--draft",
    "drafts",
    multiple=True,
    help="self-RECIPE, layers-N[:RECIPE], MODEL[:RECIPE] or none; may be repeated.  [default: by device]",
)
@click.option(
    "--compensate",
    help="For recipes without: none, bias, scale, gptq, lowrank[:RANK], distill or auto, with + between.",
)
@click.option("--heads", help="File or folder of Medusa heads, or none.  [default: those shipped for a built-in model]")
@click.option("--heads-precision", help="fp32, int8, int4:b64:sym …  [default: int8; for TensorRT fp16]")
@click.option("--calibration", type=click.Path(path_type=Path), help="Folder to keep what calibration measures in.")
@click.option("--calibration-prompts", type=click.Path(path_type=Path), help="[default: what the target writes]")
@click.option("--seed", type=int, default=0, show_default=True, help="Of calibration and distillation.")
@click.option("--capacity", type=int, help="Most tokens of prompt and reply together.")
@click.option("--verify/--no-verify", default=True, show_default=True, help="Check what the bundle computes.")
@click.option("--revision", help="Revision of a hub model.")
@click.option("--offline", is_flag=True, help="Fetch nothing.")
@click.option("--force", is_flag=True, help="Replace a bundle of this name.")
def export(model: str, output: Path, **chosen: Any) -> None:
    """Turn MODEL into a bundle: a folder, a hub id, a GGUF file or a built-in name."""
    from specedge.runtime.progress import Phases
    from specedge.runtime.prompts import read_prompts
    from specedge.runtime.show import export_summary, show

    chosen["drafts"] = chosen["drafts"] or None
    if chosen["calibration_prompts"] is not None:
        chosen["calibration_prompts"] = tuple(read_prompts(chosen["calibration_prompts"], labelled=False))
    with Phases() as phases:
        manifest = _exporting(lambda pipeline: pipeline.export(model, output, pipeline.ExportOptions(**chosen), phases))
    show(export_summary(manifest), sys.stderr)
    click.echo(f"Done: {output}\nNext:  specedge chat {_quoted(output)}", err=True)


@main.command()
@click.argument("bundle")
@click.argument("prompt", required=False)
@reply_options
@click.option("--system", help="System message.")
@click.option("--stats", is_flag=True, help="Print statistics after each reply.")
@click.option("--show-drafts", is_flag=True, help="Colour each token: accepted draft, correction, bonus.")
@click.option("--json", "as_json", is_flag=True, help="One JSON event a line.")
@click.option("--threads", type=click.IntRange(1), help="Threads to compute with.")
@click.option("--device", help="Where to run.  [default: what the bundle was made for]")
@click.option("--memory-budget", type=click.IntRange(1), help="Most MB that models may take.  [default: what is free]")
def chat(
    bundle: str,
    prompt: str | None,
    system: str | None,
    stats: bool,
    show_drafts: bool,
    as_json: bool,
    threads: int | None,
    device: str | None,
    memory_budget: int | None,
    **chosen: Any,
) -> None:
    """Talk to BUNDLE, a folder or the name of a built-in model.

    With PROMPT, or a prompt on standard input, it answers once.
    """
    from specedge.runtime.providers import share_threads

    options = Options(**chosen)
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.buffer.read().decode("utf-8", errors="replace")
    if prompt is not None and not prompt.strip():
        raise PromptError("the prompt is empty: give it some text")
    if prompt is None and as_json:
        raise UsageError("--json needs a prompt: give one after the bundle, or on standard input")
    share_threads(threads)
    budget = None if memory_budget is None else memory_budget * 1_000_000
    engine = _open(bundle, threads, device=device, memory_budget=budget)
    try:
        _converse(engine, prompt, system, options, stats=stats, show_drafts=show_drafts, as_json=as_json)
    finally:
        engine.close()


def _converse(
    engine: Engine,
    prompt: str | None,
    system: str | None,
    options: Options,
    *,
    stats: bool,
    show_drafts: bool,
    as_json: bool,
) -> None:
    """One reply, or the conversation at the terminal."""
    from specedge.runtime.show import LEGEND, JsonPrinter, TextPrinter, interruptible, speak, stats_text

    engine.resolve_method(options.method)
    conversation = engine.chat(system, options)
    paint = show_drafts and sys.stdout.isatty() and not as_json
    if paint:
        click.echo(LEGEND, err=True)
    elif show_drafts and not as_json:
        click.echo("--show-drafts: standard output is no terminal, so there are no colours", err=True)
    for note in engine.text.notes:
        click.echo(f"Note: {note}", err=True)
    if engine.tuning is not None and not as_json:
        click.echo(f"Tuned for this device: {engine.tuning.note}", err=True)
    if prompt is None:
        _talk(engine, conversation, stats=stats, paint=paint)
        return
    printer = JsonPrinter(sys.stdout) if as_json else TextPrinter(sys.stdout, paint)
    with interruptible() as stopped:
        finish = speak(conversation.send(prompt), printer, stopped)
    if stats:
        click.echo(stats_text(finish.stats), err=True)
    else:
        for note in finish.stats.notes:
            click.echo(f"Note: {note}", err=True)
    if finish.reason == "cancelled":
        sys.exit(_INTERRUPTED)


def _talk(engine: Engine, conversation: Any, *, stats: bool, paint: bool) -> None:
    from specedge.runtime.repl import Repl, history
    from specedge.runtime.terminal import clean_line

    click.echo(f"{clean_line(engine.manifest.name)}: /help lists the commands, Ctrl-D leaves", err=True)
    with history() as read:
        Repl(conversation, engine.methods, out=sys.stdout, err=sys.stderr, read=read, stats=stats, paint=paint).run()


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--prompts", required=True, type=click.Path(path_type=Path), help="JSON lines of prompts.")
@click.option("--methods", help="Names with commas between.  [default: all the bundle holds]")
@click.option(
    "--baseline", "baselines", multiple=True, type=click.Path(path_type=Path), help="Other bundle to compare."
)
@click.option("--limit", type=click.IntRange(1), help="Prompts of each category.")
@click.option("--max-tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option("--draft-length", type=int, default=DEFAULT_DRAFT_LENGTH, show_default=True)
@click.option("--threads", type=click.IntRange(1), help="Threads to compute with.")
@click.option("--device", help="Where to run.  [default: what the bundle was made for]")
@click.option("--out", type=click.Path(path_type=Path), help="Write the result as JSON.")
def bench(bundle: Path, prompts: Path, methods: str | None, out: Path | None, **chosen: Any) -> None:
    """Compare every method of BUNDLE with plain decoding."""
    from specedge.runtime import bench as benchmark
    from specedge.runtime.files import check_writable
    from specedge.runtime.progress import Phases
    from specedge.runtime.providers import share_threads
    from specedge.runtime.show import show

    share_threads(chosen["threads"])
    if out is not None:
        check_writable(out)
    names = [name.strip() for name in methods.split(",") if name.strip()] if methods is not None else None
    with Phases() as phases:
        result = benchmark.run(
            bundle,
            prompts,
            methods=names,
            progress=lambda done, total, contender: phases("answers", done, total),
            **chosen,
        )
    show(benchmark.table(result), sys.stdout)
    if out is not None:
        benchmark.write_result(result, out)
        click.echo(f"Written to {out}", err=True)


@main.command("compare-compensation")
@click.argument("model")
@click.option("--prompts", required=True, type=click.Path(path_type=Path), help="JSON lines of prompts to measure on.")
@click.option("--formats", help="Number formats, with commas between.  [default: all]")
@click.option("--methods", help="Compensations, with commas between: none,gptq,scale+gptq.  [default: eight]")
@click.option("--precision", help="Of the target.  [default: fp32]")
@click.option("--calibration-prompts", type=click.Path(path_type=Path), help="[default: what the target writes]")
@click.option("--calibration", type=click.Path(path_type=Path), help="Folder to keep what calibration measures in.")
@click.option("--limit", "count", type=click.IntRange(1), default=48, show_default=True, help="Prompts in all.")
@click.option("--max-tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option(
    "--time-best", type=click.IntRange(0), default=4, show_default=True, help="Drafts to time as they decode."
)
@click.option("--threads", type=click.IntRange(1), help="Threads to compute with.")
@click.option("--revision", help="Revision of a hub model.")
@click.option("--offline", is_flag=True, help="Fetch nothing.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the result as JSON, draft by draft.")
@click.option("--plot", "picture", type=click.Path(path_type=Path), help="Draw it as PNG.")
def compare_compensation(model: str, prompts: Path, out: Path | None, picture: Path | None, **chosen: Any) -> None:
    """Compare drafts of MODEL: every number format with every compensation."""
    from specedge.runtime.bench import run, write_result
    from specedge.runtime.files import check_writable, write_bytes
    from specedge.runtime.plotting import check_plotting
    from specedge.runtime.progress import Phases
    from specedge.runtime.prompts import read_prompts
    from specedge.runtime.providers import share_threads
    from specedge.runtime.show import show

    for path in filter(None, (out, picture)):
        check_writable(path)
    if out is not None and picture is not None and out.resolve() == picture.resolve():
        raise click.UsageError(f"{out}: --out and --plot name one file; give two")
    for name in ("formats", "methods"):
        if chosen[name] is not None:
            chosen[name] = tuple(part.strip() for part in chosen[name].split(",") if part.strip())
    if chosen["calibration_prompts"] is not None:
        chosen["calibration_prompts"] = tuple(read_prompts(chosen["calibration_prompts"], labelled=False))
    asked = read_prompts(prompts)
    share_threads(chosen["threads"])

    def work(_: Any) -> Any:
        from specedge.export import compare, compare_report

        if picture is not None:
            check_plotting()
        options = compare.CompareOptions(**{name: value for name, value in chosen.items() if value is not None})
        with Phases() as phases:
            save = partial(write_result, path=out) if out is not None else lambda result: None
            return compare.compare(model, asked, options, timer=run, progress=phases, save=save), compare_report

    result, report = _exporting(work)
    show(report.table(result), sys.stdout)
    if picture is not None:
        write_bytes(picture, report.plot(result))
    for path in filter(None, (out, picture)):
        click.echo(f"Written to {path}", err=True)


@main.command()
@click.argument("bundle", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def doctor(bundle: Path | None, as_json: bool) -> None:
    """Show what this machine has, what fits together, and what to do where it does not.

    With BUNDLE also on which execution provider the nodes of its graphs land.
    """
    from specedge.runtime.doctor import examine, report_json, report_table
    from specedge.runtime.show import show

    report = examine(bundle)
    if as_json:
        click.echo(json.dumps(report_json(report), indent=2))
    else:
        show(report_table(report), sys.stdout)


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def inspect(bundle: Path, as_json: bool) -> None:
    """Show what BUNDLE holds, and check every file's hash."""
    from specedge.runtime.bundle import open_bundle
    from specedge.runtime.progress import Phases
    from specedge.runtime.show import bundle_json, bundle_table, show

    opened = open_bundle(bundle)
    if as_json:
        click.echo(json.dumps(bundle_json(opened), indent=2))
    else:
        show(bundle_table(opened), sys.stdout)
    total = sum(entry.size for entry in opened.manifest.files.values())
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        phases("hashes", done, total)

    with Phases() as phases:
        opened.verify(advance)
    click.echo(f"All {len(opened.manifest.files)} files are whole.", err=True)


def _open(bundle: str, threads: int | None, **chosen: Any) -> Engine:
    """An engine for a bundle's folder, or for a built-in model, which is exported on first use."""
    from specedge.runtime.engine import Engine

    path = Path(bundle)
    if not path.exists() and path.name == bundle:
        from specedge.runtime.progress import Phases

        with Phases() as phases:
            path = _exporting(lambda pipeline: pipeline.bundle_for(bundle, phases))
    return Engine(path, threads=threads, **chosen)


def _exporting(work: Callable[[Any], Any]) -> Any:
    """Calls into the export room, whose packages may be missing."""
    try:
        from specedge.export import pipeline

        return work(pipeline)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXPORT_PACKAGES:
            raise
        raise MissingExtraError(package, "export") from None


def _quoted(path: Path) -> str:
    import shlex

    return shlex.quote(str(path))
