"""How replies, statistics and bundles look: text for people, JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from specedge.runtime.events import Event, Finish, Notice, Origin, Stats, Token
from specedge.runtime.terminal import TerminalFilter, clean_line

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from specedge.runtime.bundle import Bundle, GraphSpec, HeadsSpec, Manifest

__all__ = [
    "LEGEND",
    "JsonPrinter",
    "Reply",
    "TextPrinter",
    "bundle_json",
    "bundle_table",
    "export_summary",
    "interruptible",
    "megabytes",
    "show",
    "speak",
    "stats_json",
    "stats_text",
    "table",
]

_PAINT: Mapping[Origin, str] = {"draft": "\x1b[32m", "correction": "\x1b[31m", "bonus": "\x1b[36m"}
_PLAIN = "\x1b[0m"
_WIDE = 250
LEGEND = (
    f"{_PAINT['draft']}accepted draft{_PLAIN}  {_PAINT['correction']}correction{_PLAIN}  {_PAINT['bonus']}bonus{_PLAIN}"
)
"""What the colours of `--show-drafts` mean."""


class Reply(Protocol):
    """What is needed of a Generation."""

    @property
    def finish(self) -> Finish | None: ...

    def __iter__(self) -> Iterator[Event]: ...

    def close(self) -> None: ...


class TextPrinter:
    """Writes a reply's text while it comes, without anything that could steer the terminal.

    Args:
        out: Where to write.
        paint: Colour each token by its origin.
    """

    def __init__(self, out: TextIO, paint: bool = False) -> None:
        self._out = out
        self._paint = paint
        self._filter = TerminalFilter()
        self._last = ""

    def token(self, text: str, origin: Origin) -> None:
        """Writes the text of one token."""
        text = self._filter.push(text)
        if not text:
            return
        self._last = text[-1]
        self._out.write(f"{_PAINT[origin]}{text}{_PLAIN}" if self._paint else text)
        self._out.flush()

    def notice(self, text: str) -> None:
        """Writes nothing: what happened stands in the statistics' notes."""

    def finish(self, finish: Finish) -> None:
        """Ends the line."""
        if self._last != "\n":
            self._out.write("\n")
            self._out.flush()


class JsonPrinter:
    """Writes one event a line, as ASCII JSON."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def token(self, text: str, origin: Origin) -> None:
        """Writes a token event, if it has text."""
        if text:
            self._write({"event": "token", "text": text})

    def notice(self, text: str) -> None:
        """Writes a notice event."""
        self._write({"event": "notice", "text": text})

    def finish(self, finish: Finish) -> None:
        """Writes the finish event."""
        self._write(
            {
                "event": "finish",
                "finish_reason": finish.reason,
                "text": finish.text,
                "prompt_ids": list(finish.prompt_ids),
                "ids": list(finish.ids),
                "stats": stats_json(finish.stats),
            }
        )

    def _write(self, event: Mapping[str, Any]) -> None:
        self._out.write(json.dumps(event) + "\n")
        self._out.flush()


def speak(reply: Reply, printer: TextPrinter | JsonPrinter, stopped: Callable[[], bool] = lambda: False) -> Finish:
    """Prints a reply while it comes.

    Args:
        reply: The generation; it is closed at the end, whatever happens.
        printer: Writes it.
        stopped: Asked after each event whether to end the reply early.
    """
    said, broken = 0, False
    try:
        for event in reply:
            if isinstance(event, Token):
                said += len(event.text)
                printer.token(event.text, event.origin)
            elif isinstance(event, Notice):
                printer.notice(event.text)
            if stopped():
                break
    except OSError:
        broken = True  # there is nowhere to print to any more
        raise
    finally:
        reply.close()
        finish = reply.finish
        if finish is not None and not broken:
            printer.token(finish.text[said:], "bonus")
            printer.finish(finish)
    assert finish is not None, "a closed reply has its finish"
    return finish


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Within it, Ctrl-C is noted, not raised; a second one is raised. Gives a function that tells."""
    pressed = threading.Event()

    def note(signum: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def megabytes(size: int) -> str:
    """A size for people."""
    if size >= 1e9:
        return f"{size / 1e9:,.2f} GB"
    return f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1e3:,.1f} kB"


