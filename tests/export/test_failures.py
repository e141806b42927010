"""An export that fails, is interrupted or killed: the old bundle stays whole, and nothing else is left."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from specedge.export import pipeline
from specedge.export.heads_file import write_heads_file
from specedge.export.pipeline import PHASES, ExportOptions, export
from specedge.runtime.bundle import open_bundle
from specedge.runtime.errors import ParityError, StorageError
from specedge.tests.export.bundles import QUICK, is_whole, names
from specedge.tests.heads import WIDE, random_heads

pytest.importorskip("onnx")


class Injector:
    """Fails the n-th call that writes below a folder, once."""

    def __init__(self, failing: int, below: Path) -> None:
        self.failing = failing
        self.below = str(below)
        self.calls = 0
        self.swallowed = False
        self.before_rename = False
        self._renamed = False

    def install(self, patch) -> None:
        from specedge.export import writer

        for owner, name in (
            (os, "fsync"),
            (os, "mkdir"),
            (Path, "mkdir"),
            (Path, "open"),
            (Path, "write_text"),
            (Path, "write_bytes"),
        ):
            patch.setattr(owner, name, self._wrap(getattr(owner, name), name))
        exchange = writer._exchange

        def counted(*arguments):
            self._renamed = True
            return exchange(*arguments)

        patch.setattr(writer, "_exchange", counted)

    def _wrap(self, function, name):
        def call(target, *arguments, **options):
            if isinstance(target, int) or str(target).startswith(self.below):
                self.calls += 1
                if self.calls == self.failing:
                    self.before_rename = not self._renamed
                    self.swallowed = name == "mkdir" and Path(target).is_dir()  # exist_ok: the folder is there
                    raise OSError(errno.EIO, "injected")
            return function(target, *arguments, **options)

        return call


def test_a_wrong_graph_is_not_kept(old, tiny_checkpoint, monkeypatch):
    """Heads in the wrong order pass every check of the graph against itself; PyTorch tells."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from specedge.export import sources

    resolve = sources.resolve

    class Permuted:
        def __init__(self, tensors):
            self.tensors = tensors

        def __getattr__(self, name):
            return getattr(self.tensors, name)

        def __iter__(self):
            return iter(self.tensors)

        def __contains__(self, name):
            return name in self.tensors

        def __getitem__(self, name):
            tensor = self.tensors[name]
            if name.endswith("layers.0.self_attn.q_proj.weight"):
                half = len(tensor) // 2
                return np.concatenate([tensor[half:], tensor[:half]])
            return tensor

    def permuted(*arguments, **options):
        checkpoint = resolve(*arguments, **options)
        object.__setattr__(checkpoint, "tensors", Permuted(checkpoint.tensors))
        return checkpoint

    monkeypatch.setattr(sources, "resolve", permuted)
    with pytest.raises(ParityError, match="against PyTorch, prompt 1: logits differ by"):
        export(str(tiny_checkpoint), old, ExportOptions(drafts=("none",), force=True))
    assert is_whole(old)


def drafts_in(phase):
    """Drafts with which an export passes through a phase: only one that is compensated is calibrated."""
    return ("self-int4+bias",) if phase == "calibrate" else None


def heads_in(phase, folder):
    """Heads, where a phase is theirs."""
    if phase != "write heads":
        return None
    heads = random_heads(WIDE)
    write_heads_file(folder / "heads.safetensors", WIDE, heads.tensors, heads.vocabulary, heads.calibration)
    return str(folder / "heads.safetensors")


