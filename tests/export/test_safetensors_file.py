"""Safetensors files: damaged headers, other number formats, files that change."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from specedge.export.safetensors_file import SafetensorsFile
from specedge.export.sources import resolve
from specedge.runtime.errors import CheckpointError, SpecEdgeError, UnsupportedModelError
from specedge.tests.tiny import write_tiny_checkpoint


@pytest.fixture
def folder(tmp_path):
    return write_tiny_checkpoint(tmp_path / "tiny")


def pack(path: Path, header: object, data: bytes = b"", text: bytes | None = None) -> Path:
    body = text if text is not None else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(body)) + body + data)
    return path


def entry(first=0, last=8, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [first, last]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry()}, bytes(7), "truncated"),
        ({"a": entry()}, bytes(9), "behind its last tensor"),
        ({"a": entry(), "b": entry(4, 12)}, bytes(12), "overlap or leave a gap"),
        ({"a": entry(), "b": entry(12, 20)}, bytes(20), "overlap or leave a gap"),
        ({"a": entry(shape=(3,))}, bytes(8), "do not fit"),
        ({"a": entry(shape=(-2,))}, bytes(8), "do not fit"),
        ({"a": entry(shape=(1 << 70,))}, bytes(8), "do not fit"),
        ({"a": entry(last=8.0)}, bytes(8), "do not fit"),
        ({"a": {"dtype": "F32"}}, bytes(8), "do not fit"),
        ({"a": 7}, bytes(8), "do not fit"),
        ({"a": entry(dtype="F4")}, bytes(8), "unknown format 'F4'"),
        ({"a": entry(dtype=None)}, bytes(8), "unknown format None"),
        ({"\x1b]0;x": entry()}, bytes(8), "control characters"),
    ],
)
def test_damaged_safetensors(tmp_path, header, data, message):
    with pytest.raises(CheckpointError, match=message) as error:
        SafetensorsFile(pack(tmp_path / "x.safetensors", header, data))
    assert "x.safetensors" in str(error.value) and "\x1b" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [(b'{"a": {}, "a": {}}', "stands twice"), (b"[1]", "JSON object"), (b"\xff", "UTF-8"), (b"{", "not valid JSON")],
)
def test_damaged_headers(tmp_path, text, message):
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFile(pack(tmp_path / "x.safetensors", None, text=text))


@pytest.mark.parametrize(
    "content", [b"", b"\x01", struct.pack("<Q", 1 << 63), struct.pack("<Q", 99) + b"{}", b"\x80\x04pickle..."]
)
def test_files_that_are_no_safetensors(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or no safetensors file") as error:
        resolve(str(folder))
    assert "\n" not in str(error.value)


def test_other_number_formats_are_refused_when_they_are_read(tmp_path):
    file = SafetensorsFile(pack(tmp_path / "x.safetensors", {"ids": entry(dtype="I64", shape=(1,))}, bytes(8)))
    with pytest.raises(UnsupportedModelError, match="tensor ids is I64"):
        file.read("ids")


def test_nan_and_a_shrinking_file_are_errors(tmp_path):
    path = pack(tmp_path / "x.safetensors", {"a": entry()}, struct.pack("<ff", 1.0, np.nan))
    file = SafetensorsFile(path)
    with pytest.raises(CheckpointError, match=r"tensor a of .* NaN"):
        file.read("a")
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="became shorter"):
        file.read("a")


def test_empty_tensors_are_tensors(tmp_path):
    path = pack(tmp_path / "x.safetensors", {"a": entry(0, 0, (0, 4)), "b": entry()}, bytes(8))
    assert SafetensorsFile(path).read("a").shape == (0, 4)


def test_damaged_bytes_never_give_anything_but_our_errors(folder, rng):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    refused_count = 0
    for _ in range(300):
        changed = bytearray(data)
        changed[rng.integers(0, header)] = rng.integers(0, 256)
        path.write_bytes(changed)
        try:
            tensors = resolve(str(folder)).tensors
            for name in tensors:
                tensors[name]
        except SpecEdgeError:
            refused_count += 1
    assert refused_count > 100
