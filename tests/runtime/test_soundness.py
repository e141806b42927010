"""NaN and infinity planted in a draft's weights: drafting ends with a note, and the text is plain decoding's."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from specedge.runtime.drafters import registry
from specedge.runtime.engine import Engine
from specedge.runtime.errors import BundleError, NumericError
from specedge.runtime.soundness import check_weights

pytest.importorskip("onnx", reason="planting needs the export extra")

import ml_dtypes
import onnx

from specedge.export.options import ExportOptions
from specedge.export.pipeline import export
from specedge.tests.tiny import TinyLlama, write_tiny_checkpoint

PROMPT = "the quick brown fox"
TOKENS = 24
WAYS = {
    "greedy": {},
    "exact": {"temperature": 0.8, "seed": 5},
    "rejection": {"temperature": 0.8, "seed": 5, "accept": "rejection"},
}
DRAFTS = ("self-int8", "self-int8-static", "self-int4", "self-fp8", "layers-2", "layers-3:fp32", "small:fp32")
FLOATS = {1: np.float32, 10: np.float16, 17: ml_dtypes.float8_e4m3fn}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A tiny model with drafts of every kind."""
    home = tmp_path_factory.mktemp("planted")
    target = write_tiny_checkpoint(home / "target", TinyLlama(layers=4))
    small = write_tiny_checkpoint(home / "small", TinyLlama(layers=1, seed=3, context=256))
    drafts = tuple(f"{small}:fp32" if draft == "small:fp32" else draft for draft in DRAFTS)
    export(str(target), home / "bundle", ExportOptions(drafts=drafts, verify=False, capacity=128))
    return home / "bundle"


@pytest.fixture(scope="module")
def plain(bundle):
    """What plain decoding says, each way."""
    with Engine(bundle, threads=1, verify=False) as engine:
        return {way: engine_ids(engine, "none", way)[0] for way in WAYS}


def engine_ids(engine, method, way):
    engine.reset()
    *_, finish = engine.generate(PROMPT, method=method, max_tokens=TOKENS, **WAYS[way])
    return finish.ids, finish.stats


def floats(path):
    """Tensors of floats in a graph's external file."""
    graph = onnx.load(str(path), load_external_data=False).graph
    return [tensor for tensor in graph.initializer if tensor.data_type in FLOATS and tensor.external_data]


