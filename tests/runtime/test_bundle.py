"""A manifest is a closed schema and its files are what it says: every damage has a one-line error."""

from __future__ import annotations

import hashlib
import json
import os

import pytest

from specedge.runtime.bundle import MANIFEST, FileEntry, GraphSpec, Manifest, open_bundle, write_manifest
from specedge.runtime.errors import BundleError, BundleFileError


@pytest.fixture
def folder(tmp_path):
    """A bundle whose files are bytes without meaning: nothing here opens them."""
    root = tmp_path / "bundle"
    (root / "onnx").mkdir(parents=True)
    contents = {"onnx/target.onnx": b"target", "onnx/model.onnx": b"model", "config.json": b"{}"}
    for name, data in contents.items():
        (root / name).write_bytes(data)
    spec = GraphSpec("onnx/target.onnx", "gqa", "fp32", 2, 1, 8, 16, 40, 64, "float32", 6)
    files = {name: FileEntry(len(data), hashlib.sha256(data).hexdigest()) for name, data in contents.items()}
    write_manifest(
        root, Manifest("m", "folder:m", "llama", "cpu", spec, {}, "onnx/model.onnx", 40, None, (2, 0), files)
    )
    return root


def edit(folder, change):
    path = folder / MANIFEST
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_a_manifest_survives_writing_and_reading(folder):
    manifest = open_bundle(folder, verify=True).manifest
    assert manifest.eos_token_ids == (2, 0)
    assert manifest.target.cache_bytes == 2 * 2 * 1 * 64 * 8 * 4
    assert open_bundle(folder).text("config.json") == "{}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format=2), "format 2 where this version reads 1"),
        (lambda d: d.update(custom_op_library="x.so"), "unknown key 'custom_op_library'"),
        (lambda d: d["target"].update(provider_options={}), "unknown key 'provider_options'"),
        (lambda d: d["target"].pop("layers"), "layers is missing"),
        (lambda d: d["target"].update(layers="2"), "layers is '2'"),
        (lambda d: d["target"].update(layers=True), "layers is True"),
        (lambda d: d["target"].update(capacity=1 << 40), "capacity is"),
        (lambda d: d["target"].update(vocab_size=41), "has 41 tokens where 40 belong"),
        (lambda d: d["target"].update(flavour="paged"), "flavour 'paged'"),
        (lambda d: d.update(device="npu"), "device 'npu'"),
        (lambda d: d.update(eos_token_ids=[40]), "outside the vocabulary"),
        (lambda d: d.update(eos_token_ids=["2"]), "outside the vocabulary"),
        (lambda d: d.update(standard="../x.onnx"), "leaves the bundle"),
        (lambda d: d["files"].update({"../secret": {"size": 1, "sha256": "0"}}), "leaves the bundle"),
        (lambda d: d["files"].update({"/etc/passwd": {"size": 1, "sha256": "0"}}), "leaves the bundle"),
        (lambda d: d["files"].update({"C:/x": {"size": 1, "sha256": "0"}}), "leaves the bundle"),
        (lambda d: d["files"].update({"a\\b": {"size": 1, "sha256": "0"}}), "not portable"),
        (lambda d: d["files"].update({"CONFIG.json": d["files"]["config.json"]}), "differ only in case"),
        (lambda d: d["drafts"].update({"../x": d["target"]}), "characters other than"),
        (lambda d: d["files"].pop("onnx/target.onnx"), "no 'onnx/target.onnx' in this bundle"),
        (lambda d: d.update(files=[]), "files is not an object"),
        (lambda d: d.update(name=3), "name is 3"),
        (lambda raw: raw["target"].update(recipe="int8\x1b[2J"), "recipe has characters other than"),
        (lambda raw: raw["target"].update(recipe=8), "recipe is 8"),
    ],
)
def test_a_manifest_that_is_not_of_the_schema(folder, change, message):
    edit(folder, change)
    with pytest.raises(BundleError, match=message) as caught:
        open_bundle(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"format": NaN}',
        '{"format": 1, "format": 1}',
        '{"format": 1e999}',
        "[" * 100_000,
        '{"format": ' + "9" * 5_000 + "}",
        '{"format": {"a": {"b": "\x1b]0;x"}}}',
        "\xff\xfe",
    ],
)
def test_a_manifest_that_is_not_json(folder, text):
    (folder / MANIFEST).write_bytes(text.encode("latin-1"))
    with pytest.raises(BundleError) as caught:
        open_bundle(folder)
    assert str(caught.value).isprintable()


