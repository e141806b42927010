"""A product with a scale for each row gives a row of zeros zeros, whatever its neighbours are."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx", reason="writing a graph needs the export extra")

from specedge.export.nodes import GraphBuilder
from specedge.export.products import store_product
from specedge.export.weights import WeightFile
from specedge.quant.grid import Grid, round_nearest
from specedge.quant.layer import Layer
from specedge.tests.reference import session


@pytest.mark.parametrize("width", [16, 64, 77])
def test_a_row_of_zeros_gives_zeros(tmp_path, width):
    rng = np.random.default_rng(width)
    grid = Grid("integer", 8, narrow=True)
    matrix = rng.standard_normal((24, width)).astype(np.float32)
    with WeightFile(tmp_path / "weights") as weights:
        product = store_product(weights, "w", Layer(round_nearest(matrix, grid)), "float32", exact=False)
        graph = GraphBuilder(weights, "float32")
        x = graph.input("x", "float32", ["rows", width])
        graph.op("Identity", product.multiply(graph, x), name="y")
        graph.output("y", "float32", ["rows", 24])
        (tmp_path / "g.onnx").write_bytes(graph.model("product").SerializeToString())
    rows = rng.standard_normal((5, width)).astype(np.float32)
    rows[1] = rows[4] = 0
    rows[3] *= 1e-30
    (y,) = session(tmp_path / "g.onnx").run(None, {"x": rows})
    assert (y[[1, 4]] == 0).all()
    expected = rows.astype(np.float64) @ matrix.T
    for row in (0, 2, 3):
        assert np.abs(y[row] - expected[row]).max() < 0.03 * np.abs(expected[row]).max()
