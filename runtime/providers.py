"""Opens ONNX Runtime sessions: which execution provider, which threads, and what was really given."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specedge.runtime.errors import BundleError, DeviceError, MissingExtraError, UsageError
from specedge.runtime.memory import DeviceMemory, HostMemory, Memory
from specedge.runtime.placement import RECORD_KEY, placement_of, strays
from specedge.runtime.provider_options import (
    CAPTURE_KEY,
    NO_CAPTURE,
    context_file,
    cuda_options,
    engine_folder,
    tensorrt_options,
)
from specedge.runtime.specs import GraphSpec

if TYPE_CHECKING:
    import onnxruntime as ort

__all__ = [
    "check_placement",
    "default_threads",
    "installed_providers",
    "memory_of",
    "open_session",
    "providers_for",
    "run_options",
    "share_threads",
]

_CPU = "CPUExecutionProvider"
_WANTED = {
    "cpu": (_CPU,),
    "cuda": ("CUDAExecutionProvider", _CPU),
    "tensorrt": ("TensorrtExecutionProvider", "CUDAExecutionProvider", _CPU),
}
_ERRORS_ONLY = 3

_log = logging.getLogger("specedge.runtime")
_pool_lock = threading.Lock()
_pool_threads: int | None = None


def default_threads() -> int:
    """Processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0)) or 1
    return os.cpu_count() or 1


def installed_providers() -> tuple[str, ...]:
    """Execution providers compiled into this ONNX Runtime, whether a device is there or not; () without it."""
    try:
        return tuple(_onnxruntime().get_available_providers())
    except MissingExtraError:
        return ()


def providers_for(device: str) -> tuple[str, ...]:
    """Execution providers for a device, best first.

    Raises:
        DeviceError: The installed ONNX Runtime does not have the device's provider.
    """
    ort = _onnxruntime()
    wanted = _WANTED[device]
    if wanted[0] not in ort.get_available_providers():
        raise DeviceError(
            f"device {device}: this onnxruntime {ort.__version__} has no {wanted[0]}; "
            "specedge doctor says what to install here; specedge chat BUNDLE --device cpu tries all but bf16 on the CPU"
        )
    return wanted


def open_session(
    path: Path,
    *,
    device: str = "cpu",
    threads: int | None = None,
    spec: GraphSpec | None = None,
    captured: bool = False,
    recorded: bool = False,
) -> ort.InferenceSession:
    """Opens a graph.

    Its threads do not spin while they wait: the spinning pools of a target and a draft model
    would take the processors from each other (measured: 0.70 against 1.29 times the speed of
    plain decoding on two cores). `share_threads` is faster still.

    Args:
        path: The .onnx file; its external weights lie beside it.
        device: "cpu", "cuda" or "tensorrt".
        threads: Threads to compute with; None takes all processors of the process.
        spec: Its entry in the manifest, where it is a decoder.
        captured: Whether passes may be captured and replayed, on CUDA; each binding then names its own.
        recorded: Whether `placement_of` is to know where nodes landed; on other devices than the CPU it always does.

    Raises:
        DeviceError: The device's provider is missing, ONNX Runtime silently left it out, or would run a
            part of the graph on the CPU.
        BundleError: ONNX Runtime cannot open the graph.
    """
    ort = _onnxruntime()
    wanted = providers_for(device)
    options = _session_options(threads)
    if recorded or device != "cpu":
        options.add_session_config_entry(RECORD_KEY, "1")
    providers: list[Any] = []
    for name in wanted:
        told = _told(name, path, spec, captured=captured and device == "cuda")
        providers.append((name, told) if told else name)
    try:
        session = _open_compiled(path, options, providers) if device == "tensorrt" else None
        if session is None:
            session = ort.InferenceSession(str(path), options, providers=providers)
    except Exception as error:  # noqa: BLE001  ONNX Runtime's errors have no common base
        raise BundleError(f"{path}: ONNX Runtime {ort.__version__} cannot open it: {_one_line(error)}") from None
    _check_given(session.get_providers(), wanted, device)
    check_placement(session, wanted[0], path)
    return session


def _open_compiled(path: Path, options: ort.SessionOptions, providers: Sequence[Any]) -> ort.InferenceSession | None:
    """The graph as it was compiled before; None where it was not, or not for this GPU and this TensorRT."""
    compiled = context_file(path)
    if not compiled.exists():
        return None
    try:
        return _onnxruntime().InferenceSession(str(compiled), options, providers=providers)
    except Exception as error:  # noqa: BLE001  ONNX Runtime's errors have no common base
        _log.warning("%s is compiled anew: %s", path, _one_line(error))
        compiled.unlink(missing_ok=True)
        return None


