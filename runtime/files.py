"""Where files go: beside, then renamed into place, so that an older one stays whole; and the user's cache."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from specedge.runtime.errors import StorageError

__all__ = ["cache_folder", "check_writable", "write_bytes", "write_text"]

_ROOM = "give a file in a folder with room"


def cache_folder() -> Path:
    """Where models are kept: $SPECEDGE_CACHE, else $XDG_CACHE_HOME/specedge, else the system's folder for caches."""
    if own := os.environ.get("SPECEDGE_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "specedge"
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "specedge" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "specedge"
    return Path.home() / ".cache" / "specedge"


def check_writable(path: str | os.PathLike[str]) -> Path:
    """The file that a name stands for, links followed, if it can be written.

    Raises:
        StorageError: Its folder is missing or refuses, or it is something else than a plain file.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise StorageError(f"{target}: not a plain file (a folder or a device); give another name")
    if not target.parent.is_dir():
        raise StorageError(f"{target}: its folder does not exist; make it, or give another name")
    if not os.access(target.parent, os.W_OK):
        raise StorageError(f"{target}: its folder cannot be written to; give another name")
    return target


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text file as UTF-8.

    Raises:
        StorageError: It cannot be written; what stood there before is untouched.
    """
    try:
        content = text.encode("utf-8")
    except UnicodeEncodeError:
        target = check_writable(path)
        raise StorageError(f"{target}: cannot be written: it is not valid Unicode; {_ROOM}") from None
    write_bytes(path, content)


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file.

    Raises:
        StorageError: As `write_text`.
    """
    target = check_writable(path)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise StorageError(f"{target}: cannot be written: {error.strerror}; {_ROOM}") from None
