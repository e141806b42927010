"""Checks a GPU in one command: exports, parity, greedy equality, captured graphs, mixed placement, speed.

    python scripts/gpu_check.py [--out result.json] [--device cuda|tensorrt|cpu] [--attention gqa|onnx24|plain]
                                [--bundle FOLDER ...] [--wheels FOLDER] [--no-builtin]

`--bundle` checks what was exported elsewhere: a machine with Python 3.10 (JetPack 6) cannot export. It runs
from the checkout, installed or not, and fetches nothing. Where something cannot be run it says what and why, and
goes on: without a GPU the same graphs run on the CPU, which proves the script and nothing of a GPU.
It exits with 1 where a check failed, and with 0 where all that could be run passed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("numpy", "onnxruntime", "tokenizers", "jinja2", "click", "rich")
EXPORTING = ("onnx", "safetensors", "ml_dtypes")
WIDTHS = (1, 2, 4, 8, 16, 32)
TOKENS = 48
TIE = 0.25  # two logits of fp16 this near may change places between widths
PROMPTS = (
    "What does a gyroscope measure?",
    "Write a Python function that reverses a string.",
    "Translate into German: The weather is fine today.",
    "A train leaves at 9:40 and arrives at 11:05. How long is the journey?",
    "Name three rivers in Europe.",
    "Explain what a robot needs a battery for.",
    "List the numbers from one to twenty.",
    "Repeat after me: to be or not to be, that is the question.",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs everything; returns the exit status."""
    chosen = _parse(arguments)
    if chosen.out is not None and not chosen.out.absolute().parent.is_dir():
        print(f"Cannot run: {chosen.out}: its folder does not exist; make it, or give another name")
        return 1
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="specedge-gpu-") as name:
        scratch = Path(name)
        notes = _prepare(scratch, chosen.wheels)
        report: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "notes": notes, "models": {}}
        wanted = (*NEEDED, *([] if chosen.bundle else EXPORTING))
        if missing := [package for package in wanted if importlib.util.find_spec(package) is None]:
            print(f"Cannot run: {', '.join(missing)} not installed; install specedge[export], or give --wheels FOLDER")
            return 1
        report |= _machine(chosen.device, notes)
        for folder in chosen.bundle:
            report["models"][str(folder)] = _check_bundle(folder, report["device"], Checks())
        for model in () if chosen.bundle else ("tiny", *([] if chosen.no_builtin else ["smollm2-135m"])):
            if (source := _source(model, scratch, notes)) is not None:
                told = {"device": chosen.device if chosen.device != "cpu" else "cuda", "attention": chosen.attention}
                report["models"][model] = _check_model(source, scratch / f"bundle-{model}", report["device"], told)
        report["seconds"] = round(time.perf_counter() - began, 1)
    _print(report)
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(f"Written to {chosen.out}")
    return int(any(check["status"] == "failed" for model in report["models"].values() for check in model["checks"]))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "tensorrt", "cpu"), help="what to check")
    parser.add_argument("--attention", choices=("gqa", "onnx24", "plain"), help="its operators [default: the device's]")
    parser.add_argument("--bundle", type=Path, action="append", default=[], help="a bundle to check; may be repeated")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to install beside, for this run only")
    parser.add_argument("--no-builtin", action="store_true", help="the tiny random model only")
    return parser.parse_args(arguments)


def _prepare(scratch: Path, wheels: Path | None) -> list[str]:
    """Makes the checkout importable as `specedge`, and the wheels that were carried."""
    notes = []
    if wheels is not None:
        target, found = scratch / "wheels", sorted(map(str, wheels.glob("*.whl")))
        if not found or importlib.util.find_spec("pip") is None:
            notes.append(f"no wheel was installed: {'this Python has no pip' if found else f'{wheels} holds none'}")
            found = []
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", target]
        # One by one: a wheel of another Python must not keep the others out.
        broken = [each for each in found if subprocess.run([*map(str, command), each], capture_output=True).returncode]
        notes += [f"{Path(each).name} does not fit this Python, {platform.python_version()}" for each in broken]
        sys.path.insert(0, str(target))
    package = scratch / "package"
    package.mkdir()
    (package / "specedge").symlink_to(ROOT, target_is_directory=True)
    sys.path.insert(0, str(package))
    importlib.invalidate_caches()
    return notes


