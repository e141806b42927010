"""Writes a folder so that its name holds the old content or the new, whole, whatever happens in between.

Everything is written into a folder beside the final name, flushed to the disk, and
renamed. The folder is locked while its writer lives; the kernel drops the lock when
the writer dies, so the next run can tell leftovers from work in progress.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from specedge.runtime.bundle import MANIFEST
from specedge.runtime.errors import SpecEdgeError, StorageError, UsageError

try:
    import fcntl
except ImportError:  # Windows: leftovers are then told by their age
    fcntl = None  # type: ignore[assignment]

__all__ = ["check_apart", "check_makeable", "check_name", "check_space", "staged"]

_SUFFIX = ".partial"
_STALE_SECONDS = 24 * 3600
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_MARGIN = 16 << 20


def check_name(output: Path, force: bool) -> None:
    """Refuses a name that is taken, before any work is done.

    Raises:
        StorageError: The name exists and `force` is not given, or what stands there is no bundle.
    """
    with _storage_errors(output):
        if not output.exists():
            return
        if not force:
            raise StorageError(f"{output}: exists already; choose another name or give --force to replace it")
        if not output.is_dir() or not ((output / MANIFEST).is_file() or not any(output.iterdir())):
            raise StorageError(f"{output}: not a bundle, so --force does not replace it; choose another name")


def check_space(output: Path, needed: int) -> None:
    """Refuses to begin what will not fit.

    Args:
        output: Where the folder will stand; its parent need not exist yet.
        needed: Bytes that will be written.

    Raises:
        StorageError: Less than that is free.
    """
    parent = next(folder for folder in output.absolute().parents if folder.exists())
    free = shutil.disk_usage(parent).free
    if free < needed + _MARGIN:
        raise StorageError(
            f"{parent}: {free / 1e6:,.0f} MB free where about {(needed + _MARGIN) / 1e6:,.0f} MB are needed; "
            "free some space or choose another folder"
        )


def check_makeable(output: Path) -> None:
    """Refuses a folder that cannot be made, before any work is done. Its parent is made where it lacks.

    Raises:
        StorageError: The name is taken, or the disk refuses.
    """
    with _storage_errors(output):
        check_name(output, force=False)
        output.parent.mkdir(parents=True, exist_ok=True)
        folder, lock = _open_stage(output)
        _give_up(folder, lock)


def check_apart(kept: Path, output: Path) -> None:
    """Raises UsageError where a folder that is to be kept would lie in a bundle, and be replaced with it."""
    if output == kept or output in kept.parents:
        raise UsageError(f"{kept}: lies in the bundle {output}, which is written anew; give a folder beside it")


@contextmanager
def staged(output: Path, *, force: bool = False) -> Iterator[Path]:
    """A fresh folder that becomes `output` when the block ends, and vanishes when it raises.

    Args:
        output: The final name. Its parent is made where it lacks.
        force: Replace a bundle that stands there.

    Raises:
        StorageError: The name is taken, or the disk refuses (full, read-only, no permission).
    """
    output = Path(os.path.realpath(output))
    with _storage_errors(output):
        check_name(output, force)
        output.parent.mkdir(parents=True, exist_ok=True)
        _clean_leftovers(output)
        folder, lock = _open_stage(output)
    try:
        with _storage_errors(output):
            yield folder
            _sync_tree(folder)
            _publish(folder, output, force)
    finally:
        # after publishing this name holds the replaced bundle or nothing
        _give_up(folder, lock)


@contextmanager
def _storage_errors(output: Path) -> Iterator[None]:
    """Turns what the operating system says into one line that says what to do."""
    try:
        yield
    except SpecEdgeError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "the disk is full; free some space or choose another folder"
        elif error.errno == errno.EFBIG:
            hint = "a file is larger than the file system or a limit (ulimit -f) allows; choose another folder"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            hint = "no permission to write there; choose another folder"
        else:
            hint = f"{error.strerror or error}; choose another folder"
        raise StorageError(f"{output}: {hint}") from error


def _open_stage(output: Path) -> tuple[Path, int | None]:
    """Makes and locks a folder beside `output`; a name that another run's cleaning took is given up."""
    while True:
        folder = output.with_name(f".{output.name}.{secrets.token_hex(6)}{_SUFFIX}")
        folder.mkdir(mode=0o755)
        if fcntl is None:
            return folder, None
        lock = None
        try:
            lock = os.open(folder, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_ino == folder.stat().st_ino:
                return folder, lock
        except (FileNotFoundError, BlockingIOError):
            pass  # a cleaning run came between mkdir and flock
        if lock is not None:
            os.close(lock)


def _give_up(folder: Path, lock: int | None) -> None:
    """Removes a folder of `_open_stage`."""
    shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        os.close(lock)


def _clean_leftovers(output: Path) -> None:
    """Removes what runs that were killed left beside `output`."""
    for folder in output.parent.glob(f".{_escape(output.name)}.*{_SUFFIX}"):
        with suppress(OSError):  # another run cleans at the same time, or the lock is held
            if folder.is_symlink() or not folder.is_dir():
                continue
            if fcntl is None:
                if time.time() - folder.stat().st_mtime > _STALE_SECONDS:
                    shutil.rmtree(folder)
                continue
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _restore(folder, output)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _restore(folder: Path, output: Path) -> None:
    """Puts a bundle back that was moved aside by a run that died before the new one stood in its place."""
    aside = folder / "old"
    if aside.is_dir() and not output.exists():
        aside.rename(output)


def _publish(folder: Path, output: Path, force: bool) -> None:
    """Gives the finished folder its name, and flushes the parent so that the name survives a power cut."""
    if force and output.exists():
        check_name(output, force)
        if not _exchange(folder, output):
            _swap(folder, output)
    else:
        try:
            folder.rename(output)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise StorageError(f"{output}: another run made it meanwhile; that one stands") from None
            raise
    _sync(output.parent)


def _exchange(folder: Path, output: Path) -> bool:
    """Swaps two names in one step (Linux, renameat2); False where the system cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name == "posix" else None
    if call is None:
        return False
    return bool(call(_AT_FDCWD, os.fsencode(folder), _AT_FDCWD, os.fsencode(output), _RENAME_EXCHANGE) == 0)


def _swap(folder: Path, output: Path) -> None:
    """Two renames where one step is not to be had; the next run's `_restore` covers a death between them."""
    shelter, lock = _open_stage(output)
    aside = shelter / "old"
    try:
        output.rename(aside)
        folder.rename(output)
    finally:
        if aside.exists() and not output.exists():
            aside.rename(output)
        _give_up(shelter, lock)


def _sync_tree(folder: Path) -> None:
    """Flushes every file, then every folder, children first."""
    for root, _, files in os.walk(folder, topdown=False):
        for name in files:
            _sync(Path(root) / name)
        _sync(Path(root))


def _sync(path: Path) -> None:
    if stat.S_ISDIR(path.stat().st_mode) and os.name != "posix":
        return  # folders cannot be opened there
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _escape(name: str) -> str:
    """A file name as a pattern that matches only itself."""
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)
