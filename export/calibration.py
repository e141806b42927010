"""Moments of what each linear layer is given over texts, kept in a folder: made in one run, used in many.

    calibration.json   what it was made from, and the sites: layers with the same input share one
    texts.json         the token ids, as distillation reads them again
    NAME.npy           the moments of a site, named after its first layer: float32, one after the other
                       second [in, in], largest, mean, magnitude [in], row_peak [5], rows [n, in], stands_for [n]

Texts are streamed through the taps of the checkpoint in fp32. The sums of all sites may be larger
than memory: then the sites take turns in groups, with a pass over the texts for each group.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specedge.export.checkpoint import Checkpoint
from specedge.export.reference import CHUNK, Reference, Site
from specedge.export.texts import Text
from specedge.export.writer import staged
from specedge.quant.moments import KEPT_ROWS, Moments, MomentsSum
from specedge.runtime.errors import NumericError, UsageError

__all__ = ["MEMORY", "Fingerprint", "SavedCalibration", "calibrate", "fingerprint_of", "load_calibration"]

Counter = Callable[[int, int], None]
"""Told how many tokens are done, of how many."""

MEMORY = 512 << 20
"""Most bytes of sums at a time."""

_VERSION = 1
_INDEX, _TEXTS = "calibration.json", "texts.json"
_PEAKS = 5  # quantiles
_LARGEST_INDEX, _LARGEST_TEXTS = 16 << 20, 256 << 20  # bytes
_LARGEST_HEADER = 4096  # of a .npy file
_SAMPLES = 4096


@dataclass(frozen=True)
class Fingerprint:
    """What a calibration was made from.

    Attributes:
        model: Of the checkpoint.
        texts: Of the texts' source: a prompt file, a seed, how many tokens; "" fits any.
    """

    model: str
    texts: str


class SavedCalibration:
    """Moments by the name of the layer, read from their files when asked for.

    Attributes:
        folder: Where they are.
        texts: What they were taken on.
    """

    def __init__(self, folder: Path, texts: Sequence[Text], sites: Sequence[_SavedSite]) -> None:
        self.folder = folder
        self.texts = tuple(texts)
        self._sites = {name: site for site in sites for name in site.names}

    def __contains__(self, name: object) -> bool:
        return name in self._sites

    def __getitem__(self, name: str) -> Moments:
        """Reads the moments of a layer.

        Raises:
            UsageError: The file is missing or damaged.
        """
        site = self._sites[name]
        return site.unpack(_read_numbers(self.folder / site.file, site.size))


def fingerprint_of(checkpoint: Checkpoint, texts: object) -> Fingerprint:
    """Tells checkpoints and texts apart, by values of each tensor at even distances; it is no proof against malice.

    Args:
        checkpoint: The model.
        texts: What the texts depend on, for JSON; None: any texts will do.
    """
    model = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True, default=str).encode())
    model.update(checkpoint.tokenizer.model.encode())
    for name in sorted(checkpoint.tensors):
        tensor = checkpoint.tensors[name]
        model.update(f"{name} {tensor.shape}".encode())
        model.update(np.ascontiguousarray(tensor.reshape(-1)[:: max(1, tensor.size // _SAMPLES)]).tobytes())
    source = "" if texts is None else hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()
    return Fingerprint(model.hexdigest(), source)


def calibrate(
    reference: Reference,
    texts: Sequence[Text],
    folder: Path,
    fingerprint: Fingerprint,
    *,
    memory: int = MEMORY,
    progress: Counter | None = None,
) -> SavedCalibration:
    """Takes the moments of all linear layers over texts, and saves both.

    Args:
        reference: The checkpoint in fp32.
        texts: At least one, none longer than the reference's capacity.
        folder: Where to save; it appears when all is there, and must not exist before.
        fingerprint: Saved with them.
        memory: Most bytes of sums at a time; one layer's are kept in any case.
        progress: Told of the tokens that are run.

    Raises:
        NumericError: The checkpoint computes NaN or infinity.
        StorageError: The name is taken, or the disk refuses.
    """
    groups = list(_groups(reference.sites, memory))
    total = sum(len(text.tokens) for text in texts) * len(groups)
    longest = max(len(text.tokens) for text in texts)
    saved: list[_SavedSite] = []
    done = 0
    with staged(folder) as stage, reference.taps(longest + 1) as taps:
        for group in groups:
            sums = {site: MomentsSum(site.width) for site in group}
            for text in texts:
                for rows in taps.run(text.tokens, group):
                    for site, given in rows.items():
                        _add(sums[site], site, given)
                done += len(text.tokens)
                if progress is not None:
                    progress(done, total)
            while sums:
                site, collected = sums.popitem()
                saved.append(_save(stage, site, collected.result()))
        _write_index(stage, texts, saved, fingerprint)
    return SavedCalibration(folder, texts, saved)


def load_calibration(
    folder: Path, fingerprint: Fingerprint, sites: Sequence[Site], vocab_size: int
) -> SavedCalibration:
    """Opens what `calibrate` saved. The files are checked as files of strangers are.

    Args:
        folder: Where it is.
        fingerprint: What it must have been made from.
        sites: What it must hold.
        vocab_size: How many token ids the model has.

    Raises:
        UsageError: It was made from something else, or is damaged.
    """
    index = _read_json(folder / _INDEX, _LARGEST_INDEX)
    try:
        if index["version"] != _VERSION:
            raise ValueError(f"version {index['version']!r} where {_VERSION} belongs")
        made = Fingerprint(index["model"], index["texts"])
        saved = [_SavedSite.read(entry) for entry in index["sites"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(folder / _INDEX, error) from None
    if made.model != fingerprint.model:
        raise UsageError(f"{folder}: a calibration of another model; give another folder")
    if fingerprint.texts and made.texts != fingerprint.texts:
        raise UsageError(f"{folder}: a calibration on other texts (prompts, seed or length); give another folder")
    if {site.names: site.width for site in saved} != {site.names: site.width for site in sites}:
        raise _damaged(folder / _INDEX, ValueError("its layers are not the model's"))
    for site in saved:
        _check_size(folder / site.file, site.size)
    return SavedCalibration(folder, _read_texts(folder / _TEXTS, vocab_size), saved)


@dataclass(frozen=True)
class _SavedSite:
    """An entry of the index: layers with one input, its width, rows in all and rows kept."""

    names: tuple[str, ...]
    width: int
    count: int
    kept: int

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> _SavedSite:
        numbers = tuple(entry[name] for name in ("width", "count", "kept"))
        if not all(type(number) is int and number > 0 for number in numbers) or numbers[2] > KEPT_ROWS:
            raise ValueError(f"a site of {numbers} inputs, rows and rows kept")
        if not all(isinstance(name, str) for name in entry["names"]) or set(entry) != {
            "names",
            "width",
            "count",
            "kept",
        }:
            raise ValueError("a site that is none")
        return cls(tuple(entry["names"]), *numbers)

    @property
    def file(self) -> str:
        """Names are compared with the model's before this is used, so it stays in the folder."""
        return f"{self.names[0]}.npy"

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of second, largest, mean, magnitude, row_peak, rows, stands_for."""
        width = self.width
        return (width, width), (width,), (width,), (width,), (_PEAKS,), (self.kept, width), (self.kept,)

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    def unpack(self, numbers: NDArray[np.float32]) -> Moments:
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])[:-1]
        second, largest, mean, magnitude, row_peak, rows, stands_for = (
            part.reshape(shape) for part, shape in zip(np.split(numbers, ends), self.shapes, strict=True)
        )
        return Moments(self.count, largest, mean, magnitude, second, row_peak, rows, stands_for)


def _groups(sites: Sequence[Site], memory: int) -> Iterator[list[Site]]:
    """Sites whose sums stay within `memory`: second moments, rows kept, rows of a pass, and one product beside."""
    group: list[Site] = []
    for site in sites:
        more = [*group, site]
        size = sum(4 * each.width * (each.width + KEPT_ROWS + CHUNK) for each in more)
        if group and size + max(4 * each.width**2 for each in more) > memory:
            yield group
            more = [site]
        group = more
    yield group


def _add(collected: MomentsSum, site: Site, rows: NDArray[np.float32]) -> None:
    try:
        collected.add(rows)
    except ValueError:
        raise NumericError(f"{site.names[0]} is given NaN or infinity; this checkpoint cannot be calibrated") from None


def _save(folder: Path, site: Site, moments: Moments) -> _SavedSite:
    saved = _SavedSite(site.names, site.width, moments.count, len(moments.rows))
    parts = (
        moments.second, moments.largest, moments.mean, moments.magnitude,
        moments.row_peak, moments.rows, moments.stands_for,
    )  # fmt: skip
    numbers = np.concatenate([part.reshape(-1) for part in parts]).astype(np.float32, copy=False)
    np.save(folder / saved.file, numbers, allow_pickle=False)
    return saved


def _write_index(folder: Path, texts: Sequence[Text], sites: Sequence[_SavedSite], fingerprint: Fingerprint) -> None:
    index = {
        "version": _VERSION,
        "model": fingerprint.model,
        "texts": fingerprint.texts,
        "sites": [
            {"names": list(site.names), "width": site.width, "count": site.count, "kept": site.kept} for site in sites
        ],
    }
    written = [[list(text.prompt), list(text.answer)] for text in texts]
    (folder / _INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    (folder / _TEXTS).write_text(json.dumps(written), encoding="utf-8")


def _check_size(path: Path, size: int) -> None:
    """A file cut short is known before minutes of work."""
    try:
        found = path.stat().st_size
        if not 4 * size < found <= 4 * size + _LARGEST_HEADER:
            raise ValueError(f"{found} bytes where about {4 * size} belong")
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from None


def _read_numbers(path: Path, size: int) -> NDArray[np.float32]:
    """A float32 vector of a size that is known before."""
    try:
        mapped = np.lib.format.open_memmap(path, mode="r")  # unlike np.load it opens nothing but .npy
        if mapped.dtype != np.float32 or mapped.shape != (size,):
            raise ValueError(f"{mapped.dtype} {list(mapped.shape)} where float32 [{size}] belongs")
        numbers = np.array(mapped)
        if not np.isfinite(numbers).all():
            raise ValueError("numbers that are not finite")
    except (OSError, ValueError, EOFError, SyntaxError) as error:
        raise _damaged(path, error) from None
    return numbers


def _read_json(path: Path, largest: int) -> Any:
    try:
        if path.stat().st_size > largest:
            raise ValueError("it is too large")
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, error) from None


def _read_texts(path: Path, vocab_size: int) -> list[Text]:
    try:
        texts = [Text(tuple(prompt), tuple(answer)) for prompt, answer in _read_json(path, _LARGEST_TEXTS)]
        if not texts or not all(
            type(token) is int and 0 <= token < vocab_size for text in texts for token in text.tokens
        ):
            raise ValueError("no texts, or tokens that the model does not have")
    except (TypeError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise _damaged(path, error) from None
    return texts


def _damaged(path: Path, error: BaseException) -> UsageError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())[:120]
    return UsageError(f"{path}: a damaged calibration ({reason}); remove {path.parent}, and it will be made again")