def _machine(wanted: str, notes: list[str]) -> dict[str, Any]:
    """What the machine is, and which device is checked."""
    from specedge.runtime.doctor import examine, report_json
    from specedge.runtime.errors import DeviceError
    from specedge.runtime.providers import providers_for

    found, device = report_json(examine()), wanted
    try:
        providers_for(wanted)
    except DeviceError as error:
        notes.append(f"NO GPU WAS CHECKED: {error}")
        device = "cpu"
    if wanted != "cpu" and device != "cpu" and found["machine"]["gpu"] is None:
        notes.append("NO GPU WAS CHECKED: the driver knows none")
        device = "cpu"
    if device != wanted:
        print(f"{notes[-1]}\nEverything below compares the CPU with itself.", flush=True)
    return {"machine": found, "device": device, "asked": wanted}


def _source(model: str, scratch: Path, notes: list[str]) -> str | None:
    """Where a model is; None, with a note, where it is not there."""
    if model == "tiny":
        from specedge.tests.tiny import TinyLlama, write_tiny_checkpoint

        tiny = TinyLlama(layers=4, hidden=256, intermediate=512, heads=8, kv_heads=2, head_dim=64)
        return str(write_tiny_checkpoint(scratch / "tiny", tiny))
    from specedge.export.builtin import BUILTINS
    from specedge.runtime.files import cache_folder

    file = cache_folder() / "models" / BUILTINS[model].file_name
    if not file.is_file():
        notes.append(f"{model} was not run: {file} is not there, and nothing is fetched")
        return None
    return model


