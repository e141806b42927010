"""The promise for other kinds of drafts, on the real model: some of its layers, and a model with a cache of its own."""

from __future__ import annotations

import dataclasses
import shutil

import pytest

from specedge.runtime.bundle import FileEntry, open_bundle, write_manifest
from specedge.runtime.engine import Engine

pytestmark = pytest.mark.model

KEPT = (*range(3), *range(7, 30))
TOKENS = 48


@pytest.fixture(scope="module")
def bundle(model_bundle, tmp_path_factory):
    """The real model's bundle with two more drafts: 26 of its 30 layers in its cache, and an INT8 copy with its own."""
    from specedge.export.decoder import write_decoder
    from specedge.export.layer_draft import keep_layers
    from specedge.export.sources import resolve

    folder = tmp_path_factory.mktemp("kinds") / "bundle"
    shutil.copytree(model_bundle, folder, ignore=shutil.ignore_patterns("drafts"))
    manifest = open_bundle(model_bundle).manifest
    checkpoint = resolve("smollm2-135m")
    drafts = {}
    for name, source, changes in (
        ("layers-26", keep_layers(checkpoint, KEPT), {"shares_cache": True, "cache_layers": KEPT}),
        ("copy", checkpoint, {}),
    ):
        spec = write_decoder(
            source,
            folder / "drafts" / name,
            stem="draft",
            precision="int8",
            capacity=manifest.target.capacity,
            draft=True,
        )
        drafts[name] = dataclasses.replace(spec, file=f"drafts/{name}/{spec.file}", **changes)
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "specedge.json"]
    files = {path.relative_to(folder).as_posix(): FileEntry(path.stat().st_size, "0" * 64) for path in paths}
    write_manifest(folder, dataclasses.replace(manifest, drafts=drafts, files=files))
    return folder


def test_greedy_ids_are_plain_decodings(bundle, dev_prompts):
    accepted = dict.fromkeys(("draft:layers-26", "draft:copy"), 0)
    evaluated = dict.fromkeys(accepted, 0)
    with Engine(bundle, verify=False) as engine:
        for prompt in dev_prompts[:80:10]:
            ids = engine.text.chat_prompt([{"role": "user", "content": prompt["turns"][0]}])
            *_, plain = engine.generate(ids, method="none", max_tokens=TOKENS)
            for method in accepted:
                *_, finish = engine.generate(ids, method=method, max_tokens=TOKENS)
                assert finish.ids == plain.ids
                assert finish.stats.notes == ()
                accepted[method] += finish.stats.accepted
                evaluated[method] += finish.stats.evaluated
    alphas = {method: accepted[method] / evaluated[method] for method in accepted}
    print(alphas)
    assert 0.6 < alphas["draft:layers-26"] < alphas["draft:copy"]
    assert alphas["draft:copy"] > 0.85
