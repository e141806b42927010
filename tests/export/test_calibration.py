"""Moments are those of the rows that the taps show, however little memory there is; what is saved is checked."""

from __future__ import annotations

import json

import numpy as np
import pytest

from specedge.export.calibration import calibrate, fingerprint_of, load_calibration
from specedge.export.reference import reference
from specedge.export.texts import Text
from specedge.quant.moments import MomentsSum
from specedge.runtime.errors import NumericError, StorageError, UsageError
from specedge.tests.reference import memory_checkpoint

FIELDS = ("count", "largest", "mean", "magnitude", "second", "row_peak", "rows", "stands_for")


@pytest.fixture(scope="module")
def checkpoint():
    return memory_checkpoint(max_position_embeddings=1024)


@pytest.fixture(scope="module")
def texts():
    rng = np.random.default_rng(3)
    return [Text((1,), tuple(rng.integers(160, size=size).tolist())) for size in (40, 300, 7)]


@pytest.fixture(scope="module")
def fingerprint(checkpoint):
    return fingerprint_of(checkpoint, {"seed": 0})


@pytest.fixture(scope="module")
def model(checkpoint):
    with reference(checkpoint, 400, threads=1) as made:
        yield made


@pytest.fixture
def saved(model, texts, fingerprint, tmp_path):
    return calibrate(model, texts, tmp_path / "calibration", fingerprint)


def loaded(saved, fingerprint, model):
    return load_calibration(saved.folder, fingerprint, model.sites, 160)


def test_they_are_the_moments_of_all_rows(saved, model, texts):
    with model.taps(400) as taps:
        for site in taps.sites:
            total = MomentsSum(site.width)
            for text in texts:
                for chunk in taps.run(text.tokens, [site]):
                    total.add(chunk[site])
            for name in site.names:
                found, wanted = saved[name], total.result()
                assert found.count == 350
                for field in FIELDS[1:]:
                    assert np.allclose(getattr(found, field), getattr(wanted, field), rtol=1e-3, atol=1e-4), field


def test_layers_with_one_input_share_a_file(saved):
    files = {path.name for path in saved.folder.iterdir()}
    assert len(files) == 2 + 2 * 4 + 1
    assert "model.layers.0.mlp.up_proj.npy" not in files
    assert "model.layers.0.mlp.up_proj" in saved
    assert "model.layers.0.mlp.nothing" not in saved
    assert (saved["model.layers.0.mlp.up_proj"].second == saved["model.layers.0.mlp.gate_proj"].second).all()


@pytest.mark.parametrize("memory", [1, 500_000])
def test_little_memory_takes_more_passes_and_gives_the_same(model, texts, fingerprint, saved, tmp_path, memory):
    steps: list[tuple[int, int]] = []
    little = calibrate(
        model, texts, tmp_path / "little", fingerprint, memory=memory, progress=lambda *step: steps.append(step)
    )
    passes = steps[-1][1] // 350
    assert passes == 9 if memory == 1 else 1 < passes < 9
    assert steps[-1][0] == steps[-1][1]
    for name in ("model.layers.1.mlp.down_proj", "lm_head"):
        for field in FIELDS:
            assert np.allclose(getattr(little[name], field), getattr(saved[name], field), rtol=1e-3, atol=1e-4), field


def test_it_is_read_again(saved, fingerprint, model, texts, checkpoint):
    again = loaded(saved, fingerprint, model)
    assert list(again.texts) == texts
    for name in ("model.layers.0.self_attn.qkv_proj", "lm_head"):
        for field in FIELDS:
            assert np.array_equal(getattr(again[name], field), getattr(saved[name], field))
    assert loaded(saved, fingerprint_of(checkpoint, None), model).texts


def test_of_another_model_or_on_other_texts(saved, model, checkpoint):
    with pytest.raises(UsageError, match="other texts"):
        loaded(saved, fingerprint_of(checkpoint, {"seed": 1}), model)
    changed = memory_checkpoint(seed=1, max_position_embeddings=1024)
    with pytest.raises(UsageError, match="another model"):
        loaded(saved, fingerprint_of(changed, None), model)


