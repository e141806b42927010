"""Whole bundles for GPUs, exported and then run on the CPU: as far as that goes without one."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from specedge.cli import main
from specedge.export.pipeline import ExportOptions, export
from specedge.runtime.engine import Engine
from specedge.runtime.errors import DeviceError, UsageError

pytest.importorskip("onnx")


@pytest.mark.parametrize(
    ("precision", "attention"), [("fp16", "onnx24"), ("fp16", "plain"), ("int8", "plain"), ("fp8-e4m3", "onnx24")]
)
def test_a_bundle_for_tensorrt_passes_its_checks(tiny_checkpoint, tmp_path, precision, attention):
    """Its rounded forms too, whose steps calibration finds; and a smaller cache than theirs is refused at once."""
    options = ExportOptions(device="tensorrt", precision=precision, attention=attention, capacity=96)
    manifest = export(str(tiny_checkpoint), tmp_path / "bundle", options)
    assert (manifest.target.flavour, manifest.target.fixed) == (attention, True)
    with Engine(tmp_path / "bundle", device="cpu") as engine:
        *_, plain = engine.generate("the quick brown fox", method="none", max_tokens=24)
        *_, drafted = engine.generate("the quick brown fox", method="ngram", max_tokens=24)
    assert drafted.ids == plain.ids
    with pytest.raises(UsageError, match="compiled for 96 rows"):
        Engine(tmp_path / "bundle", device="cpu", capacity=64)


@pytest.mark.parametrize("attention", ["gqa", "plain"])
def test_a_bundle_in_bfloat16_is_checked_where_nothing_runs_it(tiny_checkpoint, tmp_path, attention):
    """The checks run it on the CPU node by node; an engine there says what to do."""
    options = ExportOptions(device="cuda", precision="bf16", attention=attention, capacity=96)
    manifest = export(str(tiny_checkpoint), tmp_path / "bundle", options)
    assert manifest.target.cache_dtype == "bfloat16"
    assert manifest.checks["self"].keys() >= {"pieces", "tree", "standard"}
    assert manifest.checks["pytorch"]["status"] in ("passed", "skipped")
    draft = manifest.drafts["self-int4:bf16"]
    assert (draft.cache_dtype, draft.shares_cache) == ("bfloat16", True)
    assert sorted(path.name for path in (tmp_path / "bundle").rglob(".*")) == []
    with pytest.raises(DeviceError, match=r"bfloat16 runs on CUDA alone; export .* another --precision, as fp16"):
        Engine(tmp_path / "bundle", device="cpu")


def test_a_draft_that_cannot_run_here_is_not_tuned(tiny_checkpoint, tmp_path):
    options = ExportOptions(draft_device="tensorrt", drafts=("self-fp16",), capacity=192)
    export(str(tiny_checkpoint), tmp_path / "bundle", options)
    done = CliRunner().invoke(main, ["tune", str(tmp_path / "bundle"), "--threads", "1"])
    assert done.exit_code == 0, done.output
    assert done.stderr.count("draft:self-fp16: not measured, and not used here: ") == 1
    [path] = (tmp_path / "bundle" / "tuning").iterdir()
    assert "self-fp16" not in path.read_text()


def test_what_bfloat16_does_not_go_with():
    with pytest.raises(UsageError, match="heads do not run in bfloat16; give fp16, int8 or int4"):
        ExportOptions(device="cuda", precision="bf16", heads_precision="int8:bf16")
    with pytest.raises(UsageError, match="recipe 'int8:bf16': bf16 is for --device cuda"):
        ExportOptions(precision="int8:bf16")
    with pytest.raises(UsageError, match="layers of a target in bfloat16 cannot be chosen here; give fp16"):
        ExportOptions(device="cuda", precision="bf16", drafts=("layers-2",))


def test_a_draft_elsewhere_has_its_own_device_and_cache(tiny_checkpoint, tmp_path):
    options = ExportOptions(draft_device="tensorrt", drafts=("self-fp16",), capacity=100)
    manifest = export(str(tiny_checkpoint), tmp_path / "bundle", options)
    spec = manifest.drafts["self-fp16"]
    assert (manifest.device, spec.device, spec.flavour, spec.shares_cache) == ("cpu", "tensorrt", "onnx24", False)
    with Engine(tmp_path / "bundle", device="cpu", capacity=80) as engine:
        *_, plain = engine.generate("the quick brown fox", method="none", max_tokens=30)
        *_, drafted = engine.generate("the quick brown fox", method="draft", max_tokens=30)
    assert drafted.ids == plain.ids
    assert drafted.stats.proposed
    with Engine(tmp_path / "bundle") as engine:  # where its device is not, it is left out, and the reply says so
        *_, alone = engine.generate("the quick brown fox", method="draft", max_tokens=30)
    assert alone.ids == plain.ids
    assert any("device tensorrt" in note for note in alone.stats.notes)
