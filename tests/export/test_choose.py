"""Of several compensations, the one that diverges least on held-out text is taken."""

from __future__ import annotations

import pytest

from specedge.export import choose as choosing
from specedge.export.agreement import TargetLogits
from specedge.export.choose import CANDIDATES, choose
from specedge.export.prepare import prepare_calibration
from specedge.quant.recipe import parse_methods, parse_recipe
from specedge.tests.export.chats import chat_checkpoint


@pytest.fixture(scope="module")
def model():
    checkpoint = chat_checkpoint()
    with prepare_calibration(checkpoint, capacity=128, tokens=1500, threads=1) as calibration:
        yield checkpoint, calibration


def test_the_least_divergence_is_chosen(model, monkeypatch):
    checkpoint, calibration = model
    seen: list[float] = []

    class Watched(TargetLogits):
        def measure(self, draft, **more):
            assert not set(self.texts) & set(calibration.texts)
            found = super().measure(draft, **more)
            seen.append(found.kl)
            return found

    monkeypatch.setattr(choosing, "TargetLogits", Watched)
    steps: list[tuple[int, int]] = []
    recipe = parse_recipe("int4:b64:sym+auto")
    chosen = choose(checkpoint, recipe, calibration, capacity=128, threads=1, progress=lambda *step: steps.append(step))
    assert chosen.methods == CANDIDATES[seen.index(min(seen))]
    assert chosen.methods
    assert min(seen) < 0.9 * seen[0]
    assert (chosen.form, chosen.name) == (recipe.form, recipe.name)
    assert steps == [(number, 5) for number in range(6)]


def test_a_list_of_ones_own(model):
    checkpoint, calibration = model
    recipe = parse_recipe("int8+auto")
    only = (parse_methods("bias"),)
    assert choose(checkpoint, recipe, calibration, capacity=128, threads=1, candidates=only).methods == only[0]
