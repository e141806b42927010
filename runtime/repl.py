"""The conversation at a terminal: lines, commands, Ctrl-C and Ctrl-D."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO

from specedge.runtime.errors import PromptError, SpecEdgeError, UsageError
from specedge.runtime.events import Stats
from specedge.runtime.options import Options
from specedge.runtime.show import Reply, TextPrinter, interruptible, speak, stats_text
from specedge.runtime.terminal import clean, clean_line

__all__ = ["Conversation", "Repl", "history", "set_option"]

_PROMPT, _MORE, _QUOTES = ">>> ", "... ", '"""'
_HISTORY_LENGTH = 1000


class Conversation(Protocol):
    """What is needed of a Chat."""

    messages: list[dict[str, str]]
    options: Options
    system: str | None

    def send(self, text: str, **overrides: Any) -> Reply: ...

    def regenerate(self, **overrides: Any) -> Reply: ...

    def reset(self) -> None: ...

    def save(self, path: str | os.PathLike[str]) -> None: ...

    def load(self, path: str | os.PathLike[str]) -> None: ...


class Repl:
    """Reads lines and answers them until /exit or Ctrl-D.

    Args:
        chat: The conversation.
        methods: What `/set method` may name.
        out: Replies go here.
        err: Everything else goes here.
        read: Reads a line after showing a prompt, like `input`.
        stats: Print statistics after each reply.
        paint: Colour tokens by their origin.
    """

    def __init__(
        self,
        chat: Conversation,
        methods: Sequence[str],
        *,
        out: TextIO,
        err: TextIO,
        read: Callable[[str], str] = input,
        stats: bool = False,
        paint: bool = False,
    ) -> None:
        self._chat = chat
        self._methods = tuple(methods)
        self._out = out
        self._err = err
        self._read = read
        self._stats = stats
        self._paint = paint
        self._last: Stats | None = None
        self._leaving = False
        self._commands: dict[str, tuple[Callable[[str], None], str]] = {
            "help": (self._help, "show this list"),
            "reset": (self._reset, "forget the conversation; the system message stays"),
            "regen": (self._regen, "answer the last message again"),
            "system": (self._system, "TEXT: set the system message and start anew; without TEXT show it"),
            "set": (self._set, "NAME VALUE: change an option; without a name show all"),
            "stats": (self._show_stats, "show how the last reply went; on or off: after every reply"),
            "save": (self._save, "FILE: keep the conversation"),
            "load": (self._load, "FILE: take up a conversation that was kept"),
            "exit": (self._exit, "leave (also Ctrl-D)"),
        }

    def run(self) -> None:
        """Runs until the user leaves."""
        while not self._leaving:
            try:
                message = self._message()
                if message.strip():
                    self._handle(message)
            except KeyboardInterrupt:  # noqa: PERF203  a loop that lives on
                self._say("")
            except EOFError:
                self._say("")
                return
            except SpecEdgeError as error:
                self._say(f"Error: {clean_line(error)}{self._hint(error)}")

    def _message(self) -> str:
        """A line, or several between triple quotes."""
        line = self._read(_PROMPT)
        if not line.lstrip().startswith(_QUOTES):
            return line
        text = line.lstrip()[len(_QUOTES) :]
        while not text.rstrip().endswith(_QUOTES):
            text += "\n" + self._read(_MORE)
        return " " + text.rstrip()[: -len(_QUOTES)]  # a slash within quotes is no command

    def _handle(self, message: str) -> None:
        if not message.startswith("/"):
            self._answer(lambda: self._chat.send(message.strip()))
            return
        name, _, argument = message[1:].strip().partition(" ")
        if name not in self._commands:
            known = ", ".join(f"/{command}" for command in self._commands)
            raise UsageError(f"there is no command /{name}; the commands are {known}")
        self._commands[name][0](argument.strip())

    def _answer(self, start: Callable[[], Reply]) -> None:
        with interruptible() as stopped:
            finish = speak(start(), TextPrinter(self._out, self._paint), stopped)
        self._last = finish.stats
        for note in finish.stats.notes:
            self._say(f"Note: {clean_line(note)}")
        if finish.reason == "length":
            self._say("(cut: max_tokens or the context is used up)")
        if self._stats:
            self._say(stats_text(finish.stats))

    def _help(self, argument: str) -> None:
        self._say('A line is sent as it is; """ begins and ends a message of several lines.')
        self._say("Ctrl-C stops a reply and keeps what was said; at the prompt it clears the line.")
        for name, (_, what) in self._commands.items():
            self._say(f"  /{name:<7} {what}")

    def _reset(self, argument: str) -> None:
        self._chat.reset()
        self._say("The conversation starts anew.")

    def _regen(self, argument: str) -> None:
        self._answer(self._chat.regenerate)

    def _system(self, argument: str) -> None:
        if argument:
            self._chat.system = argument
            self._say("The conversation starts anew.")
        else:
            self._say(clean(self._chat.system or "no system message"))

    def _set(self, argument: str) -> None:
        name, _, value = argument.partition(" ")
        if name:
            self._chat.options = set_option(self._chat.options, name, value.strip(), self._methods)
        for item in dataclasses.fields(Options):
            if not name or item.name == name.replace("-", "_"):
                current = getattr(self._chat.options, item.name)
                self._say(f"  {item.name:<19} {clean_line(current)}")
        if not name:
            self._say(f"  Methods: {', '.join(self._methods)}")

    def _show_stats(self, argument: str) -> None:
        if argument in ("on", "off"):
            self._stats = argument == "on"
            self._say(f"Statistics after every reply: {argument}.")
        elif argument:
            raise UsageError(f"/stats {argument!r}: give on, off or nothing")
        else:
            self._say(stats_text(self._last) if self._last is not None else "there was no reply yet")

    def _save(self, argument: str) -> None:
        path = _path(argument, "save")
        self._chat.save(path)
        self._say(f"Kept in {clean_line(path)}.")

    def _load(self, argument: str) -> None:
        self._chat.load(_path(argument, "load"))
        for message in self._chat.messages:
            self._say(f"[{clean_line(message['role'])}] {clean(message['content'])}")

    def _exit(self, argument: str) -> None:
        self._leaving = True

    def _hint(self, error: SpecEdgeError) -> str:
        started = any(message["role"] == "assistant" for message in self._chat.messages)
        return " (/reset starts anew)" if isinstance(error, PromptError) and started else ""

    def _say(self, text: str) -> None:
        print(text, file=self._err, flush=True)


