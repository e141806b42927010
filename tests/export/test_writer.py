"""A folder's name holds the old content or the new, whole, whatever happens in between."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specedge.export import writer
from specedge.export.writer import check_name, check_space, staged
from specedge.runtime.errors import StorageError, UsageError


def bundle(folder: Path, text: str = "old") -> Path:
    folder.mkdir()
    (folder / "specedge.json").write_text(text)
    return folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def content(folder: Path) -> str:
    return (folder / "specedge.json").read_text()


def make(output: Path, text: str = "new", force: bool = False) -> None:
    with staged(output, force=force) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "weights").write_bytes(b"w" * 1000)
        (folder / "specedge.json").write_text(text)


def test_the_name_appears_when_everything_is_written(tmp_path):
    output = tmp_path / "made" / "on the way" / "bundle"
    with staged(output) as folder:
        (folder / "specedge.json").write_text("new")
        assert not output.exists()
        assert folder.parent == output.parent
    assert content(output) == "new"
    assert names(output.parent) == {"bundle"}


@pytest.mark.parametrize("exchange", [True, False])
def test_force_replaces_a_bundle(tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(writer, "_exchange", lambda *_: False)
    output = bundle(tmp_path / "bundle")
    make(output, force=True)
    assert content(output) == "new"
    assert names(tmp_path) == {"bundle"}


def test_a_taken_name_is_refused_before_the_work(tmp_path):
    output = bundle(tmp_path / "bundle")
    with pytest.raises(StorageError, match=r"exists already; .*--force"), staged(output):
        pytest.fail("the block ran")
    assert content(output) == "old"


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_force_replaces_nothing_but_a_bundle(tmp_path, kind):
    output = tmp_path / "thesis"
    if kind == "file":
        output.write_text("mine")
    else:
        output.mkdir()
        (output / "chapter").write_text("mine")
    with pytest.raises(StorageError, match="not a bundle"):
        make(output, force=True)
    assert (output if kind == "file" else output / "chapter").read_text() == "mine"


def test_force_may_fill_an_empty_folder(tmp_path):
    (tmp_path / "bundle").mkdir()
    make(tmp_path / "bundle", force=True)
    assert content(tmp_path / "bundle") == "new"


def test_a_link_is_followed_not_replaced(tmp_path):
    real = bundle(tmp_path / "real")
    (tmp_path / "link").symlink_to(real)
    make(tmp_path / "link", force=True)
    assert (tmp_path / "link").is_symlink()
    assert content(real) == "new"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), UsageError("no"), RuntimeError("bug"), OSError(errno.EIO, "x")])
def test_nothing_is_left_when_the_block_raises(tmp_path, error):
    output = bundle(tmp_path / "bundle")
    with pytest.raises((type(error), StorageError)), staged(output, force=True) as folder:
        (folder / "half").write_text("half")
        raise error
    assert content(output) == "old"
    assert names(tmp_path) == {"bundle"}


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "disk is full"),
        (errno.EFBIG, "ulimit"),
        (errno.EACCES, "permission"),
        (errno.EROFS, "permission"),
    ],
)
def test_what_the_system_says_becomes_one_line(tmp_path, number, advice):
    with pytest.raises(StorageError, match=advice) as caught, staged(tmp_path / "bundle"):
        raise OSError(number, os.strerror(number))
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == set()


@pytest.mark.parametrize("exchange", [True, False])
def test_every_failing_system_call_leaves_the_old_or_the_new(tmp_path, monkeypatch, exchange):
    """Fail call 1, 2, 3 … until one run goes through untouched."""
    if not exchange:
        monkeypatch.setattr(writer, "_exchange", lambda *_: False)
    for failing in range(1, 100):
        home = tmp_path / str(failing)
        home.mkdir()
        output = bundle(home / "bundle")
        calls = 0

        def counted(function, failing=failing):
            def call(*arguments, **options):
                nonlocal calls
                calls += 1
                if calls == failing:
                    raise OSError(errno.EIO, "injected")
                return function(*arguments, **options)

            return call

        with monkeypatch.context() as patch:
            for owner, name in ((os, "fsync"), (os, "open"), (os, "mkdir"), (Path, "mkdir"), (Path, "rename")):
                patch.setattr(owner, name, counted(getattr(owner, name)))
            try:
                make(output, force=True)
                failed = False
            except StorageError:
                failed = True
        whole = {"old": {"specedge.json"}, "new": {"specedge.json", "sub"}}
        assert names(output) == whole[content(output)]
        assert failed or content(output) == "new"
        if calls < failing:
            assert failing > 8
            return
        make(output, force=True)  # what a failed clean-up left is gone with the next run
        assert names(home) == {"bundle"}
    pytest.fail("never ran through")


def test_flushes_files_then_folders_then_renames_then_the_parent(tmp_path, monkeypatch):
    """What a power cut asks for; killing a process does not show it."""
    order = []
    sync, rename = writer._sync, Path.rename

    def recorded_sync(path):
        order.append(("sync", path.name))
        sync(path)

    def recorded_rename(path, target):
        order.append(("rename", Path(target).name))
        return rename(path, target)

    monkeypatch.setattr(writer, "_sync", recorded_sync)
    monkeypatch.setattr(Path, "rename", recorded_rename)
    make(tmp_path / "bundle")
    stage = order[-3][1]
    assert order[:2] == [("sync", "weights"), ("sync", "sub")]
    assert order[2:] == [("sync", "specedge.json"), ("sync", stage), ("rename", "bundle"), ("sync", tmp_path.name)]


KILLED = """
import os, signal, sys
from pathlib import Path
from specedge.export import writer
output, when = Path(sys.argv[1]), sys.argv[2]
if when == "between":
    writer._exchange = lambda *_: False
    rename = Path.rename
    def dying(path, target):
        result = rename(path, target)
        os.kill(os.getpid(), signal.SIGKILL)
    Path.rename = dying