def show(renderable: RenderableType, out: TextIO) -> None:
    """Prints a table; lines are cut to a terminal's width only where there is a terminal."""
    from rich.console import Console

    Console(file=out, width=None if out.isatty() else _WIDE).print(renderable)


def stats_json(stats: Stats) -> dict[str, Any]:
    """Statistics with what is computed from them."""
    return {
        **dataclasses.asdict(stats),
        "tau": stats.tau,
        "alpha": stats.alpha,
        "tokens_per_second": stats.tokens_per_second,
        "discarded": stats.discarded,
        "speedup": stats.speedup,
    }


def stats_text(stats: Stats) -> str:
    """Statistics as a block of lines."""
    speed = f"{stats.tokens_per_second:.1f} tokens/s" if stats.tokens_per_second is not None else "-"
    tau = f"{stats.tau:.2f} tokens per pass of the target" if stats.tau is not None else "-"
    alpha = "-"
    if stats.alpha is not None:
        alpha = f"{stats.alpha:.2f} ({stats.accepted} accepted of {stats.evaluated} tested, {stats.proposed} drafted)"
    rows = [
        ("method", stats.method + ("" if stats.lossless else " (not lossless)")),
        ("first token", f"{stats.ttft_ms:.0f} ms ({stats.prefill_ms:.0f} ms prompt)"),
        ("speed", f"{speed} ({stats.tokens} tokens, {stats.passes} passes)"),
        ("τ", tau),
        ("α", alpha),
        *_drafting_rows(stats),
        ("time", f"draft {stats.draft_ms:.0f} ms, verify {stats.verify_ms:.0f} ms, host {stats.host_ms:.0f} ms"),
        ("prompt", f"{stats.prompt_tokens} tokens, {stats.cached_tokens} of them cached"),
        ("peak memory", megabytes(stats.peak_memory_bytes)),
        *(("note", clean_line(note)) for note in stats.notes),
    ]
    return "\n".join(f"  {name:<12} {value}" for name, value in rows)


def _drafting_rows(stats: Stats) -> Iterator[tuple[str, str]]:
    """What is said of drafting where there was any, of steps, and of the speed-up where it is known."""
    if stats.proposed:
        yield "rounds", ", ".join(f"{name} {count}" for name, count in stats.rounds.items())
        depths = " ".join(f"{stood / tested:.2f}" for tested, stood in stats.depths[:8])
        yield "by depth", f"{depths} stood ({stats.discarded} drafted tokens discarded)"
    if stats.step_ms is not None:
        middle, late, last = stats.step_ms
        yield "steps", f"{middle:.0f} ms between visible tokens (95 %: {late:.0f}, 99 %: {last:.0f})"
    known = [("measured", stats.speedup), ("expected", stats.forecast)]
    if any(value is not None for _, value in known):
        yield "speed-up", ", ".join(f"{value:.2f} × {name}" for name, value in known if value is not None)


def bundle_json(bundle: Bundle) -> dict[str, Any]:
    """What a bundle holds: its manifest, and what is computed from it."""
    manifest = bundle.manifest
    return {**dataclasses.asdict(manifest), "memory_bytes": manifest.memory_bytes, "size_bytes": _size(manifest)}


