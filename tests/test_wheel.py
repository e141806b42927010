"""What ships, and that it runs where nothing else is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from specedge.tests.wheels import ROOT, build_wheel, new_environment, run

ROOMS = ("export", "models", "quant", "runtime", "train")
HEAVY = {"torch", "transformers", "accelerate", "onnx", "optimum", "gguf", "safetensors", "scipy", "pandas"}

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="exporting needs Python 3.11")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_the_rooms_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    modules = [path.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    expected = {f"specedge/{path.as_posix()}" for path in modules}
    expected |= {f"specedge/{name}" for name in ("__init__.py", "__main__.py", "cli.py", "py.typed")}
    data = [*(ROOT / "models" / "shipped").iterdir(), *(ROOT / "runtime" / "profiles").iterdir()]
    data += (ROOT / "export" / "kernel_tables").iterdir()
    expected |= {f"specedge/{path.relative_to(ROOT).as_posix()}" for path in data}
    version = wheel.name.split("-")[1]
    meta = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE")
    expected |= {f"specedge-{version}.dist-info/{name}" for name in meta}
    assert names == expected


def test_its_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        metadata = archive.read(name).decode("utf-8").split("\n\n")[0].splitlines()
        (top_level,) = [name for name in archive.namelist() if name.endswith("/top_level.txt")]
        assert archive.read(top_level).decode().split() == ["specedge"]
    assert "License-Expression: Apache-2.0" in metadata
    assert "License-File: LICENSE" in metadata
    assert "Requires-Python: >=3.10" in metadata
    base = {
        line.split(":", 1)[1].strip()
        for line in metadata
        if line.startswith("Requires-Dist") and "extra ==" not in line
    }
    assert {requirement.split(">")[0] for requirement in base} == {"numpy", "tokenizers", "jinja2", "click", "rich"}


def test_it_imports_without_any_dependency(wheel, tmp_path):
    python = new_environment(tmp_path / "env", "--no-deps", wheel)
    where = run(python, "-c", "import specedge; print(specedge.__version__, specedge.__file__)").split()
    assert where[0] == wheel.name.split("-")[1]
    assert Path(where[1]).is_relative_to(tmp_path)


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """A fresh environment with the base install and ONNX Runtime: what a device has."""
    return new_environment(tmp_path_factory.mktemp("base") / "env", f"{wheel}[cpu]")


def test_the_base_install_is_light(python):
    rows = json.loads(run(python, "-m", "pip", "list", "--format", "json"))
    assert not HEAVY & {row["name"].lower() for row in rows}


def test_every_command_has_help(python):
    command = python.with_name("specedge")
    text = run(command, "--help")
    for name in ("export", "chat", "bench", "inspect", "train"):
        assert name in text
        assert "Usage:" in run(command, name, "--help")


def test_the_base_install_chats(python, tiny_bundle, tmp_path):
    """The tests' own environment exported the bundle; this one only runs it."""
    arguments = ("chat", tiny_bundle, "hello", "--max-tokens", "8", "--json")
    lines = run(python, "-m", "specedge", *arguments, cwd=tmp_path, HOME=str(tmp_path)).splitlines()
    finish = json.loads(lines[-1])
    assert finish["event"] == "finish"
    assert finish["ids"]


def test_exporting_without_its_packages_says_what_to_install(python, tmp_path):
    command = [python, "-m", "specedge", "export", "smollm2-135m", "-o", tmp_path / "bundle"]
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "specedge[export]" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "bundle").exists()
