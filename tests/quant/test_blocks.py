"""Blocks of integers: the layout that MatMulNBits reads, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from specedge.quant.blocks import pack_blocks, pack_values, unpack_values
from specedge.quant.grid import Grid, dequantise, round_nearest

FORMS = [(bits, size, symmetric) for bits in (4, 8) for size in (16, 32, 64) for symmetric in (True, False)]


def on_blocks(weight, bits, block_size, symmetric, scale_dtype="float32"):
    grid = Grid("integer", bits, block_size, symmetric=symmetric, scale_dtype=scale_dtype)
    return round_nearest(weight, grid)


@pytest.mark.parametrize(("bits", "block_size", "symmetric"), FORMS)
@pytest.mark.parametrize("width", [192, 200])
def test_packed_values_stand_for_the_rounded_weight(rng, bits, block_size, symmetric, width):
    rounded = on_blocks(rng.standard_normal((7, width)).astype(np.float32), bits, block_size, symmetric)
    blocks = pack_blocks(rounded)
    count = -(-width // block_size)
    assert blocks.values.shape == (7, count, block_size * bits // 8)
    assert (blocks.zero_points is None) == symmetric
    zeros = 1 << (bits - 1) if symmetric else unpack_values(blocks.zero_points, bits)[:, :count, None]
    whole = unpack_values(blocks.values, bits).astype(np.float32) - zeros
    assert ((whole * blocks.scales[..., None]).reshape(7, -1)[:, :width] == dequantise(rounded)).all()


def test_four_bits_are_packed_low_half_first():
    values = np.array([[1, 2, 15, 0, 7]], np.uint8)
    packed = pack_values(values, 4)
    assert packed.tolist() == [[0x21, 0x0F, 0x07]]
    assert unpack_values(packed, 4).tolist() == [[1, 2, 15, 0, 7, 0]]
    assert pack_values(values, 8) is values


def test_other_widths_than_four_and_eight_bits():
    with pytest.raises(ValueError, match="blocks of 3 bits"):
        pack_blocks(on_blocks(np.zeros((1, 32), np.float32), 3, 32, True))


@pytest.mark.parametrize(("bits", "block_size", "symmetric"), FORMS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_onnxruntime_reads_the_same_weight(rng, bits, block_size, symmetric, dtype):
    onnxruntime = pytest.importorskip("onnxruntime")
    helper = pytest.importorskip("onnx.helper")
    numpy_helper = pytest.importorskip("onnx.numpy_helper")

    weight = rng.standard_normal((24, 192)).astype(np.float32)
    rounded = on_blocks(weight, bits, block_size, symmetric, dtype)
    blocks = pack_blocks(rounded)
    scales = blocks.scales.astype(dtype)
    arrays = {"b": blocks.values, "flat": blocks.values.reshape(24, -1), "s": scales, "z": blocks.zero_points}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    zero = ["z"] if "z" in arrays else []
    form = {"bits": bits, "block_size": block_size, "domain": "com.microsoft"}
    nodes = [
        helper.make_node("MatMulNBits", ["x", "b", "s", *zero], ["y"], K=192, N=24, accuracy_level=4, **form),
        helper.make_node(
            "GatherBlockQuantized", ["flat", "i", "s", *zero], ["e"], gather_axis=0, quantize_axis=1, **form
        ),
    ]
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        nodes,
        "blocks",
        [helper.make_tensor_value_info("x", kind, ["m", 192]), helper.make_tensor_value_info("i", 7, ["n"])],
        [helper.make_tensor_value_info("y", kind, ["m", 24]), helper.make_tensor_value_info("e", kind, ["n", 192])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = rng.standard_normal((3, 192)).astype(dtype)
    y, rows = session.run(None, {"x": x, "i": np.array([0, 23, 5])})
    computed = dequantise(rounded)
    assert np.abs(rows.astype(np.float32) - computed[[0, 23, 5]]).max() < (1e-6 if dtype == "float32" else 4e-3)
    exact = x.astype(np.float32) @ computed.T
    # Activations are rounded to 8 bits.
    assert np.linalg.norm(y.astype(np.float32) - exact) < 0.02 * np.linalg.norm(exact)
