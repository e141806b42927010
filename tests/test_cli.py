"""The commands as a person types them: what goes where, exit statuses, and nothing heavy for a look at the help."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

import specedge
from specedge import cli
from specedge.runtime import bench, engine
from specedge.runtime.bundle import open_bundle
from specedge.runtime.errors import BundleError, UsageError
from specedge.tests.runtime.fake_chat import FakeChat

COMMANDS = ("export", "chat", "bench", "compare-compensation", "doctor", "inspect", "train", "tune")
HEAVY = {"onnx", "onnxruntime", "torch", "transformers", "tokenizers", "numpy", "jinja2", "rich", "gguf", "safetensors"}


def run(*arguments, **options):
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments], **options)


def python(code, *arguments, **options):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=300, **options
    )


@pytest.fixture
def fake(monkeypatch):
    """An engine that answers without a model; set its `reply` to change how."""
    made = SimpleNamespace(reply={}, notes=(), opened=[], where=[], chats=[], closed=0)

    class FakeEngine:
        methods = ("none", "ngram")
        tuning = None
        manifest = SimpleNamespace(name="fake\x1b[2J")

        def __init__(self, bundle, *, threads=None, device=None, memory_budget=None):
            made.opened.append((str(bundle), threads))
            made.where.append((device, memory_budget))
            self.text = SimpleNamespace(notes=made.notes)

        def resolve_method(self, method):
            if method not in (None, *self.methods):
                raise UsageError(f"method {method!r} is not in this bundle")

        def chat(self, system, options):
            made.chats.append((system, options))
            return FakeChat(**made.reply)

        def close(self):
            made.closed += 1

    monkeypatch.setattr(engine, "Engine", FakeEngine)
    return made


@pytest.mark.parametrize("arguments", [("--help",), *((command, "--help") for command in COMMANDS)])
def test_help_imports_nothing_heavy(arguments):
    code = (
        "import sys\nfrom specedge.cli import main\nmain(sys.argv[1:], standalone_mode=False)\n"
        "print('LOADED', *sys.modules)"
    )
    done = python(code, *arguments)
    assert done.returncode == 0, done.stderr
    usage, _, loaded = done.stdout.partition("LOADED ")
    assert "Usage:" in usage
    assert not HEAVY & set(loaded.split())


def test_version():
    assert run("--version").output.strip() == f"specedge, version {specedge.__version__}"


def test_the_help_names_every_command():
    assert set(cli.main.commands) == set(COMMANDS)
    for command in COMMANDS:
        assert command in run("--help").output


# ---- chat -----------------------------------------------------------------------------------


def test_a_prompt_is_answered_once(fake, tmp_path):
    done = run("chat", tmp_path, "good day", "--stats", "--threads", 3)
    assert (done.exit_code, done.stdout) == (0, "<good> <day> \n")
    assert "tokens/s" in done.stderr and "τ" in done.stderr
    assert fake.opened == [(str(tmp_path), 3)] and fake.closed == 1


def test_a_prompt_from_standard_input(fake, tmp_path):
    done = run("chat", tmp_path, input="good é好\n".encode())
    assert (done.exit_code, done.stdout, done.stderr) == (0, "<good> <é好\n> \n", "")


def test_options_reach_the_chat(fake, tmp_path):
    typed = (
        "--method ngram --accept rejection --draft-length 7 --temperature 0.7 --top-k 5 --top-p 0.9 --min-p 0.1 "
        "--repetition-penalty 1.1 --presence-penalty 0.2 --frequency-penalty 0.3 --no-repeat-ngram 3 --seed 17 "
        "--max-tokens 9 --stop END --stop FIN --system Be --policy steps --draft-temperature 0.6 --deadline-ms 900 "
        "--max-step-ms 50 --measure-baseline --device cuda --memory-budget 900"
    )
    assert run("chat", tmp_path, "hi", *typed.split()).exit_code == 0
    [(system, options)] = fake.chats
    expected = {
        "method": "ngram", "accept": "rejection", "draft_length": 7, "temperature": 0.7, "top_k": 5, "top_p": 0.9,
        "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3,
        "no_repeat_ngram": 3, "seed": 17, "max_tokens": 9, "stop": ("END", "FIN"),
        "typical_epsilon": 0.09, "typical_delta": 0.3, "policy": "steps", "draft_temperature": 0.6,
        "deadline_ms": 900.0, "max_step_ms": 50.0, "measure_baseline": True,
    }  # fmt: skip
    assert system == "Be" and vars(options) == expected
    assert fake.where == [("cuda", 900_000_000)]


def test_json_events(fake, tmp_path):
    fake.reply = {"held": "\n"}
    done = run("chat", tmp_path, "good \x1b[2Jday", "--json", "--stats")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["event"] for event in events] == ["token"] * 3 + ["finish"]
    assert "".join(event["text"] for event in events[:-1]) == events[-1]["text"] == "<good> <\x1b[2Jday> \n"
    assert set(events[-1]) == {"event", "finish_reason", "text", "prompt_ids", "ids", "stats"}
    assert set(events[0]) == {"event", "text"}
    assert "\x1b" not in done.stdout


def test_control_bytes_and_colours_stay_out_of_a_pipe(fake, tmp_path):
    done = run("chat", tmp_path, "a\x1b]0;t\x07b", "--show-drafts")
    assert done.stdout == "<ab> \n"
    assert "no colours" in done.stderr


def test_notes_are_said_on_stderr(fake, tmp_path):
    fake.notes, fake.reply = ("no chat template",), {"notes": ("drafter failed",)}
    done = run("chat", tmp_path, "hi")
    assert done.stdout == "<hi> \n"
    assert "Note: no chat template" in done.stderr and "Note: drafter failed" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("",), 1, "the prompt is empty"),
        ((" \n",), 1, "the prompt is empty"),
        ((), 1, "the prompt is empty"),
        (("hi", "--draft-length", "0"), 2, "draft_length is 0"),
        (("hi", "--temperature", "-1"), 2, "temperature is -1.0"),
        (("hi", "--temperature", "nan"), 2, "temperature is nan"),
        (("hi", "--method", "magic"), 2, "method 'magic'"),
        (("hi", "--accept", "all"), 2, "accept"),
        (("hi", "--threads", "0"), 2, "threads"),
        (("hi", "--stop", ""), 2, "stop"),
        (("hi", "--nothing"), 2, "No such option"),
        (("too long",), 1, "shorten it"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(fake, tmp_path, arguments, status, message):
    done = run("chat", tmp_path, *arguments)
    assert (done.exit_code, done.stdout) == (status, "")
    assert message in done.stderr and "Traceback" not in done.stderr
    assert fake.closed == len(fake.opened)


def test_an_error_cannot_steer_the_terminal(monkeypatch, tmp_path):
    def refuse(bundle, **options):
        raise BundleError("name '\x1b]0;t\x07x'\nsecond")

    monkeypatch.setattr(engine, "Engine", refuse)
    done = run("chat", tmp_path, "hi")
    assert done.exit_code == 1 and done.stderr == "Error: name 'x' second\n"


def test_an_interrupt_keeps_what_was_said(fake, tmp_path, monkeypatch):
    from specedge.tests.runtime import fake_chat

    class Interrupted(fake_chat.FakeReply):
        def __next__(self):
            if len(self._seen) == 1:
                os.kill(os.getpid(), signal.SIGINT)
            return super().__next__()

    monkeypatch.setattr(fake_chat, "FakeReply", Interrupted)
    done = run("chat", tmp_path, "one two three four", "--json")
    assert done.exit_code == 130
    assert json.loads(done.stdout.splitlines()[-1])["text"] == "<one> <two> "
    assert json.loads(done.stdout.splitlines()[-1])["finish_reason"] == "cancelled"
    assert fake.closed == 1


def test_a_name_is_exported_on_first_use(fake, monkeypatch, tmp_path):
    pipeline = pytest.importorskip("specedge.export.pipeline")
    monkeypatch.chdir(tmp_path)
    asked = []

    def bundle_for(name, progress):
        asked.append(name)
        progress("write target", 1, 2)
        return tmp_path / "made"

    monkeypatch.setattr(pipeline, "bundle_for", bundle_for)
    done = run("chat", "smollm2-135m", "hi")
    assert (done.exit_code, done.stdout) == (0, "<hi> \n") and "write target" in done.stderr
    assert asked == ["smollm2-135m"] and fake.opened == [(str(tmp_path / "made"), None)]


def test_a_missing_extra_is_named(fake, monkeypatch, tmp_path):
    pipeline = pytest.importorskip("specedge.export.pipeline")
    monkeypatch.chdir(tmp_path)

    def bundle_for(name, progress):
        raise ModuleNotFoundError("No module named 'gguf.x'", name="gguf.x")

    monkeypatch.setattr(pipeline, "bundle_for", bundle_for)
    done = run("chat", "smollm2-135m", "hi")
    assert done.exit_code == 1 and "gguf is not installed; run: pip install 'specedge[export]'" in done.stderr


def test_a_bundle_needs_no_export_extra(tiny_bundle):
    code = (
        "import sys\nfor name in ('onnx', 'gguf', 'safetensors', 'ml_dtypes', 'specedge.export'):\n"
        "    sys.modules[name] = None\nfrom specedge.cli import main\nmain(sys.argv[1:])"
    )
    done = python(code, "chat", tiny_bundle, "hello", "--max-tokens", "4", "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout.splitlines()[-1])["ids"]) <= 4


def test_a_seed_gives_the_same_bytes_under_every_method(tiny_bundle):
    said = {
        run("chat", tiny_bundle, "the quick", "--seed", 5, "--temperature", 20, "--max-tokens", 24, *more).stdout_bytes
        for more in ((), ("--method", "none"), ("--method", "draft:self-int8"), ("--method", "ngram"), ("--stats",))
    }
    assert len(said) == 1 and len(set(said.pop())) > 3


# ---- export, bench, inspect -----------------------------------------------------------------


@pytest.fixture
def exported(monkeypatch, tiny_bundle):
    """Calls of the pipeline's export, which does nothing but hand out the tiny model's manifest."""
    pipeline = pytest.importorskip("specedge.export.pipeline")
    calls = []

    def export(model, output, options, progress):
        calls.append((model, output, options))
        progress("write target", 1, 1)
        return open_bundle(tiny_bundle).manifest

    monkeypatch.setattr(pipeline, "export", export)
    return calls


def test_export(exported, tmp_path):
    typed = "--precision int8 --draft self-int4 --draft self-int8 --capacity 512 --no-verify --revision abc --offline"
    typed += " --attention plain --draft-device cuda"
    done = run("export", "some/model", "-o", tmp_path / "out folder", "--force", *typed.split())
    assert (done.exit_code, done.stdout) == (0, ""), done.stderr
    [(model, output, options)] = exported
    assert (model, output) == ("some/model", tmp_path / "out folder")
    assert vars(options) == {
        "precision": "int8", "device": "cpu", "drafts": ("self-int4", "self-int8"), "capacity": 512, "verify": False,
        "revision": "abc", "offline": True, "force": True,
        "compensate": None, "calibration": None, "calibration_prompts": None, "seed": 0,
        "heads": None, "heads_precision": None, "attention": "plain", "draft_device": "cuda",
    }  # fmt: skip
    assert "write target" in done.stderr and "at work" in done.stderr and "check self" in done.stderr
    assert f"specedge chat '{tmp_path / 'out folder'}'" in done.stderr


def test_export_by_default(exported, tmp_path):
    assert run("export", "m", "-o", tmp_path / "out").exit_code == 0
    pipeline = pytest.importorskip("specedge.export.pipeline")
    assert exported[0][2] == pipeline.ExportOptions()


@pytest.mark.parametrize(
    "more",
    [
        ("--precision", "fp3"), ("--precision", "int3"), ("--device", "abacus"), ("--draft", "self-int5"),
        ("--draft", "int4"), ("--draft", "layers-0"), ("--draft", "self-int4:b65"), ("--capacity", "1"),
        ("--compensate", "magic"), ("--seed", "-1"), ("--calibration-prompts", "no-such-file"),
        ("--device", "cuda", "--draft", "self-fp8"), ("--draft-device", "abacus"), ("--attention", "flash"),
        ("--device", "tensorrt", "--attention", "gqa"),
    ],
)  # fmt: skip
def test_bad_export_options(exported, tmp_path, more):
    done = run("export", "m", "-o", tmp_path / "out", *more)
    assert done.exit_code == 2 and done.stderr.startswith("Error: ") and not exported


def test_bench(monkeypatch, tmp_path):
    calls = []

    def measure(bundle, prompts, *, progress, **options):
        calls.append((str(bundle), str(prompts), options))
        progress(1, 2, "none")
        return {"model": "m"}

    monkeypatch.setattr(bench, "run", measure)
    monkeypatch.setattr(bench, "table", lambda result: "THE TABLE")
    out = tmp_path / "out.json"
    done = run("bench", "b", "--prompts", "p.jsonl", "--methods", "none, ngram", "--baseline", "c", "--limit", 2,
               "--max-tokens", 16, "--draft-length", 6, "--threads", 2, "--device", "cpu", "--out", out)  # fmt: skip
    assert done.exit_code == 0 and done.stdout.strip() == "THE TABLE" and "answers" in done.stderr
    [(bundle, prompts, options)] = calls
    assert (bundle, prompts, list(map(str, options.pop("baselines")))) == ("b", "p.jsonl", ["c"])
    assert options == {
        "methods": ["none", "ngram"], "limit": 2, "max_tokens": 16, "draft_length": 6, "threads": 2, "device": "cpu",
    }  # fmt: skip
    assert json.loads(out.read_text()) == {"model": "m"}


def test_inspect(tiny_bundle):
    done = run("inspect", tiny_bundle)
    assert done.exit_code == 0, done.stderr
    manifest = open_bundle(tiny_bundle).manifest
    for part in (
        *manifest.files,
        "draft self-int4",
        "fp32",
        "tree mask",
        "check self",
        f"{manifest.vocab_size} tokens",
    ):
        assert part in done.stdout
    assert "files are whole" in done.stderr


def test_inspect_as_json(tiny_bundle):
    done = run("inspect", tiny_bundle, "--json")
    manifest = open_bundle(tiny_bundle).manifest
    shown = json.loads(done.stdout)
    assert shown["memory_bytes"] == manifest.memory_bytes
    assert shown["files"].keys() == manifest.files.keys() and shown["target"]["precision"] == "fp32"


def test_inspect_finds_damage(tiny_bundle, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(tiny_bundle, broken)
    with (broken / "onnx" / "model.onnx_data").open("r+b") as stream:
        first = stream.read(1)[0]
        stream.seek(0)
        stream.write(bytes([first ^ 1]))
    done = run("inspect", broken)
    assert done.exit_code == 1 and "model.onnx_data: altered" in done.stderr
    (broken / "tokenizer.json").unlink()
    done = run("inspect", broken)
    assert done.exit_code == 1 and "missing" in done.stderr
    assert run("inspect", tmp_path).exit_code == 1
    assert run("inspect", tmp_path / "nowhere").exit_code == 1


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_an_output_that_is_full(tiny_bundle, more):
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "specedge", "chat", str(tiny_bundle), "hello", "--max-tokens", "9", *more]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=tiny_bundle, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == "Error: cannot write the output: No space left on device"


@pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")
@pytest.mark.parametrize(("closed", "status"), [("<&-", 1), (">&-", 0), ("2>&-", 0)])
def test_a_standard_stream_that_is_closed(tiny_bundle, closed, status):
    prompt = "" if closed == "<&-" else "hello"
    command = f'"{sys.executable}" -m specedge chat "{tiny_bundle}" {prompt} --max-tokens 3 {closed}'
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=tiny_bundle, check=False)
    assert done.returncode == status
    assert "Traceback" not in done.stderr


def test_the_result_file_of_a_benchmark_is_checked_before_it_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "run", lambda *_, **__: pytest.fail("measured before --out was checked"))
    done = run("bench", "b", "--prompts", "p.jsonl", "--out", tmp_path / "none" / "r.json")
    assert done.exit_code == 1
    assert "its folder does not exist" in done.stderr
