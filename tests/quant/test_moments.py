"""Moments are those of all rows, however these are cut; the rows kept stand for all."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from specedge.quant.moments import MomentsSum, damped_second, divided


def outliers(rng, count=3000, width=24):
    rows = rng.standard_normal((count, width)).astype(np.float32) + 0.3
    rows[:, 3] *= 20
    rows[::997] *= 100
    return rows


def moments_of(rows, cut=None):
    total = MomentsSum(rows.shape[1])
    for start in range(0, len(rows), cut or len(rows)):
        total.add(rows[start : start + (cut or len(rows))])
    return total.result()


def test_they_are_those_of_all_rows(rng):
    rows = outliers(rng)
    found = moments_of(rows, 77)
    assert found.count == len(rows)
    assert np.allclose(found.second, rows.T @ rows / len(rows), rtol=1e-3, atol=1e-3)
    assert np.allclose(found.mean, rows.mean(0), atol=1e-5)
    assert np.allclose(found.magnitude, np.abs(rows).mean(0), rtol=1e-5)
    assert (found.largest == np.abs(rows).max(0)).all()
    assert found.row_peak[-1] == np.abs(rows).max()


def test_how_rows_are_cut_does_not_matter(rng):
    rows = outliers(rng)
    whole = moments_of(rows)
    for cut in (1, 50, 1024):
        part = moments_of(rows, cut)
        assert (part.rows == whole.rows).all()
        assert (part.stands_for == whole.stands_for).all()
        assert np.allclose(part.second, whole.second, rtol=1e-3, atol=1e-2)


def test_the_rows_kept_hold_the_peaks_and_stand_for_all(rng):
    rows = outliers(rng)
    found = moments_of(rows, 100)
    assert len(found.rows) <= 512
    assert found.stands_for.sum() == pytest.approx(len(rows))
    highest = np.sort(np.abs(rows).max(1))[-32:]
    assert np.isin(highest, np.abs(found.rows).max(1)).all()
    square = (np.square(found.rows).sum(1) * found.stands_for).sum() / len(rows)
    assert square == pytest.approx(np.square(rows).sum(1).mean(), rel=0.3)


def test_few_rows_are_all_kept(rng):
    rows = outliers(rng, count=100)
    found = moments_of(rows, 7)
    assert sorted(map(tuple, found.rows)) == sorted(map(tuple, rows))
    assert (found.stands_for == 1).all()


def test_moments_of_divided_rows(rng):
    rows = outliers(rng, count=200)
    scale = rng.uniform(0.2, 5, rows.shape[1]).astype(np.float32)
    found, expected = divided(moments_of(rows), scale), moments_of(rows / scale)
    for field in dataclasses.fields(found):
        if field.name not in ("rows", "stands_for", "row_peak"):
            assert np.allclose(getattr(found, field.name), getattr(expected, field.name), rtol=1e-3), field.name
    assert np.allclose(found.row_peak[[0, 1, 4]], expected.row_peak[[0, 1, 4]], rtol=0.05)
    assert sorted(map(tuple, found.rows)) == sorted(map(tuple, expected.rows))
    with pytest.raises(ValueError, match="not positive"):
        divided(found, np.zeros_like(scale))


def test_no_rows_and_bad_rows():
    total = MomentsSum(4)
    with pytest.raises(ValueError, match="no rows"):
        total.result()
    with pytest.raises(ValueError, match="not finite"):
        total.add(np.full((2, 4), np.nan, np.float32))
    total.add(np.zeros((0, 4), np.float32))
    with pytest.raises(ValueError, match="no rows"):
        total.result()


def test_fewer_rows_are_trusted_less(rng):
    rows = outliers(rng)
    shares = []
    for count in (20, 300, 3000):
        moments = moments_of(rows[:count])
        damped = damped_second(moments)
        off = ~np.eye(24, dtype=bool)
        assert (damped[off] == moments.second[off]).all()
        shares.append(float((np.diagonal(damped) / np.diagonal(moments.second)).mean()) - 1)
    assert shares == pytest.approx([1, 0.24, 0.1], rel=1e-3)