def memory_of(device: str) -> Memory:
    """Where tensors of a device's sessions live."""
    return HostMemory() if device == "cpu" else DeviceMemory("cuda")


def run_options(graph: int | None) -> ort.RunOptions:
    """Options of a run on CUDA.

    Args:
        graph: Number, from 1 on, of the captured graph that it records and replays; None: it is not captured.
    """
    options = _onnxruntime().RunOptions()
    options.add_run_config_entry(CAPTURE_KEY, NO_CAPTURE if graph is None else str(graph))
    return options


def check_placement(session: ort.InferenceSession, wanted: str, path: Path) -> None:
    """Refuses a session part of which would silently run on the CPU.

    Raises:
        DeviceError: It would.
    """
    found = placement_of(session) if wanted != _CPU else None
    lost = {} if found is None else strays(found, wanted)
    if lost:
        named = ", ".join(f"{count} {kind}" for kind, count in sorted(lost.items()))
        raise DeviceError(
            f"{path}: {wanted} leaves nodes to the CPU ({named}), which would be far slower; "
            "export it for this device's version (specedge doctor says which), or for --device cpu"
        )


def _told(provider: str, path: Path, spec: GraphSpec | None, *, captured: bool) -> dict[str, str]:
    if provider == "CUDAExecutionProvider":
        return cuda_options(spec, captured=captured)
    if provider == "TensorrtExecutionProvider":
        engine_folder(path).mkdir(parents=True, exist_ok=True)
        return tensorrt_options(path, spec)
    return {}


def share_threads(threads: int | None = None) -> None:
    """Makes one thread pool for all sessions of this process: the fastest choice, and a program's to make.

    Afterwards ONNX Runtime refuses sessions with threads of their own, so a program that runs
    other models with onnxruntime should leave it. Where a pool cannot be had any more (there
    are sessions already), nothing changes. The commands of SpecEdge call it first.

    Args:
        threads: Threads to compute with; None takes all processors of the process.
    """
    global _pool_threads
    with _pool_lock:
        if _pool_threads is None:
            count = _count(threads)
            try:
                _onnxruntime().set_global_thread_pool_sizes(count, 1)
                _pool_threads = count
            except RuntimeError as error:
                _log.info("no shared thread pool: %s", _one_line(error))


def _session_options(threads: int | None) -> ort.SessionOptions:
    options = _onnxruntime().SessionOptions()
    options.log_severity_level = _ERRORS_ONLY
    if _pool_threads is not None:
        if threads not in (None, _pool_threads):
            _log.warning("this process shares %d threads; %d cannot be had", _pool_threads, threads)
        options.use_per_session_threads = False
    else:
        options.intra_op_num_threads = _count(threads)
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def _count(threads: int | None) -> int:
    count = default_threads() if threads is None else threads
    most = max(8, 2 * (os.cpu_count() or 1))  # more only take turns
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= most:
        raise UsageError(f"threads is {count!r}: give a number from 1 to {most}")
    return count


def _check_given(given: Sequence[str], wanted: Sequence[str], device: str) -> None:
    if wanted[0] not in given:
        raise DeviceError(
            f"device {device}: ONNX Runtime left {wanted[0]} out and would run on {', '.join(given)}; "
            "its libraries are missing or do not fit (see ONNX Runtime's log)"
        )


def _onnxruntime() -> Any:
    # Wheels for Linux (seen in 1.32) write a device id into the user's cache and send usage data
    # unless this stands before the import. A device says nothing that its owner has not asked for.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime

        onnxruntime.get_available_providers  # noqa: B018  half of an uninstalled package has nothing
    except ModuleNotFoundError as error:
        if error.name != "onnxruntime":
            raise DeviceError(_broken(error)) from None
        raise MissingExtraError("onnxruntime", "cpu") from None
    except (ImportError, OSError, AttributeError) as error:
        raise DeviceError(_broken(error)) from None
    return onnxruntime


def _broken(error: Exception) -> str:
    return (
        f"onnxruntime cannot be loaded: {_one_line(error)}; install what it misses, or the wheel that fits "
        "(specedge doctor says which)"
    )


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= 240 else text[:237] + "..."