def plant(path, tensor, value):
    """Overwrites the middle number of a stored tensor."""
    where = {entry.key: entry.value for entry in tensor.external_data}
    dtype = np.dtype(FLOATS[tensor.data_type])
    count = int(where["length"]) // dtype.itemsize
    with (path.parent / where["location"]).open("r+b") as file:
        file.seek(int(where["offset"]) + count // 2 * dtype.itemsize)
        file.write(np.array(value, dtype).tobytes())


@pytest.fixture
def copied(bundle, tmp_path):
    return shutil.copytree(bundle, tmp_path / "bundle")


@pytest.mark.parametrize("value", [np.nan, np.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_a_planted_draft_is_turned_off_and_the_text_stays(copied, plain, draft, value):
    path = copied / "drafts" / draft / "draft.onnx"
    tensors = floats(path)
    plant(path, tensors[len(tensors) // 2], value)
    with Engine(copied, threads=1, verify=False) as engine:
        for way in WAYS:
            ids, stats = engine_ids(engine, f"draft:{draft}", way)
            assert stats.proposed == 0
            assert len(stats.notes) == 1
            assert "decoding plainly: NumericError" in stats.notes[0]
            assert "holds NaN or infinity" in stats.notes[0]
            if way != "rejection":  # its draws are of another stream where nothing is drafted
                assert ids == plain[way]
        assert engine_ids(engine, "none", "rejection")[0] == engine_ids(engine, f"draft:{draft}", "rejection")[0]


@pytest.mark.parametrize("draft", ["self-int8", "self-int8-static", "self-int4", "self-fp8", "layers-2", "small:fp32"])
def test_what_a_planted_draft_computes_never_reaches_the_target(copied, plain, draft, monkeypatch):
    """Nobody looks at the weights: NaN runs through the draft and into the cache that it shares."""
    monkeypatch.setattr(registry, "check_weights", lambda path: None)
    path = copied / "drafts" / draft / "draft.onnx"
    data = path.with_name("draft.onnx_data")
    sound = data.read_bytes()
    failures = 0
    kinds = {}
    for tensor in floats(path):
        kinds[tensor.name.replace(".3.", ".").replace(".2.", ".").replace(".1.", ".").replace(".0.", ".")] = tensor
    for tensor in kinds.values():
        data.write_bytes(sound)
        plant(path, tensor, np.nan)
        with Engine(copied, threads=1, verify=False) as engine:
            for way in ("greedy", "exact"):
                ids, stats = engine_ids(engine, f"draft:{draft}", way)
                assert ids == plain[way], tensor.name
                failures += bool(stats.notes)
            assert engine_ids(engine, "none", "greedy")[0] == plain["greedy"]
    assert failures > 0


def test_rows_of_nan_behind_the_committed_ones_do_not_change_a_pass(bundle):
    """0 * NaN is NaN: no pass may multiply rows that a broken draft left beyond its own."""
    from specedge.runtime.contracts import EMPTY_DRAFT, Draft

    with Engine(bundle, threads=1, verify=False) as engine:
        target = engine.target
        tokens = list(range(20, 50))
        target.forward(tokens)
        chain = Draft.chain(range(60, 70))
        tree = Draft(tuple(range(60, 70)), (-1, -1, 0, 0, 1, 1, 2, 3, 3, 6))
        for draft in (EMPTY_DRAFT, Draft.chain([60, 61, 62]), chain, tree):
            seen = []
            for rest in (0.0, np.nan, np.inf):
                target.rewind(len(tokens) - 1)
                target.pool[:, :, :, target.length :] = rest
                seen.append(target.forward(tokens[-1:], draft).logits.copy())
            assert np.isfinite(seen[0]).all()
            assert np.array_equal(seen[0], seen[1])
            assert np.array_equal(seen[0], seen[2])


def test_every_graph_of_a_sound_bundle_is_sound(bundle):
    for path in bundle.rglob("*.onnx"):
        check_weights(path)


TYPES = {"float32": np.nan, "float16": -np.inf, "float64": np.inf, "bfloat16": np.nan}
TYPES |= {"float8_e4m3fn": np.nan, "float8_e5m2": np.inf, "float8_e4m3fnuz": np.nan, "float8_e5m2fnuz": np.nan}


@pytest.mark.parametrize("outside", [False, True], ids=["inside", "outside"])
@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_of_float(tmp_path, dtype, outside):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    finite = np.array([0.0, -0.0, 1.5, -2.0, *np.linspace(-50, 50, 301)]).astype(kind)
    largest = float(ml_dtypes.finfo(kind).max)
    finite[4:6] = np.array([largest, -largest]).astype(kind)
    path = write_graph(tmp_path / "graph.onnx", finite, outside)
    if not (kind.itemsize == 1 and dtype.endswith("fnuz")):  # numpy writes -0 as 0 there
        check_weights(path)
    finite[77] = TYPES[dtype]
    path = write_graph(tmp_path / "graph.onnx", finite, outside)
    with pytest.raises(NumericError, match=r"graph\.onnx: weight 'w' holds NaN or infinity; export the bundle again"):
        check_weights(path)


def write_graph(path, values, outside):
    tensor = onnx.numpy_helper.from_array(values, "w")
    if outside:
        data = path.with_suffix(".data")
        data.write_bytes(b"\0" * 64 + tensor.raw_data)
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in {"location": data.name, "offset": 64, "length": values.nbytes}.items():
            tensor.external_data.add(key=key, value=str(value))
    model = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [], [tensor]))
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"location": "../x", "length": "4"}, "is not beside it"),
        ({"location": "graph.data", "length": "99999"}, "is shorter than it says"),
        ({"location": "graph.data", "offset": "-4", "length": "4"}, "is shorter than it says"),
        ({"location": "graph.data", "length": "7"}, "cannot be read"),
        ({"location": "graph.data", "length": "many"}, "cannot be read"),
    ],
)
def test_weights_that_are_not_where_the_graph_says(tmp_path, entries, message):
    path = write_graph(tmp_path / "graph.onnx", np.zeros(4, np.float32), outside=True)
    model = onnx.load(str(path), load_external_data=False)
    tensor = model.graph.initializer[0]
    del tensor.external_data[:]
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(BundleError, match=message):
        check_weights(path)


def test_a_graph_that_is_cut_or_no_graph(tmp_path):
    path = write_graph(tmp_path / "graph.onnx", np.zeros(400, np.float32), outside=False)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BundleError, match="its weights cannot be read"):
        check_weights(path)
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(BundleError, match="its weights cannot be read"):
        check_weights(path)
