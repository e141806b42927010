"""What `specedge tune --device-profile` prints: a prediction, not a measurement."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specedge.runtime.bundle import DEVICES, Manifest, open_bundle
from specedge.runtime.drafters.registry import COPIES, LOOKUP, is_draft
from specedge.runtime.errors import UsageError
from specedge.runtime.gains import ChainGain
from specedge.runtime.providers import default_threads
from specedge.runtime.roofline import (
    MODELS,
    DeviceProfile,
    Model,
    Prediction,
    loaded_bytes,
    pass_ms,
    predict,
    read_profile,
)
from specedge.runtime.specs import GraphSpec
from specedge.runtime.tuning import Tuning, read_tuning

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["THIS", "measured_profile", "predict_bundle", "predict_for"]

THIS = "this"
_HEADS_SHARE = 0.05
_CPU_LAUNCH_US = 6.0
_FEW = 12
_LEAST_LOADING = 0.1
_LONGEST = 16


def predict_for(folder: Path, profile: str, threads: int | None, out: Path | None, tuned_on: str | None = None) -> None:
    """Prints what methods are predicted to do on a device, and writes it; `tuned_on` says whose tuning is used.

    Raises:
        UsageError: The bundle was not tuned here (acceptance is measured, not guessed), or there is no such profile.
    """
    from specedge.runtime.files import write_text
    from specedge.runtime.show import show

    if tuned_on is not None and tuned_on not in DEVICES:
        raise UsageError(f"device is {tuned_on!r}: choose one of {', '.join(DEVICES)}")
    bundle = open_bundle(folder)
    count = default_threads() if threads is None else threads
    tuning = read_tuning(bundle, count, tuned_on)
    if tuning is None:
        first = f"specedge tune {folder} --threads {count}{f' --device {tuned_on}' if tuned_on else ''}"
        raise UsageError(f"{folder}: acceptance was not measured here yet; do that first: {first}")
    device = measured_profile(bundle.manifest, tuning) if profile == THIS else read_profile(profile)
    blocks = {bundle.manifest.name: predict_bundle(bundle.manifest, device, tuning)}
    if profile != THIS:
        blocks.update({f"{each.name}, {kind}": _of_model(each, kind, device, tuning) for each, kind in _boards(device)})
    show(_table(device, blocks, tuning if profile == THIS else None), sys.stdout)
    if out is not None:
        result = {name: [dataclasses.asdict(each) for each in block] for name, block in blocks.items()}
        write_text(out, json.dumps({"profile": dataclasses.asdict(device), "predicted": result}, indent=1) + "\n")


def measured_profile(manifest: Manifest, tuning: Tuning) -> DeviceProfile:
    """This machine's numbers as its tuning's passes show them: what every pass loads, and what a row computes.

    Both are the straight line through passes of few rows: wider ones are padded.
    """
    model, kind = _model(manifest.name, manifest.target), _kind(manifest.target.precision)
    unbounded = DeviceProfile("", 1e6, {kind: 1e6}, _CPU_LAUNCH_US, overlap=0.0, efficiency=1.0)
    few = {width: ms for width, ms in tuning.passes.items() if width <= _FEW} or tuning.passes
    slope, begin = np.polyfit(list(few), list(few.values()), 1) if len(few) > 1 else (0.0, min(few.values()))
    # Of a tiny model the kernels' starts alone would be all.
    loading, computing = max(begin - pass_ms(model, kind, unbounded, 0), _LEAST_LOADING * begin), max(slope, 1e-3)
    return DeviceProfile(
        name="this machine",
        bandwidth_gbs=loaded_bytes(model, kind) / loading / 1e6,
        tflops={kind: 2 * model.parameters / computing / 1e9},
        launch_us=_CPU_LAUNCH_US,
        overlap=0.0,
        efficiency=1.0,
        source="passes that a tuning timed",
    )


def predict_bundle(manifest: Manifest, device: DeviceProfile, tuning: Tuning) -> list[Prediction]:
    """Methods of a bundle on a device, by the acceptance that its tuning measured."""
    target = _model(manifest.name, manifest.target)
    drafts = {}
    for method in tuning.gains:
        draft = manifest.drafts.get(method.partition(":")[2]) if is_draft(method) else None
        drafts[method] = (
            (0.0, _row_ms(draft, device)) if draft is not None else (_heads_ms(manifest, method, device), 0.0)
        )
    return predict(target, _kind(manifest.target.precision), device, _expected(tuning), drafts)


def _of_model(model: Model, precision: str, device: DeviceProfile, tuning: Tuning) -> list[Prediction]:
    """Methods of a public model: a draft of itself in INT4, heads that take a twentieth of a pass, and lookup."""
    plain = pass_ms(model, precision, device, 1)
    drafts: dict[str, tuple[float, float]] = {}
    gains = _expected(tuning)
    for method in list(gains):
        if is_draft(method) and precision == "int4":
            del gains[method]  # a draft in the target's own format would take what the target takes
            continue
        drafts[method] = (0.0, pass_ms(model, "int4", device, 1)) if is_draft(method) else (_HEADS_SHARE * plain, 0.0)
        if method == LOOKUP:
            drafts[method] = (0.0, 0.0)
    return predict(model, precision, device, gains, drafts)


def _boards(device: DeviceProfile) -> list[tuple[Model, str]]:
    """Public models that fit into a device's memory, in FP16 and INT4."""
    sizes = {"fp16": 2.0, "int4": 4.5 / 8}
    return [
        (model, kind)
        for model in MODELS
        for kind, size in sizes.items()
        if not device.memory_gb or model.parameters * size / 1e9 < 0.85 * device.memory_gb
    ]


