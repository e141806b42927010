"""What tests share: prompts, a tiny model and its bundle, the real model's bundle, a guard on the checkout."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
CI = os.environ.get("CI") == "true"
DRAFTS = ("self-int4", "self-int8")

# Rooms whose code decides what stands in a bundle.
_EXPORTING = (
    "export", "models", "quant",
    "runtime/bundle.py", "runtime/specs.py", "runtime/calibration.py", "runtime/contracts.py",
)  # fmt: skip
# What tools leave in a checkout; git ignores it.
_LEFT_BY_TOOLS = {".git", "__pycache__", "build", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"}

settings.register_profile("specedge", deadline=None, derandomize=CI)
settings.load_profile("specedge")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder `shared` beside the checkout."""
    if not SHARED.is_dir():
        pytest.skip(f"no folder {SHARED.name} beside the checkout")
    return SHARED


@pytest.fixture(scope="session")
def dev_prompts_file(shared) -> Path:
    path = shared / "prompts" / "specbench-dev.jsonl"
    if not path.is_file():
        pytest.skip("no prompts/specbench-dev.jsonl in the folder beside the checkout")
    return path


@pytest.fixture(scope="session")
def dev_prompts(dev_prompts_file) -> list[dict]:
    """The development prompts: `question_id`, `category`, `turns`."""
    return [json.loads(line) for line in dev_prompts_file.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(autouse=True)
def threads_of_their_own(monkeypatch):
    """Commands run inside the test process share no pool: once there is one, no other session could be opened."""
    from specedge.runtime import providers

    monkeypatch.setattr(providers, "share_threads", lambda threads=None: None)


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers, the same in every run."""
    return np.random.default_rng(20250)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> Path:
    """A folder with a small random Llama, as Hugging Face lays it out."""
    from specedge.tests.tiny import write_tiny_checkpoint

    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.fixture(scope="session")
def tiny_bundle(request, tmp_path_factory) -> Path:
    """The tiny model's bundle: fp32, with an INT4 and an INT8 draft of itself.

    An environment that cannot export (a device's) takes the one that another environment left
    where SPECEDGE_TINY_BUNDLE says.
    """
    named = os.environ.get("SPECEDGE_TINY_BUNDLE")
    if importlib.util.find_spec("onnx") is None:
        if not named or not Path(named).is_dir():
            pytest.skip("needs the `export` extra, or a bundle that SPECEDGE_TINY_BUNDLE names")
        return Path(named).resolve()
    from specedge.export.pipeline import ExportOptions, export

    folder = Path(named).resolve() if named else tmp_path_factory.mktemp("tiny") / "bundle"
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    checkpoint = request.getfixturevalue("tiny_checkpoint")
    export(str(checkpoint), folder, ExportOptions(drafts=DRAFTS))
    return folder


@pytest.fixture(scope="session")
def model_bundle(request, tmp_path_factory) -> Path:
    """The built-in model's bundle: fp32, capacity 2048, with an INT4 and an INT8 draft of itself.

    Exported once for each state of the exporting code, and kept in pytest's cache.
    """
    from specedge.export.pipeline import ExportOptions, export
    from specedge.runtime.errors import DownloadError

    cache = getattr(request.config, "cache", None)
    home = tmp_path_factory.mktemp("model") if cache is None else cache.mkdir("bundles")
    folder = home / _sources_hash()
    if not (folder / "specedge.json").is_file():
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        try:
            export("smollm2-135m", folder, ExportOptions(drafts=DRAFTS, capacity=2048))
        except DownloadError as error:
            if CI:
                raise
            pytest.skip(f"the built-in model cannot be fetched: {error}")
    return folder


def _sources_hash() -> str:
    digest = hashlib.sha256()
    for name in _EXPORTING:
        path = ROOT / name
        for source in sorted((*path.rglob("*.py"), *path.rglob("*.safetensors"))) if path.is_dir() else [path]:
            digest.update(str(source.relative_to(ROOT)).encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


@pytest.fixture(scope="session", autouse=True)
def nothing_left_in_the_checkout():
    """Tests write to temporary folders only. Watched in CI, where nobody edits meanwhile."""
    before = _files() if CI else set()
    yield
    left = _files() - before if CI else set()
    assert not left, f"tests left files in the checkout: {sorted(left)}"


def _files() -> set[str]:
    found = set()
    for folder, names, files in os.walk(ROOT):
        names[:] = [name for name in names if not _left_by_tools(name)]
        found.update(str(Path(folder, name).relative_to(ROOT)) for name in files)
    return found


def _left_by_tools(name: str) -> bool:
    return name in _LEFT_BY_TOOLS or name.startswith(".venv") or name.endswith(".egg-info")
