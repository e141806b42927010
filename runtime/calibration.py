"""`calibration.json`: how often heads guessed right on held-out text, and the trees that follow from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specedge.runtime.drafters.tree import Tree
from specedge.runtime.schema import fields_of, mapping_of, one_line

__all__ = ["CALIBRATION", "HeadCalibration", "calibration_json", "read_calibration"]

CALIBRATION = "calibration.json"
_MOST_PATHS = 256
_LONGEST_TEXT = 200


@dataclass(frozen=True)
class HeadCalibration:
    """What was measured of heads.

    Attributes:
        text: What the text was.
        positions: Rows that the heads guessed behind.
        top: For each head the share of rows whose token was among its first 1, 2, … guesses.
        paths: Paths of ranks, the most often right first, parents before children: the first n are
            the tree of n nodes with the largest expected length.
        values: How often each path was right.
    """

    text: str
    positions: int
    top: tuple[tuple[float, ...], ...]
    paths: tuple[tuple[int, ...], ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.positions < 1 or not self.text.isprintable() or len(self.text) > _LONGEST_TEXT:
            raise ValueError(f"positions {one_line(self.positions)} of {one_line(self.text)}")
        if len(self.values) != len(self.paths) or not 0 < len(self.paths) <= _MOST_PATHS:
            raise ValueError(f"{len(self.paths)} paths with {len(self.values)} values")
        if any(len(path) > len(self.top) for path in self.paths):
            raise ValueError("a path is longer than there are heads")
        if any(not 0 <= rank < len(row) for path in self.paths for rank, row in zip(path, self.top, strict=False)):
            raise ValueError("a rank is beyond a head's guesses")
        Tree.of(self.paths)

    def expected(self, nodes: int) -> float:
        """Tokens that a pass of the target commits with the tree of so many nodes, its own included."""
        return 1 + sum(self.values[:nodes])


def calibration_json(heads: Mapping[str, HeadCalibration]) -> dict[str, Any]:
    """Content of `calibration.json`."""
    return {"heads": {name: dataclasses.asdict(each) for name, each in heads.items()}}


def read_calibration(raw: Any) -> dict[str, HeadCalibration]:
    """Reads what `calibration_json` gives.

    Raises:
        ValueError: It is something else.
    """
    top = mapping_of(raw, "the calibration")
    if set(top) != {"heads"}:
        raise ValueError(f"the calibration: keys {one_line(sorted(map(str, top)))}")
    heads = mapping_of(top["heads"], "heads")
    return {name: head_calibration(each, f"heads {one_line(name)}") for name, each in heads.items()}


def head_calibration(raw: Any, where: str) -> HeadCalibration:
    """Reads one of them."""
    values = fields_of(HeadCalibration, raw, where)
    return HeadCalibration(
        text=str(values["text"]),
        positions=values["positions"],
        top=tuple(tuple(map(_share, _list(row, where))) for row in _list(values["top"], where)),
        paths=tuple(tuple(map(_rank, _list(path, where))) for path in _list(values["paths"], where)),
        values=tuple(map(_share, _list(values["values"], where))),
    )


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where}: {one_line(value)} is no list")
    return value


def _share(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{one_line(value)} is no number")
    if not 0 <= value <= 1:
        raise ValueError(f"{one_line(value)} is not between 0 and 1")
    return float(value)


def _rank(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{one_line(value)} is no whole number")
    return value
