"""The script for a GPU, run here: where there is none it says so, and everything else passes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

for needed in ("onnx", "onnxruntime", "safetensors"):
    pytest.importorskip(needed)


def run(folder, *more):
    command = [
        sys.executable,
        ROOT / "scripts" / "gpu_check.py",
        "--no-builtin",
        "--out",
        folder / "result.json",
        *more,
    ]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=folder, check=False)


def test_all_that_can_be_run_passes(tmp_path):
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "nothing-1.0-cp27-none-any.whl").write_bytes(b"no wheel")
    done = run(tmp_path, "--wheels", tmp_path / "wheels")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    names = {check["name"] for check in result["models"]["tiny"]["checks"]}
    assert names >= {
        "export",
        "parity with the CPU",
        "greedy equality",
        "draft on the CPU, target here",
        "bfloat16",
        "speed",
    }
    assert result["models"]["tiny"]["speed"]["passes"]["1"] > 0
    assert any("nothing-1.0-cp27-none-any.whl does not fit" in note for note in result["notes"])
    if result["device"] == "cpu":
        assert any(note.startswith("NO GPU WAS CHECKED") for note in result["notes"])
        assert "NO GPU WAS CHECKED" in done.stdout


def test_a_check_that_fails_is_an_exit_status(tmp_path):
    """Each check fails by itself, and those behind it are still made."""
    done = run(tmp_path, "--bundle", tmp_path / "nothing")
    assert done.returncode == 1, done.stdout + done.stderr
    [model] = json.loads((tmp_path / "result.json").read_text())["models"].values()
    assert len(model["checks"]) >= 3
    assert all(check["status"] == "failed" and "no such folder" in check["error"] for check in model["checks"])


def test_a_result_that_cannot_be_written_is_told_first(tmp_path):
    done = run(tmp_path, "--out", tmp_path / "missing" / "result.json")
    assert done.returncode == 1
    assert "its folder does not exist" in done.stdout
