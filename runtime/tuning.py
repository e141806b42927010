"""`tuning/DEVICE.json`: what a tuning measured of a bundle on a device, and what it chose."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specedge.runtime.bundle import Bundle, Manifest
from specedge.runtime.errors import StorageError
from specedge.runtime.files import check_writable, write_text
from specedge.runtime.machine import look_at_gpu
from specedge.runtime.options import PLAIN
from specedge.runtime.schema import fields_of, mapping_of, one_line, parse_json

__all__ = [
    "Choice",
    "Tuning",
    "check_tuning_writable",
    "device_name",
    "new_tuning",
    "read_tuning",
    "tuning_path",
    "write_tuning",
]

_FOLDER = "tuning"
_MOST_BYTES = 1 << 20
_LOG = logging.getLogger("specedge.runtime")


@dataclass(frozen=True)
class Choice:
    """What a tuning expects of a method, and what it saw.

    Attributes:
        draft_length: At which the method is fastest.
        predicted_ms, measured_ms: Milliseconds a committed token at that length.
        tau: Tokens a pass that are expected.
    """

    draft_length: int
    predicted_ms: float
    measured_ms: float
    tau: float


@dataclass(frozen=True)
class Tuning:
    """What was measured of a bundle on a device.

    Attributes:
        target: SHA-256 of the target's graph: of another one this says nothing.
        threads: Threads it was measured with.
        passes: Milliseconds of a pass of the target by its width.
        drafts: For each method milliseconds of a draft, and of each of its tokens.
        gains: For each method, by how many tokens lookup had found again (0: it does not matter, or none), the
            share of tokens that stood at each depth where all before them did.
        matches: Share of rounds in which lookup had found 0, 1, 2, 3 tokens again.
        choices: What is best for each method.
        method: The fastest of them.
        temperatures: For each method that draws, the best temperature of its drafts by the reply's, as text ("0.7").
        prompts: How many prompts were answered.
        note: What the numbers were measured with, for people.
    """

    target: str
    threads: int
    passes: Mapping[int, float]
    drafts: Mapping[str, tuple[float, float]]
    gains: Mapping[str, Mapping[int, tuple[float, ...]]]
    matches: Mapping[int, float]
    choices: Mapping[str, Choice]
    method: str
    temperatures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    prompts: int = 0
    note: str = ""

    def speed(self, method: str) -> float:
        """Tokens a millisecond that a method was measured at; 0: it was not."""
        return 1 / self.choices[method].measured_ms if method in self.choices else 0.0


def device_name(device: str, threads: int) -> str:
    """What a device's tuning is called: the provider, the chip and the threads."""
    gpu = None if device == "cpu" else look_at_gpu()
    chip = _processor() if gpu is None else gpu.name
    return f"{device}-{re.sub(r'[^a-z0-9]+', '-', chip.lower()).strip('-')[:48] or 'unknown'}-{threads}"


def tuning_path(bundle: Bundle, threads: int, device: str | None = None) -> Path:
    """Where a device's tuning of a bundle lies; None: the device that the bundle was made for."""
    return bundle.folder / _FOLDER / f"{device_name(device or bundle.manifest.device, threads)}.json"