def set_option(options: Options, name: str, text: str, methods: Sequence[str]) -> Options:
    """Options with one changed, as `/set NAME TEXT` says.

    Raises:
        UsageError: An unknown name, or a value that does not fit.
    """
    key = name.replace("-", "_")
    kinds = {item.name: str(item.type) for item in dataclasses.fields(Options)}
    if key not in kinds:
        raise UsageError(f"there is no option {name!r}; the options are {', '.join(kinds)}")
    if not text and key != "stop":
        raise UsageError(f"/set {name}: give a value")
    value = _option_value(name, text, kinds[key])
    known = (*methods, *(["draft"] if any(method.startswith("draft:") for method in methods) else []))
    if key == "method" and value is not None and value not in known:
        raise UsageError(f"method is {value!r}: choose one of {', '.join(known)}")
    return dataclasses.replace(options, **{key: value})


def _option_value(name: str, text: str, kind: str) -> Any:
    # "none" is a method of its own, so the default method is asked for by another word.
    if "None" in kind and text.lower() in ("default",) + (() if "str" in kind else ("none",)):
        return None
    try:
        if kind.startswith("tuple"):
            return tuple(part.replace("\\n", "\n").replace("\\t", "\t") for part in shlex.split(text))
        if "int" in kind:
            return int(text)
        return float(text) if "float" in kind else text
    except ValueError:
        raise UsageError(f"{name} is {text!r}, which does not fit") from None


@contextmanager
def history(err: TextIO | None = None) -> Iterator[Callable[[str], str]]:
    """Gives a function like `input` with line editing and a history kept between sessions, where the system has it."""
    try:
        import readline
    except ImportError:  # Windows: its console edits lines itself
        yield _reader()
        return
    path = _state_folder() / "history"
    try:
        readline.read_history_file(path)
    except OSError:
        readline.clear_history()  # the first session, or a file that cannot be read
    readline.set_history_length(_HISTORY_LENGTH)
    try:
        yield _reader()
    finally:
        beside = path.with_name(f"history.{os.getpid()}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(beside)
            beside.chmod(0o600)
            beside.replace(path)
        except OSError as error:
            print(f"{path}: the history cannot be kept: {error.strerror}", file=err or sys.stderr)


def _reader() -> Callable[[str], str]:
    """`input`, whose prompt never mixes with replies that go elsewhere than the terminal."""
    if sys.stdout.isatty():
        return input

    def read(prompt: str) -> str:
        print(prompt, end="", file=sys.stderr, flush=True)
        return input()

    return read


def _state_folder() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "specedge"
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "specedge"


def _path(argument: str, command: str) -> Path:
    if not argument:
        raise UsageError(f"/{command}: give a file name")
    return Path(argument).expanduser()
