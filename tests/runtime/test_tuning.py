"""Tunings: what is measured, the file it is kept in, what is made of it, and what it may not do."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random

import numpy as np
import pytest
from click.testing import CliRunner

import specedge.runtime.tuning as tuning_module
from specedge.cli import main
from specedge.runtime.bundle import open_bundle
from specedge.runtime.draft_temperature import best_temperature
from specedge.runtime.engine import Engine
from specedge.runtime.errors import StorageError, UsageError
from specedge.runtime.gains import TreeGain
from specedge.runtime.machine import GPU
from specedge.runtime.roofline import MODELS, DeviceProfile, Model, pass_ms, predict, profile_names, read_profile
from specedge.runtime.roofline_command import measured_profile, predict_bundle
from specedge.runtime.tuning import Tuning, device_name, read_tuning, tuning_path, write_tuning

PROMPTS = "".join(
    json.dumps({"question_id": text, "category": "pets", "turns": [text]}) + "\n"
    for text in ("hello there", "the dog and the cat")
)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, tiny_bundle):
    """A copy of the tiny bundle that `specedge tune` has tuned."""
    import shutil

    folder = tmp_path_factory.mktemp("tuned") / "bundle"
    shutil.copytree(tiny_bundle, folder)
    prompts = folder.with_name("prompts.jsonl")
    prompts.write_text(PROMPTS)
    done = CliRunner().invoke(
        main,
        ["tune", str(folder), "--prompts", str(prompts), "--threads", "1", "--out", str(folder.with_name("t.json"))],
    )
    assert done.exit_code == 0, done.output
    return folder, done


def test_the_command_measures_every_method_and_keeps_it(tuned):
    folder, done = tuned
    bundle = open_bundle(folder, verify=True)
    tuning = read_tuning(bundle, 1)
    assert set(tuning.choices) == {"draft:self-int4", "draft:self-int8", "ngram", "none"}
    assert tuning.method in tuning.choices and tuning.prompts == 2
    assert all(choice.measured_ms > 0 and choice.predicted_ms > 0 for choice in tuning.choices.values())
    assert sorted(tuning.passes) == [1, 2, 3, 4, 5, 6, 8, 12, 17]
    assert all(0 < share <= 1 for gains in tuning.gains.values() for row in gains.values() for share in row)
    assert sum(tuning.matches.values()) == pytest.approx(1)
    assert {"0.7", "1"} == set(tuning.temperatures["draft:self-int8"])
    assert str(tuning_path(bundle, 1)) in done.output
    assert "off by" in done.output
    written = json.loads(folder.with_name("t.json").read_text())
    assert written["method"] == tuning.method and isinstance(written["warnings"], list)


def test_an_engine_uses_it_and_says_so(tuned):
    folder, _ = tuned
    with Engine(folder, threads=1) as engine, Engine(folder, threads=1, tuned=False) as plain:
        assert engine.tuning is not None and plain.tuning is None
        assert engine.drafting.costs.known and not plain.drafting.costs.known
        ids = {}
        for name, one in (("tuned", engine), ("not", plain)):
            *_, ids[name] = one.generate([5, 6, 7], max_tokens=40)
        assert ids["tuned"].ids == ids["not"].ids
        assert ids["tuned"].stats.forecast is not None
    done = CliRunner().invoke(main, ["chat", str(folder), "hello", "--max-tokens", "4", "--threads", "1"])
    assert done.exit_code == 0 and "Tuned for this device:" in done.stderr


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda raw: raw.update(target="0" * 64), "another export"),
        (lambda raw: raw.update(passes={}), "no passes"),
        (lambda raw: raw.update(passes={"1": -3}), "is no time"),
        (lambda raw: raw.update(passes={"0": 3}), "is no width"),
        (lambda raw: raw.update(drafts={"ngram": [1]}), "not enough values"),
        (lambda raw: raw.update(gains={"ngram": {"0": [2.0]}}), "from 0 to 1"),
        (lambda raw: raw.update(gains={"ngram": {"0": [0.5] * 65}}), "no list of at most 64 numbers"),
        (lambda raw: raw.update(temperatures={"x": {"hot": 1.0}}), "could not convert"),
        (lambda raw: raw.update(temperatures={"x": {"0.7": 101}}), "no temperature"),
        (lambda raw: raw.update(temperatures={"x": {"nan": 1.0}}), "no temperature"),
        (lambda raw: raw.update(passes={"1": 1e9}), "is no time"),
        (lambda raw: raw.update(choices={}), "no choice for plain decoding"),
        (lambda raw: raw.update(extra=1), "unknown key"),
        (lambda raw: raw.pop("matches"), "matches is missing"),
        (lambda raw: raw.update(choices={"none": {"draft_length": 0}}), "is missing"),
        (lambda raw: raw["gains"].update(ngram={"0": []}), "gains of no depth"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_tuning_is_left_out(tuned, caplog, change, why):
    folder, _ = tuned
    bundle = open_bundle(folder)
    path = tuning_path(bundle, 1)
    whole = path.read_text()
    try:
        raw = json.loads(whole)
        change(raw)
        path.write_text(json.dumps(raw))
        assert read_tuning(bundle, 1) is None
        assert why in caplog.text and "specedge tune" in caplog.text
        for text in ("", "[", "null", "[" * 100_000, "x" * (2 << 20)):
            path.write_text(text)
            assert read_tuning(bundle, 1) is None
    finally:
        path.write_text(whole)


def test_a_tuning_is_called_by_the_chip_that_was_measured(monkeypatch):
    gpu = GPU("NVIDIA Orin Nano", "8.7", 8 << 30, True, 1e11, "12.6")
    monkeypatch.setattr(tuning_module, "look_at_gpu", lambda: gpu)
    assert device_name("cuda", 6) == "cuda-nvidia-orin-nano-6"
    assert "orin" not in device_name("cpu", 6)


def test_what_is_written_is_read_and_lies_where_nothing_is_hashed(tuned, tmp_path):
    bundle = open_bundle(tuned[0])
    tuning = read_tuning(bundle, 1)
    other = dataclasses.replace(tuning, threads=3)
    assert write_tuning(bundle, other) == tuning_path(bundle, 3)
    assert read_tuning(bundle, 3) == other
    assert read_tuning(bundle, 2) is None
    assert device_name("cpu", 3).startswith("cpu-") and device_name("cpu", 3).endswith("-3")
    tuning_path(bundle, 3).unlink()
    assert write_tuning(bundle, other, "cuda").name.startswith("cuda-")
    assert (read_tuning(bundle, 3, "cuda"), read_tuning(bundle, 3)) == (other, None)
    tuning_path(bundle, 3, "cuda").unlink()
    link = tmp_path / "linked"
    link.mkdir()
    (link / "tuning").symlink_to(tmp_path)
    with pytest.raises(StorageError, match="a link"):
        write_tuning(dataclasses.replace(bundle, folder=link), tuning)
    (tmp_path / "tuning").write_text("a file")
    with pytest.raises(StorageError, match="cannot be made"):
        write_tuning(dataclasses.replace(bundle, folder=tmp_path), tuning)


def test_wrong_commands(tuned, tmp_path):
    folder, _ = tuned
    runner = CliRunner()
    for arguments, status, message in (
        (["tune", str(tmp_path / "nothing")], 1, "no such folder"),
        (["tune", str(folder), "--prompts", str(tmp_path / "none.jsonl")], 2, "none.jsonl"),
        (["tune", str(folder), "--threads", "1", "--device-profile", "moon"], 2, "the names are agx-orin, orin-nano"),
        (["tune", str(folder), "--threads", "2", "--device-profile", "thor"], 2, "specedge tune"),
        (["tune", str(folder), "--device-profile", "thor", "--plot", str(tmp_path / "p.png")], 2, "leave them out"),
        (["tune", str(folder), "--threads", "1", "--device-profile", "/dev/zero"], 2, "no such file"),
        (
            ["bench", str(folder), "--prompts", str(folder.with_name("prompts.jsonl")), "--methods", "none@3"],
            2,
            "no draft",
        ),
        (["tune", str(folder), "--out", str(tmp_path / "a" / "b")], 1, "its folder does not exist"),
    ):
        done = runner.invoke(main, arguments)
        assert (done.exit_code, message in done.output) == (status, True), done.output


# ---- choosing -------------------------------------------------------------------------------


def test_the_likeliest_nodes_are_the_best_of_all_trees():
    """Against every tree of n nodes: what Sequoia's dynamic programme would find."""
    rng = random.Random(2)
    for _ in range(20):
        chances = [sorted((rng.random() / 2 for _ in range(3)), reverse=True) for _ in range(3)]
        paths = [path for depth in (1, 2, 3) for path in itertools.product(range(3), repeat=depth)]
        value = {path: math.prod(chances[depth][rank] for depth, rank in enumerate(path)) for path in paths}
        for nodes in (1, 2, 3):
            best = max(
                sum(value[path] for path in chosen)
                for chosen in itertools.combinations(paths, nodes)
                if all(len(path) == 1 or path[:-1] in chosen for path in chosen)
            )
            gain = TreeGain(sorted(value.values(), reverse=True))
            assert gain.expected(nodes)[nodes] == pytest.approx(best)


