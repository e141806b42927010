"""What is installed and what this machine has, what fits together, and what to do where it does not."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specedge.runtime.bundle import Bundle, GraphSpec, open_bundle
from specedge.runtime.errors import DeviceError
from specedge.runtime.machine import Machine, look_at_machine
from specedge.runtime.placement import placement_of
from specedge.runtime.providers import default_threads, installed_providers, open_session
from specedge.runtime.room import available_memory, memory_limit

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Advice", "Report", "advise", "examine", "graph_placements", "report_json", "report_table"]

_PACKAGES = ("numpy", "onnxruntime", "onnxruntime-gpu", "tokenizers", "onnx", "torch", "transformers")
_GPU_PROVIDERS = {"cuda": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider"}
_BIAS_VERSION, _SCATTER_VERSION = (1, 29), (1, 26)
# PyPI's onnxruntime-gpu for aarch64 holds kernels for these alone (read out of the 1.31.1 wheel), not for
# Orin (8.7) and not for Thor (11.0).
_PYPI_AARCH64 = ("8.9", "9.0", "12.0", "12.1")
_GUIDE = "docs/gpu.md of SpecEdge's source"


@dataclass(frozen=True)
class Advice:
    """One finding.

    Attributes:
        level: "ok", "note", or "todo" where something has to be done.
        text: What was found, and what to do.
    """

    level: str
    text: str


@dataclass(frozen=True)
class Report:
    """Everything the doctor found.

    Attributes:
        python: Version.
        packages: Versions of those of interest that are installed.
        providers: ONNX Runtime's, as compiled in; () where it is not installed.
        threads: Processors this process may use.
        memory_bytes: Memory that is free now; None: the system does not say.
        memory_limit: What a container's limit leaves; None: there is none.
        machine: What the machine is.
        advice: What to do.
        graphs: Of a bundle: what each graph got, one line each.
        broken: Why ONNX Runtime cannot be loaded though it is installed; "": it can, or is not.
        wheel: Platform of onnxruntime-gpu's wheel: "manylinux_2_34_aarch64" from PyPI, "linux_aarch64" built by
            somebody for his machine.
    """

    python: str
    packages: Mapping[str, str]
    providers: tuple[str, ...]
    threads: int
    memory_bytes: int | None
    memory_limit: int | None
    machine: Machine
    advice: tuple[Advice, ...] = ()
    graphs: Mapping[str, str] = field(default_factory=dict)
    broken: str = ""
    wheel: str = ""

    @property
    def onnxruntime(self) -> tuple[int, int] | None:
        """Major and minor version of ONNX Runtime."""
        found = self.packages.get("onnxruntime-gpu") or self.packages.get("onnxruntime")
        if found is None:
            return None
        major, minor, *_ = (*found.split("."), "0")
        return int(major), int("".join(filter(str.isdigit, minor)) or 0)


def examine(bundle: Path | None = None) -> Report:
    """Looks at this machine; changes nothing and reaches nothing outside it.

    Args:
        bundle: A bundle whose graphs are opened, to see where their nodes land; None: none.

    Raises:
        BundleError: It is none, or damaged.
    """
    try:
        providers, broken = installed_providers(), ""
    except DeviceError as error:
        providers, broken = (), str(error)
    report = Report(
        python=platform.python_version(),
        packages={name: version for name in _PACKAGES if (version := _version(name)) is not None},
        providers=providers,
        threads=default_threads(),
        memory_bytes=available_memory(),
        memory_limit=memory_limit(),
        machine=look_at_machine(),
        graphs={} if bundle is None else graph_placements(bundle),
        broken=broken,
        wheel=_platform("onnxruntime-gpu"),
    )
    return dataclasses.replace(report, advice=tuple(advise(report)))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _platform(package: str) -> str:
    """The platform that an installed wheel was tagged with."""
    try:
        tags = importlib.metadata.distribution(package).read_text("WHEEL") or ""
    except importlib.metadata.PackageNotFoundError:
        return ""
    return next((line.rpartition("-")[2] for line in tags.splitlines() if line.startswith("Tag:")), "")


def advise(report: Report) -> Iterator[Advice]:
    """What follows from a report."""
    machine, gpu = report.machine, report.machine.gpu
    if report.broken:
        yield Advice("todo", f"ONNX Runtime is installed and cannot be loaded: {report.broken}")
    elif not report.providers:
        yield Advice("todo", "ONNX Runtime is not installed: pip install 'specedge[cpu]', or for a GPU see below")
    if "onnxruntime" in report.packages and "onnxruntime-gpu" in report.packages:
        yield Advice(
            "todo",
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files: "
            "pip uninstall onnxruntime onnxruntime-gpu, then install one",
        )
    if gpu is None and not report.broken:
        yield Advice("ok", "no GPU of NVIDIA's was found: bundles of --device cpu run here")
    if gpu is None:
        return
    has = [device for device, provider in _GPU_PROVIDERS.items() if provider in report.providers]
    if not has:
        yield Advice("todo", f"{gpu.name} is there and this ONNX Runtime has no provider for it: {_wheel(machine)}")
    else:
        yield from _advise_export(report, has)
        if _is_pypi_without_kernels(report):
            yield Advice("todo", f"this wheel may hold no kernels for compute capability {gpu.capability}: "
                         f"{_wheel(machine)}")  # fmt: skip
    if gpu.integrated:
        yield Advice("note", "the GPU shares the system's memory: what other programs take is missing here")
    if machine.fastest:
        mode = machine.fastest.partition(" ")[0]
        yield Advice(
            "note",
            f"power mode {machine.power}: mode {machine.fastest} is faster: "
            f"sudo nvpmodel -m {mode}; sudo jetson_clocks",
        )


def _advise_export(report: Report, has: list[str]) -> Iterator[Advice]:
    """Which bundle runs here."""
    version, machine = report.onnxruntime or (0, 0), report.machine
    if version >= _BIAS_VERSION:
        yield Advice("ok", "specedge export MODEL --device cuda")
    elif version >= _SCATTER_VERSION:
        yield Advice("ok", "specedge export MODEL --device cuda --attention onnx24 (from 1.29 on, gqa is faster)")
    else:
        yield Advice("ok", "specedge export MODEL --device cuda --attention plain (newer versions have faster kernels)")
    if "tensorrt" in has:
        attention = "plain (TensorRT 10.3)" if machine.jetpack == 6 else "onnx24 from TensorRT 10.15 on, else plain"
        yield Advice("ok", f"specedge export MODEL --device tensorrt --attention {attention}")


def _is_pypi_without_kernels(report: Report) -> bool:
    """Whether the wheel is PyPI's for aarch64, on a GPU that it holds no kernels for."""
    gpu = report.machine.gpu
    public = report.wheel.startswith("manylinux") and report.wheel.endswith("aarch64")
    return gpu is not None and public and gpu.capability not in _PYPI_AARCH64


