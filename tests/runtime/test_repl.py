"""The conversation at a terminal: commands, several lines, Ctrl-C and Ctrl-D, once also on a real pseudo-terminal."""

from __future__ import annotations

import io
import os
import re
import select
import sys
import time
from pathlib import Path

import pytest

from specedge.runtime.errors import UsageError
from specedge.runtime.options import Options
from specedge.runtime.repl import Repl, history, set_option
from specedge.tests.runtime.fake_chat import FakeChat

METHODS = ("none", "draft:self-int4", "ngram")


def talk(*lines, chat=None, **options):
    """What a session with these lines prints: (replies, everything else)."""
    script = iter(lines)

    def read(prompt):
        line = next(script, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    chat = chat if chat is not None else FakeChat()
    out, err = io.StringIO(), io.StringIO()
    Repl(chat, METHODS, out=out, err=err, read=read, **options).run()
    return out.getvalue(), err.getvalue()


def test_lines_are_answered_until_the_end():
    assert talk("hello you", "", "   ", "again") == ("<hello> <you> \n<again> \n", "\n")


def test_exit_leaves_at_once():
    assert talk("/exit", "never") == ("", "")


def test_several_lines_between_quotes():
    chat = FakeChat()
    talk('"""one', " two ", 'three"""', '"""/help"""', '""" a """', chat=chat)
    assert [m["content"] for m in chat.messages[::2]] == ["one\n two \nthree", "/help", "a"]


def test_ctrl_c_at_the_prompt_clears_the_line_and_what_was_begun():
    chat = FakeChat()
    talk(KeyboardInterrupt(), '"""begun', KeyboardInterrupt(), "next", chat=chat)
    assert [m["content"] for m in chat.messages] == ["next", "<next> "]


def test_the_end_within_quotes_leaves():
    assert talk('"""begun')[0] == ""


def test_help_names_every_command():
    err = talk("/help")[1]
    for command in ("/help", "/reset", "/regen", "/system", "/set", "/stats", "/save", "/load", "/exit"):
        assert command in err


@pytest.mark.parametrize("line", ["/nothing", "/", "/usr/bin"])
def test_unknown_commands_list_the_known(line):
    out, err = talk(line, "on")
    assert out == "<on> \n" and "Error" in err and "/reset, /regen" in err


def test_reset_system_and_regenerate():
    chat = FakeChat()
    out, err = talk("/regen", "/system", "/system Be\tbrief", "/system", "one", "/regen", "/reset", chat=chat)
    assert out == "<one> \n<one> \n"
    assert "nothing to answer again" in err and "no system message" in err and "Be\tbrief" in err
    assert chat.messages == [] and chat.system == "Be\tbrief"


def test_options_are_shown_changed_and_checked():
    chat = FakeChat()
    err = talk("/set", chat=chat)[1]
    assert all(name in err for name in Options.__dataclass_fields__) and "draft:self-int4" in err
    err = talk("/set temperature 0.7", "/set top-k 5", "/set temperature -1", "/set nothing 1", "/set seed", chat=chat)[
        1
    ]
    assert chat.options.temperature == 0.7 and chat.options.top_k == 5
    assert err.count("Error") == 3 and "give a number from 0.0" in err and "there is no option 'nothing'" in err


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("method", "draft", "draft"),
        ("method", "none", "none"),
        ("method", "default", None),
        ("seed", "none", None),
        ("seed", "17", 17),
        ("max-tokens", "none", None),
        ("accept", "rejection", "rejection"),
        ("top_p", "0.9", 0.9),
        ("stop", '"\\né:" end', ("\né:", "end")),
        ("stop", "'é好'", ("é好",)),
        ("stop", "", ()),
    ],
)
def test_option_values(name, text, value):
    assert getattr(set_option(Options(), name, text, METHODS), name.replace("-", "_")) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [("method", "magic"), ("seed", "x"), ("temperature", "nan"), ("top_k", "1.5"), ("stop", '"open'), ("accept", "all"),
     ("draft_length", "0"), ("temperature", "none")],
)  # fmt: skip
def test_bad_option_values(name, text):
    with pytest.raises(UsageError):
        set_option(Options(), name, text, METHODS)


def test_statistics_when_asked_for():
    err = talk("/stats", "a b", "/stats", "/stats on", "c d", "/stats off", "e f", "/stats maybe")[1]
    assert "there was no reply yet" in err and err.count("tokens/s") == 2 and "give on, off or nothing" in err
    assert talk("a b", stats=True)[1].count("tokens/s") == 1