@pytest.mark.parametrize("phase", PHASES[1:])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_interrupted_in_each_phase(old, tiny_checkpoint, phase, error, monkeypatch, tmp_path_factory):
    from specedge.export import torch_check

    monkeypatch.setattr(torch_check, "missing_package", lambda _: "torch")

    def interrupt(name, done, total):
        if name == phase:
            raise error(errno.ENOSPC, "No space left on device")

    wanted = (KeyboardInterrupt, StorageError)
    heads = heads_in(phase, tmp_path_factory.mktemp("heads"))
    options = ExportOptions(drafts=drafts_in(phase), heads=heads, capacity=64, force=True)
    with pytest.raises(wanted):
        export(str(tiny_checkpoint), old, options, interrupt)
    if phase == "finish":  # told again when the new bundle stands
        assert open_bundle(old, verify=True)
    assert is_whole(old)


def test_every_failing_system_call(old, tiny_checkpoint, monkeypatch):
    """Fail opening, writing, flushing, making a folder and renaming, the 1st time, the 2nd … until one run ends."""
    before = (old / "specedge.json").read_bytes()
    for failing in range(1, 200):
        injector = Injector(failing, old.parent)
        with monkeypatch.context() as patch:
            injector.install(patch)
            try:
                export(str(tiny_checkpoint), old, ExportOptions(drafts=("none",), verify=False, force=True))
                failed = False
            except StorageError as error:
                failed = True
                assert "\n" not in str(error)
        assert open_bundle(old, verify=True)
        assert failed or injector.calls < failing or injector.swallowed
        if injector.calls < failing:
            assert failing > 30
            assert is_whole(old)
            return
        if failed and injector.before_rename:
            assert (old / "specedge.json").read_bytes() == before
    pytest.fail("never ran through")


@pytest.mark.parametrize("phase", PHASES[1:])
def test_killed_in_each_phase(old, tiny_checkpoint, phase, tmp_path_factory):
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from specedge.export import torch_check\n"
        "from specedge.export.pipeline import ExportOptions, export\n"
        "torch_check.missing_package = lambda _: 'torch'\n"
        "def die(phase, done, total):\n"
        "    if phase == sys.argv[3] and done: os.kill(os.getpid(), signal.SIGKILL)\n"
        "drafts = tuple(sys.argv[5:]) or None\n"
        "options = ExportOptions(drafts=drafts, heads=sys.argv[4] or None, capacity=64, force=True)\n"
        "export(sys.argv[1], Path(sys.argv[2]), options, die)\n"
    )
    heads = heads_in(phase, tmp_path_factory.mktemp("heads")) or ""
    command = [sys.executable, "-c", code, str(tiny_checkpoint), str(old), phase, heads, *(drafts_in(phase) or ())]
    done = subprocess.run(command, check=False, cwd=old.parent, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    open_bundle(old, verify=True)
    assert any(name.endswith(".partial") for name in names(old.parent))
    export(str(tiny_checkpoint), old, ExportOptions(drafts=("none",), verify=False, force=True))
    assert is_whole(old)


LIMITED = (
    "import sys\n"
    "from pathlib import Path\n"
    "from specedge.export.pipeline import ExportOptions, export\n"
    "from specedge.runtime.errors import StorageError\n"
    "try:\n"
    "    export(sys.argv[1], Path(sys.argv[2]), ExportOptions(drafts=('none',), verify=False, force=True))\n"
    "except StorageError as error:\n"
    "    print(error)\n"
    "    sys.exit(7)\n"
)


@pytest.mark.parametrize("limit", [1000, 60_000, 200_000])
def test_a_file_that_may_not_grow(old, tiny_checkpoint, limit):
    resource = pytest.importorskip("resource")
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tiny_checkpoint), str(old)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        check=False,
        cwd=old.parent,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 7, done.stderr
    assert len(done.stdout.strip().splitlines()) == 1
    assert is_whole(old)


def test_a_disk_that_is_full(tiny_checkpoint, tmp_path, monkeypatch):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("may not mount a small disk here")
    try:
        monkeypatch.setattr(pipeline, "check_space", lambda *_: None)
        with pytest.raises(StorageError) as caught:
            export(str(tiny_checkpoint), disk / "bundle", QUICK)
        assert "\n" not in str(caught.value)
        assert "space" in str(caught.value)
        assert not names(disk)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
