"""The graph of heads that draft from the target's rows: one run gives every head's likeliest tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specedge.runtime.bundle import HeadsSpec
from specedge.runtime.contracts import Floats, GraphNames, Rows
from specedge.runtime.errors import BundleError, NumericError
from specedge.runtime.providers import open_session

__all__ = ["HeadsGraph"]


class HeadsGraph:
    """One session, and a binding whose buffers are refilled in place.

    Args:
        path: The .onnx file.
        spec: Its entry in the manifest.
        vocab_size: Of the target.
        device: Which execution provider to run on.
        threads: Threads to compute with; None takes all.

    Attributes:
        guesses: int64 [heads, guesses], of the last run.
        chances: float32 [heads, guesses], how likely each is by its head's own law, where the ones before it stand.

    Raises:
        BundleError: The graph does not have the inputs and outputs of its entry.
    """

    def __init__(
        self, path: Path, spec: HeadsSpec, vocab_size: int, *, device: str = "cpu", threads: int | None = None
    ) -> None:
        self.path, self.spec = path, spec
        self._vocab_size = vocab_size
        self._guessed: NDArray[np.int64] | None = None
        self._session = open_session(path, device=device, threads=threads)
        self._inputs: dict[str, NDArray[Any]] = {GraphNames.HIDDEN: np.zeros((1, spec.hidden_size), np.float32)}
        if spec.taps:
            self._inputs[GraphNames.INNER] = np.zeros((1, len(spec.taps) * spec.hidden_size), np.float32)
        if spec.chain:
            self._inputs[GraphNames.TOKEN] = np.zeros(1, np.int64)
        self.guesses = np.zeros((spec.heads, spec.guesses), np.int64)
        self.chances = np.zeros((spec.heads, spec.guesses), np.float32)
        outputs: dict[str, tuple[int, ...]] = {
            GraphNames.GUESSES: self.guesses.shape,
            GraphNames.CHANCES: self.chances.shape,
            GraphNames.HEAD_LOGITS: (spec.heads, spec.vocabulary),
            GraphNames.GUESSED: (spec.vocabulary,),
        }
        self._check_interface(outputs)
        self._binding = self._session.io_binding()
        for name, array in self._inputs.items():
            self._binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, given in ((GraphNames.GUESSES, self.guesses), (GraphNames.CHANCES, self.chances)):
            self._binding.bind_output(name, "cpu", 0, given.dtype, given.shape, given.ctypes.data)

    def run(self, rows: Rows, token: int) -> NDArray[np.int64]:
        """The likeliest tokens of each head, [heads, guesses], in a buffer that the next run overwrites.

        Args:
            rows: Of the target's last pass; its last row is read.
            token: The newest committed token, which that row decided.

        Raises:
            NumericError: The target computed NaN or infinity.
        """
        self._fill(rows, token)
        self._session.run_with_iobinding(self._binding)
        return self.guesses

    def logits(self, rows: Rows, token: int) -> Floats:
        """Logits of each head, [heads, vocab]; -inf for tokens that heads never guess."""
        self._fill(rows, token)
        if self._guessed is None:
            self._guessed = self._session.run([GraphNames.GUESSED], self._inputs)[0]
        logits = np.full((self.spec.heads, self._vocab_size), -np.inf, np.float32)
        logits[:, self._guessed] = self._session.run([GraphNames.HEAD_LOGITS], self._inputs)[0]
        return logits

    def close(self) -> None:
        """Frees the session."""
        del self._binding, self._session

    def _fill(self, rows: Rows, token: int) -> None:
        for name, given in ((GraphNames.HIDDEN, rows.hidden), (GraphNames.INNER, rows.inner)):
            if name in self._inputs:
                if given is None:
                    raise BundleError(f"{self.path}: the target gives no {name} rows; export the bundle again")
                self._inputs[name][0] = given[-1]
                if not np.isfinite(self._inputs[name]).all():
                    raise NumericError("the target's rows hold NaN or infinity: the heads cannot draft from them")
        if GraphNames.TOKEN in self._inputs:
            self._inputs[GraphNames.TOKEN][0] = token

    def _check_interface(self, outputs: dict[str, tuple[int, ...]]) -> None:
        wanted = {name: tuple(array.shape) for name, array in self._inputs.items()}
        for shapes, given in ((wanted, self._session.get_inputs()), (outputs, self._session.get_outputs())):
            found = {item.name: tuple(item.shape) for item in given}
            if found != shapes:
                raise BundleError(
                    f"{self.path}: inputs or outputs differ from its manifest entry; export the bundle again"
                )
