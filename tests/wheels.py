"""Builds the wheel once and installs it where a test wants it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What a checkout may hold besides its own files; none of it may reach a wheel.
_NOT_OURS = shutil.ignore_patterns(".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", "*.part")


def build_wheel(folder: Path) -> Path:
    """The wheel of a copy of the checkout, in a folder of another name."""
    source = folder / "another-name"
    shutil.copytree(ROOT, source, ignore=_NOT_OURS)
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source)
    (wheel,) = folder.glob("*.whl")
    return wheel


def new_environment(folder: Path, *install: str | Path) -> Path:
    """The Python of a fresh virtual environment with these packages."""
    run(sys.executable, "-m", "venv", folder)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *install)
    return python


def run(*command: str | Path, cwd: Path | None = None, **environment: str) -> str:
    """Runs a command outside the checkout; its standard output."""
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd or ROOT.parent,
        env=outside | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout
