"""The weight file: aligned, complete, read back by onnx, and clear about a disk that is full."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from specedge.export.nodes import GraphBuilder
from specedge.export.weights import WeightFile
from specedge.runtime.errors import StorageError

onnx = pytest.importorskip("onnx")


def test_tensors_come_back_from_aligned_places(tmp_path, rng):
    arrays = {
        "large": rng.standard_normal((40, 70)).astype(np.float32),
        "small": np.arange(5, dtype=np.int8),
        "transposed": rng.standard_normal((64, 33)).astype(np.float16).T,
        "packed": rng.integers(0, 255, (8, 2, 512)).astype(np.uint8),
    }
    told = []
    with WeightFile(tmp_path / "w.onnx_data", told.append) as weights:
        for name, array in arrays.items():
            weights.add(name, array)
        weights.alias("flat", "packed", (8, 1024))
        graph = GraphBuilder(weights, "float32")
        for name in (*arrays, "flat"):
            graph.weight(name)
    assert sum(told) == weights.size == (tmp_path / "w.onnx_data").stat().st_size
    (tmp_path / "w.onnx").write_bytes(graph.model("w").SerializeToString())
    tensors = {
        tensor.name: tensor for tensor in onnx.load(tmp_path / "w.onnx", load_external_data=False).graph.initializer
    }
    for name, tensor in tensors.items():
        place = {entry.key: entry.value for entry in tensor.external_data}
        assert place["location"] == "w.onnx_data"
        assert int(place["offset"]) % (4096 if int(place["length"]) >= 4096 else 64) == 0
        expected = arrays["packed"].reshape(8, 1024) if name == "flat" else arrays[name]
        assert (onnx.numpy_helper.to_array(tensor, str(tmp_path)) == expected).all()


def test_a_name_is_given_once(tmp_path):
    with WeightFile(tmp_path / "w") as weights:
        weights.add("a", np.zeros(3, np.float32))
        with pytest.raises(ValueError, match="'a' is written twice"):
            weights.add("a", np.zeros(3, np.float32))


def test_a_file_that_is_there_is_not_overwritten(tmp_path):
    (tmp_path / "w").write_bytes(b"mine")
    with pytest.raises(StorageError, match=r"w: cannot be created \(File exists\)"):
        WeightFile(tmp_path / "w")
    assert (tmp_path / "w").read_bytes() == b"mine"


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    class Full:
        def write(self, _):
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self):
            pass

    weights = WeightFile(tmp_path / "w")
    weights._stream.close()
    monkeypatch.setattr(weights, "_stream", Full())
    with pytest.raises(StorageError, match=r"cannot be written \(No space left on device\); free some space") as caught:
        weights.add("a", np.zeros(9000, np.float32))
    assert "\n" not in str(caught.value)