def read_tuning(bundle: Bundle, threads: int, device: str | None = None) -> Tuning | None:
    """A device's tuning of a bundle; None where there is none, or none that fits (which is logged).

    It is no part of what the manifest lists, so nothing in it is believed that could do more than cost time.
    """
    path = tuning_path(bundle, threads, device)
    if not os.path.lexists(path):
        return None
    elsewhere = f" --device {device}" if device not in (None, bundle.manifest.device) else ""
    again = f"write it again with: specedge tune {bundle.folder} --threads {threads}{elsewhere}"
    try:
        if not path.is_file() or path.is_symlink() or path.parent.is_symlink():
            raise ValueError("a link, a folder or a device")
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError("larger than a tuning can be")
        tuning = _tuning(parse_json(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError, OverflowError, OSError) as error:
        _LOG.warning("%s is left out: %s; %s", path, one_line(error), again)
        return None
    if tuning.target != _target(bundle.manifest):
        _LOG.warning("%s is of another export; %s", path, again)
        return None
    return tuning


def write_tuning(bundle: Bundle, tuning: Tuning, device: str | None = None) -> Path:
    """Writes a tuning into its bundle, beside and renamed.

    Raises:
        StorageError: It cannot be written.
    """
    path = check_tuning_writable(bundle, tuning.threads, device)
    write_text(path, json.dumps(dataclasses.asdict(tuning), indent=1) + "\n")
    return path


def check_tuning_writable(bundle: Bundle, threads: int, device: str | None = None) -> Path:
    """Where a tuning will be written, looked at before any work is done.

    Raises:
        StorageError: It cannot be written there.
    """
    path = tuning_path(bundle, threads, device)
    if path.parent.is_symlink() or path.is_symlink():
        raise StorageError(f"{path}: a link, or behind one; copy the bundle with its contents")
    try:
        path.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise StorageError(f"{path.parent}: cannot be made ({error.strerror}); make the bundle writable") from None
    return check_writable(path)


def new_tuning(bundle: Bundle, **measured: Any) -> Tuning:
    """A tuning of this bundle."""
    return Tuning(target=_target(bundle.manifest), **measured)


def _target(manifest: Manifest) -> str:
    return manifest.files[manifest.target.file].sha256


def _processor() -> str:
    """The processor's name, as far as the system tells."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        found = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(.+)$", text, re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def _tuning(raw: Any) -> Tuning:
    values = fields_of(Tuning, raw, "the tuning")
    values["passes"] = {_whole(key): _ms(value) for key, value in mapping_of(values["passes"], "passes").items()}
    if not values["passes"]:
        raise ValueError("no passes")
    values["drafts"] = {key: _pair(value) for key, value in mapping_of(values["drafts"], "drafts").items()}
    values["gains"] = {
        method: {_whole(key, 0): _some(_shares(value)) for key, value in mapping_of(gains, "gains").items()}
        for method, gains in mapping_of(values["gains"], "gains").items()
    }
    found = mapping_of(values["matches"], "matches")
    values["matches"] = dict(zip((_whole(key, 0) for key in found), _shares(list(found.values())), strict=True))
    values["choices"] = {
        key: _choice(value, f"choice {one_line(key)}")
        for key, value in mapping_of(values["choices"], "choices").items()
    }
    values["temperatures"] = {
        method: {f"{_temperature(key):g}": _temperature(value) for key, value in mapping_of(best, "it").items()}
        for method, best in mapping_of(values.get("temperatures", {}), "temperatures").items()
    }
    if PLAIN not in values["choices"]:
        raise ValueError("no choice for plain decoding")
    return Tuning(**values)


def _choice(raw: Any, where: str) -> Choice:
    values = fields_of(Choice, raw, where)
    times = {name: _ms(values[name]) for name in ("predicted_ms", "measured_ms", "tau")}
    return Choice(_whole(values["draft_length"], 0), **times)


def _whole(value: Any, least: int = 1) -> int:
    number = int(value)
    if not least <= number < 1 << 16:
        raise ValueError(f"{one_line(value)} is no width")
    return number


def _ms(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1e-6 <= value <= 1e6:
        raise ValueError(f"{one_line(value)} is no time")
    return float(value)


def _temperature(value: Any) -> float:
    number = float(value)
    if not 0 < number <= 100:
        raise ValueError(f"{one_line(value)} is no temperature")
    return number


def _pair(value: Any) -> tuple[float, float]:
    first, second = _shares(value, most=1e6)
    return first, second


def _some(shares: tuple[float, ...]) -> tuple[float, ...]:
    if not shares:
        raise ValueError("gains of no depth")
    return shares


def _shares(value: Any, most: float = 1.0) -> tuple[float, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) > 64:
        raise ValueError(f"no list of at most 64 numbers: {one_line(value)}")
    if any(isinstance(each, bool) or not isinstance(each, (int, float)) or not 0 <= each <= most for each in value):
        raise ValueError(f"{one_line(value)} holds something else than numbers from 0 to {most:g}")
    return tuple(map(float, value))
