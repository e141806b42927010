"""Blocks of integers: the layout that MatMulNBits reads, and the smallest error the format allows."""

from __future__ import annotations

import numpy as np
import pytest

from specedge.quant.blocks import dequantise_blocks, pack_values, quantise_blocks, unpack_values

FORMS = [(bits, size, symmetric) for bits in (4, 8) for size in (16, 32, 64) for symmetric in (True, False)]


def rounded(weight, **form):
    return dequantise_blocks(quantise_blocks(weight, **form))


@pytest.mark.parametrize(("bits", "block_size", "symmetric"), FORMS)
def test_no_weight_is_off_by_more_than_a_step(rng, bits, block_size, symmetric):
    weight = rng.standard_normal((7, 192)).astype(np.float32)
    blocks = quantise_blocks(weight, bits=bits, block_size=block_size, symmetric=symmetric)
    error = np.abs(dequantise_blocks(blocks) - weight).reshape(7, -1, block_size).max(-1)
    # Half a step; a whole one where the middle of an asymmetric range or the short end of a symmetric one is cut.
    assert (error <= np.abs(blocks.scales) * 1.001).all()
    assert (error <= np.abs(blocks.scales) * 0.501).mean() > 0.3
    assert blocks.values.shape == (7, 192 // block_size, block_size * bits // 8)
    assert (blocks.zero_points is None) == symmetric


@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True), (8, False)])
def test_zeros_and_constants_come_back(bits, symmetric):
    weight = np.zeros((4, 64), np.float32)
    weight[1], weight[2], weight[3, 5] = 0.7, -0.3, 1e-30
    back = rounded(weight, bits=bits, block_size=32, symmetric=symmetric)
    assert np.abs(back - weight).max() < 1e-6
    assert np.isfinite(back).all()


@pytest.mark.parametrize(("bits", "tolerance"), [(4, 0.1), (8, 0.007)])
def test_a_width_that_is_no_multiple_of_the_block_is_padded(rng, bits, tolerance):
    weight = rng.standard_normal((5, 70)).astype(np.float32)
    back = rounded(weight, bits=bits, block_size=32, symmetric=False)
    assert back.shape == weight.shape
    assert np.linalg.norm(back - weight) < tolerance * np.linalg.norm(weight)


def test_scales_are_used_as_they_are_stored(rng):
    weight = (rng.standard_normal((16, 64)) * 1e-3).astype(np.float32)
    blocks = quantise_blocks(weight, bits=8, block_size=32, symmetric=True, scale_dtype="float16")
    assert blocks.scales.dtype == np.float16
    # Were weights rounded with the unrounded scale, errors would grow with the weight.
    error = np.abs(dequantise_blocks(blocks) - weight).reshape(16, 2, 32).max(-1)
    assert (error <= np.abs(blocks.scales.astype(np.float32)) * 1.001).all()


def test_many_rows_are_rounded_in_parts_without_a_seam(rng, monkeypatch):
    weight = rng.standard_normal((33, 64)).astype(np.float32)
    whole = quantise_blocks(weight, bits=4, block_size=32, symmetric=False)
    monkeypatch.setattr("specedge.quant.blocks._CHUNK", 640)
    parts = quantise_blocks(weight, bits=4, block_size=32, symmetric=False)
    assert (parts.values == whole.values).all()
    assert (parts.scales == whole.scales).all()
    assert (parts.zero_points == whole.zero_points).all()


def test_four_bits_are_packed_low_half_first():
    values = np.array([[1, 2, 15, 0, 7]], np.uint8)
    packed = pack_values(values, 4)
    assert packed.tolist() == [[0x21, 0x0F, 0x07]]
    assert unpack_values(packed, 4).tolist() == [[1, 2, 15, 0, 7, 0]]
    assert pack_values(values, 8) is values


def test_other_widths_than_four_and_eight_bits():
    with pytest.raises(ValueError, match="blocks of 3 bits"):
        quantise_blocks(np.zeros((1, 32), np.float32), bits=3, block_size=32, symmetric=True)


@pytest.mark.parametrize(("bits", "block_size", "symmetric"), FORMS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_onnxruntime_reads_the_same_weight(rng, bits, block_size, symmetric, dtype):
    onnxruntime = pytest.importorskip("onnxruntime")
    helper = pytest.importorskip("onnx.helper")
    numpy_helper = pytest.importorskip("onnx.numpy_helper")

    weight = rng.standard_normal((24, 192)).astype(np.float32)
    blocks = quantise_blocks(weight, bits=bits, block_size=block_size, symmetric=symmetric, scale_dtype=dtype)
    arrays = {"b": blocks.values, "flat": blocks.values.reshape(24, -1), "s": blocks.scales, "z": blocks.zero_points}
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
    computed = dequantise_blocks(blocks)
    assert np.abs(rows.astype(np.float32) - computed[[0, 23, 5]]).max() < (1e-6 if dtype == "float32" else 4e-3)
    exact = x.astype(np.float32) @ computed.T
    # Activations are rounded to 8 bits.
    assert np.linalg.norm(y.astype(np.float32) - exact) < 0.02 * np.linalg.norm(exact)
