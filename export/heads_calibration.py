"""How often heads guess right, measured with the graphs that a bundle holds, where the heads' file does not say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specedge.export.emulation import emulated
from specedge.export.head_trees import calibration_of
from specedge.export.heads_file import Heads
from specedge.export.texts import Text
from specedge.runtime.bundle import GraphSpec, HeadsSpec
from specedge.runtime.calibration import CALIBRATION, HeadCalibration, calibration_json
from specedge.runtime.contracts import Draft, Rows
from specedge.runtime.errors import UsageError
from specedge.runtime.files import write_text
from specedge.runtime.graph import Decoder
from specedge.runtime.heads import HeadsGraph

if TYPE_CHECKING:
    from specedge.export.prepare import PreparedCalibration

__all__ = ["measure_heads", "write_calibration"]

_MOST_ROWS = 4096
_PIECE = 128


def write_calibration(
    folder: Path,
    name: str,
    heads: Heads,
    target: GraphSpec,
    spec: HeadsSpec,
    calibration: PreparedCalibration | None,
) -> None:
    """Writes `calibration.json`: what the heads' file says of them, or what is measured on texts of the target.

    Raises:
        UsageError: There are neither.
    """
    found = heads.calibration
    if found is None or {len(row) for row in found.top} != {spec.guesses}:
        if calibration is None:
            raise UsageError(f"{heads.where}: nothing says how often these heads are right; give --calibration-prompts")
        found = measure_heads(folder, target, spec, calibration.texts)
    text = json.dumps(calibration_json({name: found}), indent=1)
    write_text(folder / CALIBRATION, text + "\n")


def measure_heads(folder: Path, target: GraphSpec, spec: HeadsSpec, texts: Sequence[Text]) -> HeadCalibration:
    """Lets heads guess along texts that the target wrote.

    Args:
        folder: The bundle's.
        target, spec: Graphs of it.
        texts: The target's own.

    Raises:
        UsageError: No text is as long as there are heads.
    """
    ranks: list[list[int]] = []
    longest = max((len(text.tokens) for text in texts), default=0)
    with emulated(folder, target) as runnable:
        graph = Decoder(folder / runnable.file, runnable, capacity=target.rows_for(max(64, longest + 2)))
        heads = HeadsGraph(folder / spec.file, spec, target.vocab_size)
        try:
            for text in texts:
                if len(ranks) >= _MOST_ROWS:
                    break
                ranks += _ranks(graph, heads, text)
        finally:
            heads.close()
            graph.close()
    if not ranks:
        raise UsageError("the texts to calibrate heads on are shorter than there are heads; give longer ones")
    return calibration_of(np.array(ranks), spec.guesses, "texts of the target, at export")


def _ranks(graph: Decoder, heads: HeadsGraph, text: Text) -> list[list[int]]:
    """For each row of a text the place of the right token among the guesses of each head."""
    count, answer = heads.spec.heads, text.answer
    ranks = []
    pending: Sequence[int] = text.prompt
    graph.rewind(0)
    for start in range(0, len(answer), _PIECE):
        piece = answer[start : start + _PIECE]
        rows = graph.forward(pending, Draft.chain(piece[:-1]))
        graph.commit(range(len(piece) - 1))
        pending = piece[-1:]
        for row, token in enumerate(piece):
            coming = answer[start + row + 1 : start + row + 1 + count]
            if len(coming) == count:
                ranks.append(_places(heads.run(_row(rows, row), token), coming))
    return ranks


def _row(rows: Rows, row: int) -> Rows:
    part = slice(row, row + 1)
    hidden, inner = (None if each is None else each[part] for each in (rows.hidden, rows.inner))
    return Rows(rows.logits[part], hidden, inner)


def _places(guesses: NDArray[np.int64], coming: Sequence[int]) -> list[int]:
    """The place of each token among the guesses of its head; how many there are, where it is not among them."""
    found = guesses == np.asarray(coming)[:, None]
    places: list[int] = np.where(found.any(1), found.argmax(1), guesses.shape[1]).tolist()
    return places
