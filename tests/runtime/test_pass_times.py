"""Passes of several graphs timed side by side, on graphs with clocks that are known."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from specedge.runtime import bench_report, pass_times
from specedge.runtime.pass_times import PAST, WIDTHS, compare_passes


class FakeGraph:
    """Takes `price(rows)` seconds of a clock that stands still otherwise."""

    def __init__(self, clock, price, *, precision="fp32", recipe="", capacity=512) -> None:
        self.spec = SimpleNamespace(vocab_size=7, precision=precision, recipe=recipe)
        self.capacity, self.length, self._rows = capacity, 0, 0
        self._clock, self._price = clock, price
        self.made: list[tuple[int, int]] = []

    def rewind(self, length: int) -> None:
        self.length = length

    def forward(self, pending, draft=None) -> None:
        tokens = [*pending, *(draft.tokens if draft else ())]
        assert max(tokens) < self.spec.vocab_size
        self.made.append((self.length, len(tokens)))
        self._rows = len(tokens)
        self.length += len(pending)
        self._clock.now += 100.0  # filling buffers is not timed

    def repeat(self) -> None:
        self._clock.now += self._price(self._rows)


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(pass_times, "perf_counter", lambda: clock.now)
    return clock


def test_times_and_ratios(clock):
    target = FakeGraph(clock, lambda rows: 0.018 + 0.002 * rows)
    draft = FakeGraph(clock, lambda rows: 0.005 * rows, precision="int8", recipe="int8+scale")
    found = compare_passes({"none": target, "draft:self-int8": draft})
    assert found["none"] == {
        "precision": "fp32", "ms": {"1": 20.0, "4": 26.0, "8": 34.0, "16": 50.0}, "of_target": 1.0, "growth": 1.7,
    }  # fmt: skip
    assert found["draft:self-int8"]["precision"] == "int8+scale"
    assert found["draft:self-int8"]["of_target"] == 0.25
    assert found["draft:self-int8"]["growth"] == 8.0
    assert set(target.made[1:]) == {(PAST, width) for width in WIDTHS} and target.length == draft.length == 0


def test_what_does_not_fit_is_left_out(clock):
    large, small = (FakeGraph(clock, lambda rows: 1.0, capacity=size) for size in (PAST + 16, PAST + 15))
    assert list(compare_passes({"none": large, "draft:a": small})) == ["none"]
    assert compare_passes({"none": small, "draft:a": large}) == {}
    assert compare_passes({}) == {}


def test_the_table(clock):
    from rich.console import Console

    graph = FakeGraph(clock, lambda rows: 0.004 * rows, precision="int4", recipe="int4:b64:sym+gptq")
    console = Console(width=120, force_terminal=False)
    with console.capture() as capture:
        console.print(bench_report._passes_table(compare_passes({"none": graph})))
    text = capture.get()
    for expected in ("256 behind it", "int4:b64:sym+gptq", "4.0", "16.0", "32.0", "64.0", "1.00", "8.00"):
        assert expected in text
