"""A file is written beside and renamed; what is no plain file is left alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from specedge.runtime.errors import StorageError
from specedge.runtime.files import check_writable, write_text


def test_a_link_is_followed(tmp_path):
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    write_text(tmp_path / "link.json", "new")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_text() == "new"


def test_devices_pipes_and_folders_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in (tmp_path / "pipe", tmp_path, os.devnull):
        with pytest.raises(StorageError, match="not a plain file"):
            write_text(name, "x")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)


def test_a_folder_that_is_missing_or_a_file(tmp_path):
    (tmp_path / "file").write_text("x")
    for name in ("none/x", "file/x"):
        with pytest.raises(StorageError, match="its folder does not exist"):
            check_writable(tmp_path / name)


def test_what_is_not_text_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(StorageError, match="not valid Unicode"):
        write_text(path, "\ud800")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]