def test_save_and_load(tmp_path):
    file = tmp_path / "kept.json"
    talk("one", f"/save {file}")
    chat = FakeChat()
    err = talk(f"/load {file}", "/load", "/save", chat=chat)[1]
    assert [m["content"] for m in chat.messages] == ["one", "<one> "]
    assert "[user] one" in err and "[assistant] <one>" in err and err.count("give a file name") == 2


def test_errors_and_notes_do_not_end_the_session():
    out, err = talk("one", "this is too long", "two", chat=FakeChat(notes=("drafter failed: \x1b[1mNaN",)))
    assert out == "<one> \n<two> \n"
    assert "Error: the prompt has 9,000 tokens" in err and "/reset starts anew" in err
    assert "Note: drafter failed: NaN" in err
    assert "cut" in talk("one", chat=FakeChat(reason="length"))[1]


def test_painted_replies():
    assert talk("one", paint=True)[0] == "\x1b[36m<one> \x1b[0m\n"


def test_history_is_kept_where_only_the_user_reads_it(tmp_path, monkeypatch):
    readline = pytest.importorskip("readline")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    readline.clear_history()
    with history():
        readline.add_history("first")
    kept = tmp_path / "specedge" / "history"
    assert "first" in kept.read_text() and kept.stat().st_mode & 0o077 == 0
    readline.clear_history()
    with history():
        assert readline.get_history_item(readline.get_current_history_length()) == "first"
    readline.clear_history()


def test_a_history_that_cannot_be_kept_is_said_and_no_more(tmp_path, monkeypatch):
    pytest.importorskip("readline")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    err = io.StringIO()
    with history(err):
        pass
    assert "cannot be kept" in err.getvalue()


SESSION = """
import sys
from specedge.runtime.repl import Repl, history
from specedge.tests.runtime.fake_chat import FakeChat

chat = FakeChat(pause=0.05)
with history() as read:
    Repl(chat, ("none",), out=sys.stdout, err=sys.stderr, read=read).run()
print("KEPT", [message["content"] for message in chat.messages])
"""


class Pty:
    """A program on a pseudo-terminal: type, and wait for what it prints."""

    def __init__(self, tmp_path: Path) -> None:
        import pty

        script = tmp_path / "session.py"
        script.write_text(SESSION)
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            os.environ.update(XDG_STATE_HOME=str(tmp_path), TERM="xterm", INPUTRC=os.devnull)
            os.chdir(tmp_path)
            os.execv(sys.executable, [sys.executable, str(script)])
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def wait(self, pattern: str, seconds: float = 60.0) -> str:
        """What was printed up to a pattern; later waits begin behind it."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen)):
            ready, _, _ = select.select([self.descriptor], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no {pattern!r} in {self.seen!r}"
            try:
                self.seen += os.read(self.descriptor, 4096).decode()
            except OSError:  # the other end is closed
                raise AssertionError(f"it ended without {pattern!r}: {self.seen!r}") from None
        before, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return before


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_a_session_on_a_pseudo_terminal(tmp_path):
    session = Pty(tmp_path)
    session.wait(">>> ")
    session.type("good day\n")
    session.wait(r"<good> <day> \r\n")
    session.wait(">>> ")

    session.type(" ".join(f"w{number}" for number in range(400)) + "\n")
    session.wait("<w3> ")
    session.type("\x03")
    session.wait(">>> ")

    session.type("half a line")
    session.wait("half a line")  # until readline has it: a signal while it sets the terminal up can be lost
    session.type("\x03")
    session.wait(">>> ")
    session.type('"""first\n')
    session.wait(r"\.\.\. ")
    session.type('second"""\n')
    session.wait(r"<first\r\nsecond> \r\n")
    session.wait(">>> ")
    session.type("\x1b[A\x1b[A\x1b[A\n")  # three lines up in the history stands the long message
    session.wait("<w2> ")
    session.type("\x03")
    session.wait(">>> ")

    session.type("\x04")
    kept = session.wait(r"KEPT .*\]\r\n")
    _, status = os.waitpid(session.pid, 0)
    os.close(session.descriptor)
    assert os.waitstatus_to_exitcode(status) == 0
    contents = eval(re.search(r"KEPT (\[.*\])", kept).group(1))
    assert contents[:2] == ["good day", "<good> <day> "]
    stopped = contents[3].split()
    assert 4 <= len(stopped) < 60 and stopped[:2] == ["<w0>", "<w1>"]
    assert contents[4:6] == ["first\nsecond", "<first\nsecond> "]
