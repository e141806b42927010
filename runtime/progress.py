"""Progress on stderr: bars in a terminal, one line a phase elsewhere."""

from __future__ import annotations

import logging
import sys
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from specedge.runtime.terminal import clean_line

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["Phases"]


class Phases:
    """Named phases, one after the other; an instance is called with (phase, done, total).

    Used with `with`. Log lines of the package that come meanwhile are printed between the bars.

    Args:
        out: Where to write; None is stderr.
        level: Log lines of at least this level are shown.
    """

    def __init__(self, out: TextIO | None = None, level: int = logging.INFO) -> None:
        self._out = sys.stderr if out is None else out
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._phase = ""
        self._started = 0.0
        self._handler = _Lines(self)
        self._handler.setLevel(level)
        self._level = level

    def __enter__(self) -> Phases:
        if self._out.isatty():
            self._bars = self._make_bars()
            self._bars.start()
        logger = logging.getLogger("specedge")
        self._before = (logger.level, logger.propagate)
        logger.setLevel(self._level)
        logger.propagate = False
        logger.addHandler(self._handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        logger = logging.getLogger("specedge")
        logger.removeHandler(self._handler)
        logger.level, logger.propagate = self._before
        if self._bars is not None:
            self._bars.stop()
        elif kind is None:
            self._end_phase()

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Shows that `done` of `total` are done of a phase."""
        phase = clean_line(phase)
        if self._bars is not None:
            if phase not in self._tasks:
                self._tasks[phase] = self._bars.add_task(phase, total=max(total, 1))
            finished = done >= total
            self._bars.update(self._tasks[phase], completed=max(total, 1) if finished else done, total=max(total, 1))
        elif phase != self._phase:
            self._end_phase()
            self._phase, self._started = phase, perf_counter()
            self.say(f"{phase} ...")

    def say(self, text: str) -> None:
        """Prints a line."""
        if self._bars is not None:
            self._bars.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._out, flush=True)

    def _end_phase(self) -> None:
        if self._phase:
            self.say(f"{self._phase}: {perf_counter() - self._started:.1f} s")
            self._phase = ""

    def _make_bars(self) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
        from rich.progress import TimeRemainingColumn as Left

        return Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            Left(),
            console=Console(file=self._out),
        )


class _Lines(logging.Handler):
    """Prints log records as plain lines."""

    def __init__(self, phases: Phases) -> None:
        super().__init__()
        self._phases = phases

    def emit(self, record: logging.LogRecord) -> None:
        self._phases.say(clean_line(record.getMessage()))