def test_a_fingerprint_sees_any_tensor(checkpoint, fingerprint):
    other = memory_checkpoint(max_position_embeddings=1024)
    assert fingerprint_of(other, {"seed": 0}) == fingerprint
    other.tensors["model.layers.1.mlp.down_proj.weight"][:] *= 1.001
    assert fingerprint_of(other, {"seed": 0}).model != fingerprint.model


def change_index(folder, **changes):
    path = folder / "calibration.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def first_site(folder, **changes):
    sites = json.loads((folder / "calibration.json").read_text())["sites"]
    change_index(folder, sites=[{**sites[0], **changes}, *sites[1:]])


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "calibration.json").unlink(),
        lambda folder: (folder / "calibration.json").write_text("["),
        lambda folder: (folder / "calibration.json").write_text("[]"),
        lambda folder: (folder / "calibration.json").write_bytes(b"\xff"),
        lambda folder: change_index(folder, version=99),
        lambda folder: change_index(folder, sites=7),
        lambda folder: change_index(folder, sites=[]),
        lambda folder: first_site(folder, width=1 << 40),
        lambda folder: first_site(folder, kept=1 << 40),
        lambda folder: first_site(folder, count=True),
        lambda folder: first_site(folder, names=["../../etc/passwd"]),
        lambda folder: first_site(folder, names=[7]),
        lambda folder: first_site(folder, further=1),
        lambda folder: (folder / "texts.json").unlink(),
        lambda folder: (folder / "texts.json").write_text("[]"),
        lambda folder: (folder / "texts.json").write_text("[[[1], [160]]]"),
        lambda folder: (folder / "texts.json").write_text('[["1", [1]]]'),
        lambda folder: (folder / "texts.json").write_text("[1]"),
    ],
)
def test_a_damaged_one_is_refused_in_one_line(saved, fingerprint, model, damage):
    damage(saved.folder)
    with pytest.raises(UsageError, match="damaged calibration") as caught:
        loaded(saved, fingerprint, model)
    assert "\n" not in str(caught.value)
    assert str(saved.folder) in str(caught.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path, numbers: path.unlink(),
        lambda path, numbers: path.write_bytes(b""),
        lambda path, numbers: path.write_bytes(path.read_bytes()[:1000]),
        lambda path, numbers: path.write_bytes(b"\x93NUMPY" + b"\xff" * 200),
        lambda path, numbers: np.save(path, numbers[:-1]),
        lambda path, numbers: np.save(path, numbers.astype(np.float64)),
        lambda path, numbers: np.save(path, np.array([{}], dtype=object), allow_pickle=True),
        lambda path, numbers: np.save(path, numbers * np.float32(np.nan)),
        lambda path, numbers: path.write_bytes(b"PK\x03\x04" + b"\0" * 100),
    ],
)
def test_damaged_moments_are_refused_when_they_are_read(saved, fingerprint, model, damage):
    path = saved.folder / "lm_head.npy"
    damage(path, np.load(path))
    with pytest.raises(UsageError, match="damaged calibration") as caught:
        loaded(saved, fingerprint, model)["lm_head"]
    assert "\n" not in str(caught.value)


def test_files_cut_short_are_refused_at_once(saved, fingerprint, model):
    path = saved.folder / "lm_head.npy"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UsageError, match=r"lm_head.npy: a damaged calibration \(1000 bytes where"):
        loaded(saved, fingerprint, model)
    path.unlink()
    with pytest.raises(UsageError, match="damaged calibration"):
        loaded(saved, fingerprint, model)


def test_a_name_that_is_taken_and_numbers_that_are_not_finite_leave_nothing(saved, model, texts, fingerprint, tmp_path):
    with pytest.raises(StorageError, match="exists already"):
        calibrate(model, texts, saved.folder, fingerprint)
    broken = memory_checkpoint()
    broken.tensors["model.layers.0.mlp.up_proj.weight"][:] = np.inf
    with reference(broken, 64, threads=1) as made, pytest.raises(NumericError, match=r"down_proj is given NaN"):
        calibrate(made, [Text((1,), (2, 3))], tmp_path / "broken", fingerprint)
    assert {path.name for path in tmp_path.iterdir()} == {"calibration"}