def _expected(tuning: Tuning) -> dict[str, list[float]]:
    """Expected accepted tokens by draft length, of every method: on average over what lookup had found."""
    found = {}
    for method, tables in tuning.gains.items():
        sums = np.zeros(1 + _LONGEST)
        for matched, shares in tables.items():
            expected = ChainGain(shares).expected(_LONGEST)
            sums += np.array(expected) * _share(method, matched, tuning.matches)
        found[method] = sums.tolist()
    return found


def _share(method: str, matched: int, matches: Mapping[int, float]) -> float:
    """Share of rounds to which a method's gain for so many found tokens applies."""
    least = COPIES.get(method, 0)
    if not least or matched:
        return matches.get(matched, 0.0) if least else 1.0
    return sum(share for found, share in matches.items() if found < least)


def _model(name: str, spec: GraphSpec) -> Model:
    bits = {"fp32": 32.0, "fp16": 16.0, "bf16": 16.0, "int4": 5.0}.get(spec.precision, 8.5)
    return Model(name, spec.weight_bytes * 8 / bits, spec.layers, spec.kv_heads * spec.head_dim)


def _kind(precision: str) -> str:
    if precision == "bf16":
        return "fp16"  # as many bytes, and the same peak
    return precision if precision in ("fp32", "fp16", "int8", "int8-block", "int4") else "int8"


def _row_ms(spec: GraphSpec, device: DeviceProfile) -> float:
    return pass_ms(_model(spec.file, spec), _kind(spec.precision), device, 1)


def _heads_ms(manifest: Manifest, method: str, device: DeviceProfile) -> float:
    """Heads load their weights, and start a few kernels each."""
    heads = next(iter(manifest.heads.values()), None)
    if method == LOOKUP or heads is None:
        return 0.0
    loaded = heads.weight_bytes / (device.bandwidth_gbs * 1e6 * device.efficiency)
    return loaded + 1e-3 * device.launch_us * 16 * heads.heads


def _table(device: DeviceProfile, blocks: Mapping[str, Sequence[Prediction]], measured: Tuning | None) -> Table:
    from rich.markup import escape
    from rich.table import Table

    source = f"{escape(device.name)}, from its {device.bandwidth_gbs:.0f} GB/s"
    table = Table(title=f"PREDICTED for {source}; nothing was run")
    headings = ["model", "method", "draft length", "τ", "tokens/s predicted"]
    for heading in [*headings, *(["measured here", "off by"] if measured is not None else [])]:
        table.add_column(heading, justify="left" if heading in ("model", "method") else "right")
    for name, block in blocks.items():
        for each in block:
            cells = [escape(name), escape(each.method), str(each.draft_length), f"{each.tau:.2f}"]
            cells.append(f"{each.tokens_per_second:.1f}")
            if measured is not None:
                real = 1e3 * measured.speed(each.method)
                off = f"{100 * (each.tokens_per_second / real - 1):+.0f} %" if real else "-"
                cells += [f"{real:.1f}", off]
            table.add_row(*cells)
    return table