class Checks:
    """Results of one model: each check by its name, failures told and survived."""

    def __init__(self) -> None:
        self.results: list[dict[str, Any]] = []

    def run(self, name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        began = time.perf_counter()
        try:
            result = {"status": "passed", **work()}
        except Exception as error:  # noqa: BLE001  one failed check must not hide the others
            result = {"status": "failed", "error": f"{type(error).__name__}: {error}"}
        self.results.append({"name": name, **result, "seconds": round(time.perf_counter() - began, 1)})
        print(f"  {name}: {result['status']} {result.get('error', '')}", flush=True)
        return result


def _check_model(source: str, folder: Path, device: str, told: dict[str, Any]) -> dict[str, Any]:
    from specedge.export.pipeline import ExportOptions, export

    print(f"{source} on {device}", flush=True)
    checks = Checks()
    mixed, reverse, short = (folder.with_name(f"{folder.name}-{name}") for name in ("mixed", "reverse", "bf16"))

    def write() -> dict[str, Any]:
        common = {"capacity": 512, "offline": True, "verify": False}
        export(source, folder, ExportOptions(**common, **told))
        common |= {"heads": "none"}
        export(source, mixed, ExportOptions(**common, **told, draft_device="cpu", drafts=("self-int8",)))
        there = {"device": "cpu", "attention": told["attention"], "draft_device": told["device"]}
        export(source, reverse, ExportOptions(**common, **there, drafts=("self-fp16",)))
        if told["device"] == "cuda":
            export(source, short, ExportOptions(**common, **told, precision="bf16", drafts=("none",)))
        return {}

    if checks.run("export", write)["status"] == "failed":
        return {"checks": checks.results}
    checks.run("draft on the CPU, target here", lambda: _mixed(mixed, device))
    checks.run("target on the CPU, draft here", lambda: _mixed(reverse, device))
    if told["device"] == "cuda":
        checks.run("bfloat16", lambda: _parity(short, device))
    return _check_bundle(folder, device, checks)


def _check_bundle(folder: Path, device: str, checks: Checks) -> dict[str, Any]:
    """All that one bundle shows."""
    checks.run("parity with the CPU", lambda: _parity(folder, device))
    checks.run("greedy equality", lambda: _equality(folder, device))
    if device == "cuda":
        checks.run("captured graphs on and off", lambda: _captured(folder, device))
    speed = checks.run("speed", lambda: _speed(folder, device))
    return {"checks": checks.results, "speed": speed}


def _engine(folder: Path, device: str, **options: Any) -> Any:
    from specedge.runtime.engine import Engine

    return Engine(folder, verify=False, device="cpu" if device == "cpu" else None, **options)


def _prompt_ids(engine: Any) -> list[list[int]]:
    return [engine.text.chat_prompt([{"role": "user", "content": prompt}]) for prompt in PROMPTS]


def _answers(engine: Any, method: str) -> list[tuple[tuple[int, ...], Any]]:
    replies = []
    for ids in _prompt_ids(engine):
        *_, finish = engine.generate(ids, method=method, max_tokens=TOKENS)
        replies.append((finish.ids, finish.stats))
    return replies


def _parity(folder: Path, device: str) -> dict[str, Any]:
    """Chains, a tree and what is left of it after a commit, on the device and on the CPU."""
    import numpy as np

    from specedge.export.check import compare
    from specedge.export.emulation import emulated
    from specedge.export.tolerances import Bound, tolerance_of
    from specedge.runtime.bundle import open_bundle
    from specedge.runtime.contracts import Draft
    from specedge.runtime.graph import Decoder
    from specedge.runtime.memory import DeviceMemory

    spec = open_bundle(folder).manifest.target
    bound = tolerance_of(spec.precision, compiled=spec.fixed).graph
    bound = bound if bound.absolute is None else Bound(TIE, bound.kl)
    with emulated(folder, spec) as runnable:  # a CPU has no kernels for bfloat16
        there = Decoder(folder / runnable.file, runnable)
        ran, memory = (runnable, DeviceMemory("cpu")) if device == "cpu" else (spec, None)
        here = Decoder(folder / ran.file, ran, device=device, memory=memory)
    random, worst = np.random.default_rng(0), 0.0
    for _ in range(4):
        pending = random.integers(0, spec.vocab_size, 5).tolist()
        nodes = random.integers(0, spec.vocab_size, 7).tolist()
        tree = Draft(tuple(nodes), (-1, -1, 0, 0, 1, 2, 5))
        for draft, kept in ((Draft.chain(nodes[:3]), (0,)), (tree, (0, 2, 5, 6))):
            ours, theirs = (each.forward(pending, draft).logits for each in (here, there))
            worst = max(worst, compare("the device against the CPU", ours, theirs, bound))
            for each in (here, there):
                each.commit(kept)
    here.close()
    there.close()
    return {"kl" if bound.absolute is None else "max_abs": worst}


def _differences(engine: Any, ours: list[Any], theirs: list[Any]) -> tuple[int, int]:
    """How many answers differ by a tie at the first different token, and how many by more.

    In 16 bits a pass of another width may decide between two logits that are as good as equal.
    """
    ties = wrong = 0
    for prompt, (one, _), (other, _) in zip(_prompt_ids(engine), ours, theirs, strict=True):
        if one == other:
            continue
        at = next((i for i, pair in enumerate(zip(one, other, strict=False)) if len(set(pair)) > 1), None)
        if at is None:
            wrong += 1
            continue
        engine.reset()
        engine.target.looked_at = None
        row = engine.target.forward([*prompt, *one[:at]]).logits[0]
        tie = abs(float(row[one[at]] - row[other[at]])) < TIE
        ties, wrong = ties + tie, wrong + (not tie)
        engine.reset()
    return ties, wrong


def _equality(folder: Path, device: str) -> dict[str, Any]:
    """Every method's ids against plain decoding's."""
    with _engine(folder, device) as engine:
        plain = _answers(engine, "none")
        found = {
            method: _differences(engine, plain, _answers(engine, method))
            for method in engine.methods
            if method != "none"
        }
    if wrong := {method: wrong for method, (_, wrong) in found.items() if wrong}:
        raise AssertionError(f"other ids than plain decoding's, and no tie: {wrong} of {len(PROMPTS)} prompts")
    return {"of": len(PROMPTS), "ties": {method: ties for method, (ties, _) in found.items() if ties}}


def _captured(folder: Path, device: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    answers = []
    for captured in (True, False):
        with _engine(folder, device, captured=captured) as engine:
            answers.append(_answers(engine, "auto"))
            found[f"captured {captured}"] = _plain_ms(engine)
            ties, wrong = _differences(engine, answers[0], answers[-1])
    if wrong:
        raise AssertionError(f"ids differ with and without captured graphs on {wrong} of {len(PROMPTS)} prompts")
    return {"ms": found, "ties": ties}


def _mixed(folder: Path, device: str) -> dict[str, Any]:
    """Every graph where the manifest says it runs, and so draft and target on different providers."""
    with _engine(folder, device) as engine:
        plain, drafted = (_answers(engine, method) for method in ("none", "draft"))
        ties, wrong = _differences(engine, plain, drafted)
    proposed = sum(stats.proposed for _, stats in drafted)
    if wrong or not proposed:
        raise AssertionError(f"other ids on {wrong} of {len(PROMPTS)} prompts, {proposed} tokens drafted")
    return {"ties": ties, "proposed": proposed}


def _plain_ms(engine: Any) -> float:
    from statistics import median

    return round(median(1e3 / stats.tokens_per_second for _, stats in _answers(engine, "none")), 3)


def _speed(folder: Path, device: str) -> dict[str, Any]:
    """ms a token by method, v(n), and the share of the memory's bandwidth that a pass of one row takes."""
    from statistics import median

    from specedge.runtime.machine import look_at_machine
    from specedge.runtime.pass_times import pass_times

    with _engine(folder, device) as engine:
        rows: dict[str, Any] = {}
        for method in engine.methods:
            _answers(engine, method)  # what is captured and allocated once is not timed
            stats = [each for _, each in _answers(engine, method) if each.tokens_per_second]
            rows[method] = {
                "ms": round(median(1e3 / each.tokens_per_second for each in stats), 3),
                "tau": round(median(each.tau or 1.0 for each in stats), 2),
            }
        engine.reset()
        passes = pass_times([engine.target], WIDTHS)[0]
        weights = engine.manifest.target.weight_bytes
    gpu = look_at_machine().gpu
    used = weights / (passes[1] / 1e3)
    share = round(used / gpu.bandwidth, 3) if device != "cpu" and gpu is not None and gpu.bandwidth else None
    return {"methods": rows, "passes": passes, "bytes_per_second": used, "share_of_bandwidth": share}


def _print(report: dict[str, Any]) -> None:
    machine = report["machine"]["machine"]
    gpu = machine["gpu"]["name"] if machine["gpu"] else "no GPU"
    print(f"\n{machine['system']}, {gpu}; ran on {report['device']}, {report['seconds']} s")
    for name, model in report["models"].items():
        speed = model.get("speed", {})
        if speed.get("status") != "passed":
            continue
        plain = speed["methods"]["none"]["ms"]
        print(f"\n{name}: " + ", ".join(f"v({width}) {ms:.2f} ms" for width, ms in speed["passes"].items()))
        share = f", {speed['share_of_bandwidth']:.0%} of the memory's" if speed["share_of_bandwidth"] else ""
        print(f"  {speed['bytes_per_second'] / 1e9:.0f} GB/s of weights{share}")
        for method, row in speed["methods"].items():
            print(f"  {method:<18} {row['ms']:8.3f} ms/token  {plain / row['ms']:5.2f} x  tau {row['tau']:.2f}")
    for note in report["notes"]:
        print(f"Note: {note}")


if __name__ == "__main__":
    sys.exit(main())
