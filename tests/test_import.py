"""Importing costs little, and PyTorch never comes in with the runtime."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

import pytest

from specedge.tests.wheels import run

NOT_AT_IMPORT = {
    "torch", "transformers", "onnx", "onnxruntime", "huggingface_hub", "gguf", "safetensors", "accelerate", "optimum",
}  # fmt: skip
NEVER_IN_A_CHAT = {"torch", "transformers", "onnx", "accelerate", "optimum", "specedge.export", "specedge.models"}
LOADED = "import sys; print(' '.join(sys.modules))"


def loaded_after(code: str) -> set[str]:
    return set(run(sys.executable, "-c", f"{code}\n{LOADED}").split("\n")[-2].split(" "))


def test_importing_the_package_takes_150_ms_at_most():
    """The median of five, in fresh processes, each timing the import itself."""
    code = "import time; t = time.perf_counter(); import specedge; print(1e3 * (time.perf_counter() - t))"
    times = [float(run(sys.executable, "-c", code)) for _ in range(5)]
    assert statistics.median(times) <= 150, times


@pytest.mark.parametrize("module", ["specedge", "specedge.cli", "specedge.__main__", "specedge.runtime.options"])
def test_importing_brings_nothing_heavy(module):
    assert not NOT_AT_IMPORT & loaded_after(f"import {module}")


def test_the_engine_brings_no_torch():
    assert not NEVER_IN_A_CHAT & loaded_after("import specedge.runtime.engine, specedge.runtime.loop")


def test_no_torch_after_a_chat(tiny_bundle):
    code = f"""
from specedge.runtime.engine import Engine
with Engine({str(tiny_bundle)!r}) as engine:
    for event in engine.chat().send("hello", max_tokens=8):
        pass
assert event.ids
"""
    assert not NEVER_IN_A_CHAT & loaded_after(code)


def test_a_chat_leaves_nothing_in_the_home_folder(tiny_bundle, tmp_path):
    """ONNX Runtime's telemetry would put a device id there."""
    arguments = ("chat", tiny_bundle, "hello", "--max-tokens", "4")
    run(sys.executable, "-m", "specedge", *arguments, HOME=str(tmp_path), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert not list(tmp_path.rglob("*"))


def test_python_m_specedge_is_the_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "specedge", "--version"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip().endswith("0.1.0")