def _wheel(machine: Machine) -> str:
    """Which wheel of onnxruntime-gpu fits, and why."""
    if machine.jetpack == 6:
        return (
            "pip install --index-url https://pypi.jetson-ai-lab.io/jp6/cu126 onnxruntime-gpu==1.23.0 (Python 3.10; "
            f"PyPI's wheel for aarch64 has no kernels for Orin); see {_GUIDE}"
        )
    if machine.jetpack == 7:
        return (
            "no index is known to hold a wheel with kernels for this board (PyPI's and the sbsa one have none): "
            f"build ONNX Runtime as {_GUIDE} says"
        )
    if machine.system.endswith(("x86_64", "AMD64")):
        newest = " (Python 3.11 or newer)" if sys.version_info < (3, 11) else ""
        return f"pip uninstall onnxruntime; pip install 'specedge[gpu]'{newest}"
    return f"see {_GUIDE}"


def graph_placements(folder: Path) -> dict[str, str]:
    """Where the nodes of a bundle's graphs land on this machine, or why they do not.

    Raises:
        BundleError: It is no bundle, or damaged.
    """
    bundle = open_bundle(folder)
    graphs = (bundle.manifest.target, *bundle.manifest.drafts.values())
    return {spec.file: _placed(bundle, spec) for spec in graphs}


def _placed(bundle: Bundle, spec: GraphSpec) -> str:
    device = spec.device or bundle.manifest.device
    try:
        placement = placement_of(open_session(bundle.path(spec.file), device=device, spec=spec, recorded=True))
    except DeviceError as error:
        return str(error)
    if placement is None:
        return "this ONNX Runtime does not say where nodes land (1.23 does not, 1.32 does)"
    return ", ".join(f"{sum(kinds.values())} nodes on {provider}" for provider, kinds in placement.items())


def report_json(report: Report) -> dict[str, Any]:
    """The report for programs."""
    return {**dataclasses.asdict(report), "jetpack": report.machine.jetpack}


def report_table(report: Report) -> RenderableType:
    """The report for people."""
    from specedge.runtime.show import table

    machine, gpu = report.machine, report.machine.gpu
    rows = [
        ("system", f"{machine.system}, Python {report.python}, {report.threads} processors for this process"),
        ("packages", ", ".join(f"{name} {version}" for name, version in report.packages.items())),
        ("providers", ", ".join(report.providers) or "none: ONNX Runtime is not installed"),
        ("memory", _memory(report)),
        *([("board", machine.board)] if machine.board else []),
        *([("jetson linux", f"{machine.l4t} (JetPack {machine.jetpack or 'unknown'})")] if machine.l4t else []),
        *([("power", machine.power)] if machine.power else []),
        ("gpu", "none" if gpu is None else _gpu(machine)),
        *((f"graph {name}", text) for name, text in report.graphs.items()),
        *((advice.level, advice.text) for advice in report.advice),
    ]
    return table("specedge doctor", rows)


def _memory(report: Report) -> str:
    free = "unknown" if report.memory_bytes is None else f"{report.memory_bytes / 1e9:,.2f} GB free"
    return free if report.memory_limit is None else f"{free}, within a container's limit"


def _gpu(machine: Machine) -> str:
    gpu = machine.gpu
    assert gpu is not None
    speed = f", {gpu.bandwidth / 1e9:,.0f} GB/s" if gpu.bandwidth else ""
    return (
        f"{gpu.name}, compute capability {gpu.capability}, {gpu.memory_bytes / 1e9:,.1f} GB{speed}, "
        f"driver for CUDA {gpu.driver}"
    )
