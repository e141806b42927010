"""What only a GPU can show; skipped, visibly, where ONNX Runtime has no provider for one."""

from __future__ import annotations

import numpy as np
import pytest

from specedge.runtime.contracts import Draft
from specedge.runtime.engine import Engine
from specedge.runtime.errors import DeviceError
from specedge.runtime.graph import Decoder
from specedge.runtime.machine import look_at_machine
from specedge.runtime.providers import providers_for

pytestmark = pytest.mark.gpu

TIE = 0.25


@pytest.fixture(scope="module", autouse=True)
def _gpu():
    pytest.importorskip("onnxruntime")
    try:
        providers_for("cuda")
    except DeviceError as error:
        pytest.skip(f"no GPU was tested: {error}")
    if look_at_machine().gpu is None:
        pytest.skip("no GPU was tested: the driver knows none")


@pytest.fixture(scope="module", params=["gqa", "onnx24", "plain"])
def bundle(request, tiny_checkpoint, tmp_path_factory):
    from specedge.export.pipeline import ExportOptions, export

    folder = tmp_path_factory.mktemp("cuda") / request.param
    export(str(tiny_checkpoint), folder, ExportOptions(device="cuda", attention=request.param, capacity=128))
    return folder


def decoders(bundle, **options):
    from specedge.runtime.bundle import open_bundle

    opened = open_bundle(bundle)
    spec = opened.manifest.target
    path = opened.path(spec.file)
    return Decoder(path, spec, device="cuda", **options), Decoder(path, spec)


@pytest.mark.parametrize("captured", [True, False])
def test_trees_and_commits_are_those_of_the_cpu(bundle, captured):
    here, there = decoders(bundle, captured=captured)
    tree = Draft((4, 5, 6, 7, 8), (-1, -1, 1, 1, 3))
    for turn in range(6):  # a captured graph is replayed from its third run on
        for draft, kept in ((tree, (1, 3, 4)), (Draft.chain((9, 10)), (0,))):
            ours, theirs = (each.forward([turn + 1, turn + 2], draft).logits for each in (here, there))
            assert np.abs(ours - theirs).max() < TIE
            for each in (here, there):
                each.commit(kept)


@pytest.mark.parametrize("method", ["draft", "ngram", "auto"])
def test_greedy_ids_are_plain_decodings(bundle, method):
    with Engine(bundle) as engine:
        *_, plain = engine.generate("the quick brown fox", method="none", max_tokens=40)
        *_, drafted = engine.generate("the quick brown fox", method=method, max_tokens=40)
    assert drafted.ids == plain.ids
