"""Opens ONNX Runtime sessions: which execution provider, which threads, and what was really given."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specedge.runtime.errors import BundleError, DeviceError, MissingExtraError, UsageError

if TYPE_CHECKING:
    import onnxruntime as ort

__all__ = ["default_threads", "open_session", "providers_for", "share_threads"]

_WANTED = {
    "cpu": ("CPUExecutionProvider",),
    "cuda": ("CUDAExecutionProvider", "CPUExecutionProvider"),
    "tensorrt": ("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"),
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
            "install specedge[gpu] on a machine with that device, or export the model again with --device cpu"
        )
    return wanted


def open_session(path: Path, *, device: str = "cpu", threads: int | None = None) -> ort.InferenceSession:
    """Opens a graph.

    Its threads do not spin while they wait: the spinning pools of a target and a draft model
    would take the processors from each other (measured: 0.70 against 1.29 times the speed of
    plain decoding on two cores). `share_threads` is faster still.

    Args:
        path: The .onnx file; its external weights lie beside it.
        device: "cpu", "cuda" or "tensorrt".
        threads: Threads to compute with; None takes all processors of the process.

    Raises:
        DeviceError: The device's provider is missing, or ONNX Runtime silently left it out.
        BundleError: ONNX Runtime cannot open the graph.
    """
    ort = _onnxruntime()
    wanted = providers_for(device)
    options = _session_options(threads)
    try:
        session = ort.InferenceSession(str(path), options, providers=list(wanted))
    except Exception as error:  # noqa: BLE001  ONNX Runtime's errors have no common base
        raise BundleError(f"{path}: ONNX Runtime {ort.__version__} cannot open it: {_one_line(error)}") from None
    _check_given(session.get_providers(), wanted, device)
    return session


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
    except ImportError:
        raise MissingExtraError("onnxruntime", "cpu") from None
    return onnxruntime


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= 240 else text[:237] + "..."
