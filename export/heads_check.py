"""The check of heads that is always made: they run on the target's rows, and give tokens, none twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specedge.runtime.bundle import GraphSpec, HeadsSpec
from specedge.runtime.errors import ParityError
from specedge.runtime.graph import Decoder
from specedge.runtime.heads import HeadsGraph

__all__ = ["check_heads"]

_ROWS = 64


def check_heads(
    folder: Path, name: str, spec: HeadsSpec, target: GraphSpec, prompts: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Runs heads behind each prompt.

    Raises:
        ParityError: They give no tokens, the same twice, or logits that are no numbers.
    """
    graph = Decoder(folder / target.file, target, capacity=target.rows_for(_ROWS))
    heads = HeadsGraph(folder / spec.file, spec, target.vocab_size)
    try:
        for prompt in prompts:
            graph.rewind(0)
            rows = graph.forward(prompt)
            token = int(rows.logits[0].argmax())
            guesses, logits = heads.run(rows, token), heads.logits(rows, token)
            once = all(len(set(row)) == spec.guesses for row in guesses.tolist())
            found = np.take_along_axis(logits, guesses, 1)
            if not once or not np.isfinite(found).all() or (np.diff(found, axis=1) > 0).any():
                raise ParityError(f"heads {name}: their guesses are not the likeliest tokens of their logits")
    finally:
        heads.close()
        graph.close()
    return {"status": "passed"}