with writer.staged(output, force=True) as folder:
    (folder / "specedge.json").write_text("new")
    (folder / "half").write_bytes(b"x" * 100)
    if when == "writing":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("when", ["writing", "between"])
def test_the_next_run_cleans_up_after_a_killed_one(tmp_path, when):
    output = bundle(tmp_path / "bundle")
    done = subprocess.run([sys.executable, "-c", KILLED, str(output), when], check=False, cwd=tmp_path)
    assert done.returncode == -9
    assert any(name.endswith(".partial") for name in names(tmp_path))
    if when == "writing":
        assert content(output) == "old"
    with pytest.raises(RuntimeError), staged(output, force=True):
        assert content(output) == "old"  # put back where the run died between two renames
        raise RuntimeError
    assert names(tmp_path) == {"bundle"}
    assert content(output) == "old"


def test_a_run_in_progress_is_left_alone(tmp_path):
    output = tmp_path / "bundle"
    with staged(output) as first:
        (first / "specedge.json").write_text("first")
        make(output, "second")
        assert first.exists()
        with pytest.raises(StorageError, match="another run made it meanwhile"):
            writer._publish(first, output, False)
        shutil.rmtree(output)
    assert content(output) == "first"
    assert names(tmp_path) == {"bundle"}


def test_leftovers_of_other_names_are_left_alone(tmp_path):
    other = tmp_path / ".bundle2.aaaa.partial"
    other.mkdir()
    make(tmp_path / "bundle")
    assert other.exists()


def test_space_is_asked_for_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 10**8, 10**8))
    check_space(tmp_path / "a" / "b", 50 * 10**6)
    with pytest.raises(StorageError, match="100 MB free where about 217 MB are needed"):
        check_space(tmp_path / "a" / "b", 200 * 10**6)


def test_a_folder_that_may_not_be_written(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="permission"):
        make(tmp_path / "bundle")
    tmp_path.chmod(0o700)


def test_a_parent_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError):
        make(tmp_path / "file" / "bundle")
    check_name(tmp_path / "free", False)
