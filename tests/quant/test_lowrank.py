"""Low-rank correction: the best of its rank for the activations, none of rank 0, exact at full rank."""

from __future__ import annotations

import numpy as np
import pytest

from specedge.quant.descent import output_error
from specedge.quant.grid import dequantise, round_nearest
from specedge.quant.lowrank import correct_low_rank
from specedge.tests.activations import GRIDS, activations


def left(missed, second, rank):
    part = correct_low_rank(missed, second, rank)
    return output_error(missed - part.up @ part.down, second).sum()


@pytest.mark.parametrize("shape", [(24, 48), (48, 24), (40, 40)])
def test_it_is_what_eora_computes(rng, shape):
    missed = rng.standard_normal(shape).astype(np.float32)
    (rows,) = activations(rng, shape[1], parts=1)
    second = rows.T @ rows / len(rows)
    values, vectors = np.linalg.eigh(second.astype(np.float64))
    root = vectors * np.sqrt(values)
    u, s, vt = np.linalg.svd(missed @ root, full_matrices=False)
    for rank in (1, 5, 20):
        expected = (u[:, :rank] * s[:rank]) @ vt[:rank] @ np.linalg.inv(root)
        part = correct_low_rank(missed, second, rank)
        assert part.up.shape == (shape[0], rank)
        assert part.down.shape == (rank, shape[1])
        assert np.allclose(part.up @ part.down, expected, atol=2e-3 * np.abs(expected).max())
        assert left(missed, second, rank) == pytest.approx(np.square(s[rank:]).sum(), rel=1e-3)


def test_the_error_falls_with_the_rank_and_at_full_rank_nothing_is_left(rng):
    missed = rng.standard_normal((24, 48)).astype(np.float32)
    (rows,) = activations(rng, 48, parts=1)
    second = rows.T @ rows / len(rows)
    errors = [output_error(missed, second).sum(), *(left(missed, second, rank) for rank in range(1, 25))]
    assert (np.diff(errors) < 0).all()
    assert errors[-1] == 0


def test_rank_0_is_none(rng):
    assert correct_low_rank(np.ones((3, 4), np.float32), np.eye(4, dtype=np.float32), 0) is None


@pytest.mark.parametrize("rank", [-1, 4, 100])
def test_a_rank_that_the_matrix_does_not_have(rank):
    with pytest.raises(ValueError, match=rf"rank {rank} for a matrix \[3, 4\]: give 0 to 3"):
        correct_low_rank(np.ones((3, 4), np.float32), np.eye(4, dtype=np.float32), rank)


@pytest.mark.parametrize("shape", [(24, 48), (48, 24)])
def test_inputs_never_seen_and_fewer_rows_than_the_rank(rng, shape):
    missed = rng.standard_normal(shape).astype(np.float32)
    rows = rng.standard_normal((3, shape[1])).astype(np.float32)
    rows[:, 5] = 0
    second = rows.T @ rows / 3
    part = correct_low_rank(missed, second, 8)
    assert np.isfinite(part.up).all()
    assert np.isfinite(part.down).all()
    assert left(missed, second, 8) < 1e-5 * output_error(missed, second).sum()
    assert correct_low_rank(missed, np.zeros_like(second), 8).down.shape == (8, shape[1])


@pytest.mark.parametrize("name", GRIDS)
def test_the_error_falls_on_rows_it_never_saw(rng, name):
    seen, unseen = activations(rng, 128)
    weight = rng.standard_normal((64, 128)).astype(np.float32)
    missed = weight - dequantise(round_nearest(weight, GRIDS[name]))
    part = correct_low_rank(missed, seen.T @ seen / len(seen), 8)
    rest = missed - part.up @ part.down
    assert np.square(unseen @ rest.T).sum() < 0.8 * np.square(unseen @ missed.T).sum()


def test_it_is_the_same_every_time_and_for_outputs_in_another_order(rng):
    missed, second = rng.standard_normal((32, 48)).astype(np.float32), np.eye(48, dtype=np.float32)
    once, again = correct_low_rank(missed, second, 4), correct_low_rank(missed, second, 4)
    assert (once.up == again.up).all()
    assert (once.down == again.down).all()
    order = rng.permutation(32)
    turned = correct_low_rank(missed[order], second, 4)
    assert np.allclose(turned.up @ turned.down, (once.up @ once.down)[order], atol=1e-4)