def bundle_table(bundle: Bundle) -> Table:
    """What a bundle holds, for people."""
    manifest = bundle.manifest
    rows = [
        ("model", f"{manifest.name}, family {manifest.family}, from {manifest.source}"),
        ("licence", manifest.license or "not stated"),
        ("made for", f"{manifest.device}, by SpecEdge {manifest.exporter or 'unknown'}"),
        ("target", _graph(manifest.target)),
        *((f"draft {name}", _graph(graph, manifest.vocab_size)) for name, graph in manifest.drafts.items()),
        *((f"heads {name}", _heads(heads)) for name, heads in manifest.heads.items()),
        ("standard graph", manifest.standard),
        ("capacity", f"{manifest.target.capacity:,} tokens"),
        ("vocabulary", f"{manifest.vocab_size:,} tokens; a reply ends at {_ids(manifest.eos_token_ids)}"),
        ("memory", f"about {megabytes(manifest.memory_bytes)} at work"),
        ("size", f"{megabytes(_size(manifest))} in {len(manifest.files)} files"),
        *((f"check {name}", value) for name, value in _checks(manifest.checks)),
        *((f"file {name}", f"{megabytes(item.size)}  {item.sha256[:16]}") for name, item in manifest.files.items()),
    ]
    return table(clean_line(bundle.folder), rows)


def export_summary(manifest: Manifest) -> Table:
    """What an export made, for people."""
    rows = [
        ("target", _graph(manifest.target)),
        *((f"draft {name}", _graph(graph, manifest.vocab_size)) for name, graph in manifest.drafts.items()),
        *((f"heads {name}", _heads(heads)) for name, heads in manifest.heads.items()),
        ("size", f"{megabytes(_size(manifest))} in {len(manifest.files)} files"),
        ("memory", f"about {megabytes(manifest.memory_bytes)} at work"),
        *((f"check {name}", value) for name, value in _checks(manifest.checks)),
    ]
    return table(f"{manifest.name} for {manifest.device}", rows)


def table(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """Names and values, one a line."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(clean_line(title)), show_header=False, box=None, pad_edge=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(clean_line(name)), Text(clean_line(value)))
    return table


def _graph(graph: GraphSpec, vocab_size: int | None = None) -> str:
    """A graph in a line; the width of its vocabulary where that is not `vocab_size`."""
    layers = f"{graph.layers} layers"
    if graph.cache_layers:
        layers = f"{graph.layers} of the target's layers {_spans(graph.cache_layers)}"
    parts = [
        f"{graph.file}: {graph.recipe or graph.precision}",
        layers,
        "tree mask" if graph.tree else "chains only",
        f"weights {megabytes(graph.weight_bytes)}",
        "in the target's cache" if graph.shares_cache else f"full cache {megabytes(graph.cache_bytes)}",
    ]
    if vocab_size not in (None, graph.vocab_size):
        parts.append(f"{graph.vocab_size:,} tokens")
    return ", ".join(parts)


def _heads(heads: HeadsSpec) -> str:
    """Heads in a line."""
    reads = "the token before and " * heads.chain + (f"layers {_spans(heads.taps)} and " if heads.taps else "")
    return (
        f"{heads.file}: {heads.recipe or heads.precision}, {heads.heads} heads of {heads.guesses} guesses among "
        f"{heads.vocabulary:,} tokens, reading {reads}the last row, weights {megabytes(heads.weight_bytes)} "
        f"(about {megabytes(2 * heads.weight_bytes)} at work)"
    )


def _spans(numbers: tuple[int, ...]) -> str:
    """Ascending numbers, runs of them shortened: "0-2 5 7-9"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return " ".join("-".join(map(str, span)) for span in spans)


def _ids(tokens: Iterable[int]) -> str:
    return ", ".join(map(str, tokens)) or "nothing"


def _size(manifest: Manifest) -> int:
    return sum(entry.size for entry in manifest.files.values())


def _checks(checks: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """A report of checks as lines: one for each object that holds values."""
    values = [f"{name} {_value(value)}" for name, value in checks.items() if not isinstance(value, Mapping)]
    if values:
        yield prefix or "report", ", ".join(values)
    for name, value in checks.items():
        if isinstance(value, Mapping):
            yield from _checks(value, f"{prefix}.{name}" if prefix else name)


def _value(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
