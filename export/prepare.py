"""A calibration when it is needed: opened from its folder or, at the first question, made."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from specedge.export.calibration import MEMORY, SavedCalibration, calibrate, fingerprint_of, load_calibration
from specedge.export.calibration_texts import TOKENS, TextSource, text_source
from specedge.export.checkpoint import Checkpoint
from specedge.export.options import Progress
from specedge.export.reference import Site, reference, sites_of
from specedge.export.texts import Text
from specedge.export.writer import check_makeable
from specedge.models import find_family, read_dimensions
from specedge.quant.moments import Moments
from specedge.runtime.bundle import GraphSpec
from specedge.runtime.errors import UsageError
from specedge.runtime.graph import Decoder
from specedge.runtime.prompts import Prompt

__all__ = ["PreparedCalibration", "prepare_calibration"]

_PHASE = "calibrate"
_INDEX = "calibration.json"
_log = logging.getLogger("specedge.export")


class PreparedCalibration:
    """Moments and texts of a model, made when they are asked for; a context manager, which removes what is not kept."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        source: TextSource,
        sites: Sequence[Site],
        folder: Path | None,
        saved: SavedCalibration | None,
        *,
        threads: int | None,
        memory: int,
        progress: Progress | None,
    ) -> None:
        """Use `prepare_calibration`."""
        self._checkpoint = checkpoint
        self._source = source
        self._names = frozenset(name for site in sites for name in site.names)
        self._folder = folder
        self._saved = saved
        self._threads = threads
        self._memory = memory
        self._progress = progress
        self._written: tuple[Path, GraphSpec] | None = None
        self._temporary: Path | None = None

    def __enter__(self) -> PreparedCalibration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> Moments:
        return self._made()[name]

    @property
    def known_prompts(self) -> frozenset[tuple[int, ...]]:
        """Token ids of the prompts that it is on; those of texts that are still to be written are not known."""
        given = self._source.prompts if self._saved is None else (text.prompt for text in self._saved.texts)
        return frozenset(given)

    @property
    def texts(self) -> tuple[Text, ...]:
        """What the moments are taken on."""
        return self._made().texts

    def use(self, folder: Path, spec: GraphSpec) -> None:
        """Offers an fp32 target that has been written meanwhile; a target in another format is not used.

        Args:
            folder: Where it is, writable.
            spec: The graph, its `file` relative to `folder`.
        """
        self._written = (folder, spec)

    @contextmanager
    def target(self) -> Iterator[Decoder]:
        """The checkpoint in fp32, to compare with."""
        rows = self._source.rows
        with (
            reference(self._checkpoint, rows, written=self._written, threads=self._threads) as model,
            model.decoder(rows) as decoder,
        ):
            yield decoder

    def held_out(self, target: Decoder, tokens: int) -> list[Text]:
        """Texts that no moments were taken on: of the same kind, from another seed.

        Prompts that were given may come again, with other answers.
        """
        return replace(self._source, seed=self._source.seed + 1, tokens=tokens).write(target)

    def close(self) -> None:
        """Removes the moments that are not kept."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = self._saved = None

    def _made(self) -> SavedCalibration:
        if self._saved is None:
            self._saved = self._make()
        return self._saved

    def _make(self) -> SavedCalibration:
        if self._folder is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="specedge-"))
        folder = self._folder if self._temporary is None else self._temporary / "calibration"
        assert folder is not None
        source = self._source
        fingerprint = fingerprint_of(self._checkpoint, source.name)
        report = self._progress or _silent
        # Halves of the phase: writing and measuring take about the same time.
        with reference(self._checkpoint, source.rows, written=self._written, threads=self._threads) as model:
            with model.decoder(source.rows) as decoder:
                texts = source.write(decoder, lambda done, total: report(_PHASE, done * 1000 // total, 2000))
            saved = calibrate(
                model,
                texts,
                folder,
                fingerprint,
                memory=self._memory,
                progress=lambda done, total: report(_PHASE, 1000 + done * 1000 // total, 2000),
            )
        _log.info("calibrated on %d texts of %d tokens", len(texts), sum(len(text.tokens) for text in texts))
        return saved


def prepare_calibration(
    checkpoint: Checkpoint,
    *,
    capacity: int,
    prompts: Sequence[Prompt] | None = None,
    folder: Path | None = None,
    seed: int = 0,
    tokens: int = TOKENS,
    threads: int | None = None,
    memory: int = MEMORY,
    progress: Progress | None = None,
) -> PreparedCalibration:
    """Checks what a calibration would be made of; it is made when its moments or texts are asked for.

    Args:
        checkpoint: The model.
        capacity: Most rows of a text.
        prompts: Prompts that the model answers; None: it writes texts by itself.
        folder: Where a calibration is, or will be kept; None: it is not kept. One that is there is
            used if it is of this model; and on other texts than asked for it is refused, unless
            nothing was asked for.
        seed: Of the texts.
        tokens: Of all texts, about.
        threads: To compute with; None: all.
        memory: Most bytes of sums at a time.
        progress: Told how far it is, in the phase "calibrate".

    Raises:
        UsageError: Prompts that are too few or too long; a folder that holds something else, or a
            calibration of something else, or a damaged one.
        PromptError, BundleError: The tokenizer or the chat template, as `text_source`.
    """
    sizes = read_dimensions(find_family(checkpoint.config.get("model_type")), checkpoint.config)
    source = text_source(checkpoint, prompts, capacity=capacity, vocab_size=sizes.vocab_size, tokens=tokens, seed=seed)
    sites = sites_of(sizes)
    saved = None
    if folder is not None and (folder / _INDEX).exists():
        asked = prompts is not None or (seed, tokens) != (0, TOKENS)
        fingerprint = fingerprint_of(checkpoint, source.name if asked else None)
        saved = load_calibration(folder, fingerprint, sites, sizes.vocab_size)
    elif folder is not None and folder.exists():
        raise UsageError(f"{folder}: exists already and holds no calibration; give another folder")
    elif folder is not None:
        check_makeable(folder)
    return PreparedCalibration(
        checkpoint, source, sites, folder, saved, threads=threads, memory=memory, progress=progress
    )


def _silent(phase: str, done: int, total: int) -> None:
    pass
