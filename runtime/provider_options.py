"""What execution providers are told: capture of graphs, arenas, engines and their caches, profiles over the width.

Names and formats: onnxruntime.ai/docs/execution-providers (CUDA and TensorRT), and of the run option
onnxruntime_run_options_config_keys.h. None of it was run on a GPU by this project yet.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from specedge.runtime.bundle import MANIFEST
from specedge.runtime.contracts import GraphNames
from specedge.runtime.files import cache_folder
from specedge.runtime.specs import GraphSpec

__all__ = [
    "CAPTURE_KEY",
    "NO_CAPTURE",
    "context_file",
    "cuda_options",
    "engine_folder",
    "profiles",
    "tensorrt_options",
]

CAPTURE_KEY = "gpu_graph_id"
"""The run option that names a captured graph: one for each width, as each has buffers of its own."""

NO_CAPTURE = "-1"

_WIDEST, _USUAL = 256, 8
_MOST_LOGITS = 64


def cuda_options(spec: GraphSpec | None, *, captured: bool) -> dict[str, str]:
    """Options of the CUDA provider.

    Args:
        spec: The graph; None: one that is no decoder.
        captured: Whether rounds are to be replayed from a captured graph, where the graph lets them.
    """
    options = {
        # Doubling what it takes would waste up to half of a small board's memory.
        "arena_extend_strategy": "kSameAsRequested",
        # Greedy text is compared between widths, which 10-bit products would tell apart.
        "use_tf32": "0",
    }
    if captured and spec is not None and spec.flavour == "gqa":
        options["enable_cuda_graph"] = "1"
    return options


def tensorrt_options(path: Path, spec: GraphSpec | None) -> dict[str, str]:
    """Options of the TensorRT provider: a compiled engine and its timings stay in the user's cache.

    Args:
        path: The graph's file.
        spec: The graph; None: one that is no decoder, whose shapes are fixed.
    """
    folder = engine_folder(path)
    options = {
        "trt_fp16_enable": "0" if spec is not None and spec.cache_dtype == "float32" else "1",
        "trt_int8_enable": "1" if spec is not None and spec.precision.startswith("int8") else "0",
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": str(folder.parent),
        "trt_engine_cache_enable": "1",
        # The compiled graph is one node over its engine, and takes the engine's path relative to itself only.
        "trt_dump_ep_context_model": "1",
        "trt_ep_context_file_path": str(context_file(path)),
        "trt_engine_cache_path": "engine",
    }
    if spec is not None:
        options |= profiles(spec)
    return options


def context_file(path: Path) -> Path:
    """The graph once it is compiled, as one node over its engine: a start from it neither parses nor builds."""
    return engine_folder(path) / f"{path.stem}_ctx.onnx"


def profiles(spec: GraphSpec) -> dict[str, str]:
    """The shapes an engine is built for: only rows vary, from one to a piece of a prompt."""
    rows = {"min": 1, "opt": _USUAL, "max": min(_WIDEST, spec.capacity)}
    return {
        f"trt_profile_{which}_shapes": ",".join(
            f"{name}:{'x'.join(map(str, shape))}"
            for name, shape in _shapes(spec, width, min(width, _MOST_LOGITS)).items()
        )
        for which, width in rows.items()
    }


def engine_folder(path: Path) -> Path:
    """Where the engine of a graph is kept: by the content of its bundle's manifest, which has every file's hash.

    So a copy of the bundle finds it too, and another export has a folder of its own.
    """
    manifest = next((file for folder in path.parents if (file := folder / MANIFEST).is_file()), path)
    digest = hashlib.sha256(manifest.read_bytes()).hexdigest()[:16]
    return cache_folder() / "engines" / f"{digest}-{path.parent.name}-{path.stem}"


def _shapes(spec: GraphSpec, rows: int, logit_rows: int) -> Mapping[str, tuple[int, ...]]:
    return {
        GraphNames.INPUT_IDS: (1, rows),
        GraphNames.POSITION_IDS: (1, rows),
        GraphNames.ATTENTION_BIAS: (1, 1, rows, spec.capacity),
        GraphNames.LOGIT_ROWS: (logit_rows,),
    }