def test_the_best_draft_temperature_is_where_the_laws_meet():
    rng = np.random.default_rng(0)
    target = [rng.normal(size=50) for _ in range(40)]
    flat = [(p, p * 0.6) for p in target]  # a drafter that is less sure
    assert best_temperature([(p, p) for p in target], 0.7) == 0.7
    assert best_temperature(flat, 1.0) == 0.6
    assert best_temperature(flat, 0.5) in (0.5, 0.6)


# ---- prediction -----------------------------------------------------------------------------


def test_the_roofline_by_hand():
    device = DeviceProfile("d", 100.0, {"fp16": 10.0}, 5.0, efficiency=0.5)
    model = Model("m", 1e9, 10, 100, kernels=10)
    cache = 2 * 10 * 100 * 256 * 2
    memory = (2e9 + cache) / 50e9
    assert pass_ms(model, "fp16", device, 1) == pytest.approx(1e3 * memory + 0.5)
    assert pass_ms(model, "fp16", device, 1000) == pytest.approx(1e3 * 2e12 / 1e13 + 0.5)
    in_turn = dataclasses.replace(device, overlap=0.0)
    assert pass_ms(model, "fp16", in_turn, 1000) == pytest.approx(1e3 * (0.2 + memory) + 0.5)
    with pytest.raises(UsageError, match="cannot be predicted"):
        pass_ms(model, "fp5", device, 1)
    plain, method = predict(model, "fp16", device, {"m": [0, 0.8, 1.4]}, {"m": (1.0, 2.0)}, host_ms=0.0)
    assert plain.tokens_per_second == pytest.approx(1e3 / pass_ms(model, "fp16", device, 1))
    assert (method.draft_length, method.tau) == (2, 2.4)
    assert method.ms_per_token == pytest.approx((5 + pass_ms(model, "fp16", device, 3)) / 2.4)