def test_missing_truncated_and_altered_files(folder):
    path = folder / "onnx/target.onnx"
    path.write_bytes(b"tarGet")
    open_bundle(folder)
    with pytest.raises(BundleError, match=r"target\.onnx: altered"):
        open_bundle(folder, verify=True)
    path.write_bytes(b"targe")
    with pytest.raises(BundleError, match="5 bytes where 6 belong"):
        open_bundle(folder)
    path.unlink()
    with pytest.raises(BundleFileError, match=r"target\.onnx: missing"):
        open_bundle(folder)


def test_links_and_devices_are_not_files_of_a_bundle(folder, tmp_path):
    path = folder / "onnx/target.onnx"
    outside = tmp_path / "secret"
    outside.write_bytes(b"target")
    for make in (os.symlink, os.link):
        path.unlink()
        make(outside, path)
        with pytest.raises(BundleError, match="not a plain file of its own"):
            open_bundle(folder)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(BundleError, match="not a plain file of its own"):
        open_bundle(folder)


def test_a_linked_folder_inside(folder, tmp_path):
    (folder / "onnx").rename(tmp_path / "elsewhere")
    (folder / "onnx").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleError, match="behind a link"):
        open_bundle(folder)


def test_what_is_no_bundle(tmp_path):
    with pytest.raises(BundleFileError, match="no such folder; make a bundle with"):
        open_bundle(tmp_path / "nowhere")
    with pytest.raises(BundleError, match=r"not a bundle \(no specedge\.json\)"):
        open_bundle(tmp_path)
    with pytest.raises(BundleError, match="a file, not a bundle; make one of it with: specedge export"):
        open_bundle(__file__)


def test_only_a_draft_shares_the_targets_cache(folder):
    edit(folder, lambda d: d["target"].update(shares_cache=True))
    with pytest.raises(BundleError, match="cannot share the target's cache"):
        open_bundle(folder)
    edit(folder, lambda d: d["target"].update(shares_cache=1))
    with pytest.raises(BundleError, match="shares_cache is 1"):
        open_bundle(folder)


def sharing(folder, **changes):
    """Adds a draft of two layers that shares the cache of a target of four."""

    def change(manifest):
        manifest["target"].update(layers=4)
        manifest["drafts"]["layers-2"] = {**manifest["target"], "layers": 2, "shares_cache": True, **changes}

    edit(folder, change)


def test_a_draft_names_the_layers_it_kept(folder):
    sharing(folder, cache_layers=[0, 3])
    (draft, *_) = open_bundle(folder).manifest.drafts.values()
    assert draft.cache_layers == (0, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache_layers": [0, 4]}, "not all within the target's 4"),
        ({"cache_layers": [-1, 2]}, "not all within the target's 4"),
        ({"cache_layers": [3, 0]}, "not the layers of the 2 it has, in order"),
        ({"cache_layers": [1, 1]}, "not the layers of the 2 it has, in order"),
        ({"cache_layers": [1]}, "not the layers of the 2 it has, in order"),
        ({"cache_layers": [0, 1], "shares_cache": False}, "not the layers of the 2 it has, in order"),
        ({"cache_layers": [0, True]}, "not whole numbers"),
        ({"cache_layers": [0, "1"]}, "not whole numbers"),
        ({"cache_layers": 2}, "cache_layers is 2"),
        ({"cache_layers": [0, 3], "vocab_size": 7}, "has 7 tokens where"),
    ],
)
def test_layers_that_a_draft_cannot_have_kept(folder, changes, message):
    sharing(folder, **changes)
    with pytest.raises(BundleError, match=message):
        open_bundle(folder)


def test_a_draft_with_a_cache_of_its_own_may_be_padded_to_another_width(folder):
    sharing(folder, shares_cache=False, vocab_size=7)
    (draft, *_) = open_bundle(folder).manifest.drafts.values()
    assert draft.vocab_size == 7
