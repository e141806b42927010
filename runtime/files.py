"""Writes a small file beside and renames it into place, so that an older one stays whole on a failure."""

from __future__ import annotations

import os
from pathlib import Path

from specedge.runtime.errors import StorageError

__all__ = ["check_writable", "write_text"]


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
    target = check_writable(path)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(target)
    except (OSError, UnicodeEncodeError) as error:
        part.unlink(missing_ok=True)
        reason = error.strerror if isinstance(error, OSError) else "it is not valid Unicode"
        raise StorageError(f"{target}: cannot be written: {reason}; give a file in a folder with room") from None