@pytest.mark.parametrize(
    ("device", "model", "precision", "reported"),
    [
        ("orin-nano", 1, "int4", 43.1), ("orin-nano", 2, "int4", 19.1), ("agx-orin", 0, "fp16", 65.0),
        ("thor", 0, "fp16", 77.3), ("thor", 1, "fp16", 34.2), ("thor", 2, "int4", 50.8),
    ],
)  # fmt: skip
def test_predictions_of_plain_decoding_are_near_what_others_report(device, model, precision, reported):
    """Public figures: NVIDIA's MLC table for Orin Nano Super, embedl, TensorRT Edge-LLM 0.4.0.

    The profiles' share of the bandwidth was chosen with them in view.
    """
    assert 1e3 / pass_ms(MODELS[model], precision, read_profile(device), 1) == pytest.approx(reported, rel=0.2)


def test_profiles():
    assert profile_names() == ("agx-orin", "orin-nano", "orin-nx", "thor")
    assert all(read_profile(name).source for name in profile_names())


_PROFILE = '{"name": "x", "bandwidth_gbs": %s, "tflops": %s, "launch_us": 1}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        _PROFILE % (-1, '{"fp16": 1}'),
        _PROFILE % (1, "{}"),
        _PROFILE % (1, 3),
        _PROFILE % ("9" * 400, '{"fp16": 1}'),
        "[" * 90_000,
    ],
)
def test_a_file_that_is_no_profile(tmp_path, text):
    path = tmp_path / "device.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="no device profile"):
        read_profile(str(path))


def test_the_command_predicts(tuned, tmp_path):
    folder, _ = tuned
    for name in ("orin-nano", "this"):
        done = CliRunner().invoke(
            main,
            ["tune", str(folder), "--threads", "1", "--device-profile", name, "--out", str(tmp_path / "p.json")],
        )
        assert done.exit_code == 0, done.output
        assert "PREDICTED" in done.output and "nothing was run" in done.output
        assert ("measured here" in done.output) == (name == "this")
        assert json.loads((tmp_path / "p.json").read_text())["predicted"]


def test_a_prediction_from_a_device_that_is_none(tuned):
    done = CliRunner().invoke(main, ["tune", str(tuned[0]), "--device-profile", "this", "--device", "../npu"])
    assert done.exit_code == 2
    assert "device is '../npu': choose one of cpu, cuda, tensorrt" in done.output


def test_this_machine_is_predicted_as_it_was_measured(tuned):
    """A machine that is exactly what the roofline says, but for a pass of 17 rows, which is padded to 24."""
    bundle = open_bundle(tuned[0])
    passes = {width: 0.5 + 0.005 * width for width in (1, 2, 3, 4, 5, 6, 8, 12)} | {17: 0.9}
    tuning = dataclasses.replace(read_tuning(bundle, 1), passes=passes)
    device = measured_profile(bundle.manifest, tuning)
    plain, *drafted = predict_bundle(bundle.manifest, device, tuning)
    assert plain.ms_per_token == pytest.approx(passes[1] + 0.2)  # and what the host takes
    lookup = next(each for each in drafted if each.method == "ngram")
    rows = 1 + lookup.draft_length
    assert lookup.ms_per_token * lookup.tau == pytest.approx(0.5 + 0.005 * rows + 0.2)


def test_a_tuning_without_methods_is_none():
    assert Tuning("t", 1, {1: 1.0}, {}, {}, {}, {}, "none").speed("none") == 0.0
