"""Families without a builder: Optimum's exporter writes the standard graph, and nothing else.

It traces the model in PyTorch, in a process of its own whose memory and chatter leave
with it: `python -m specedge.export.optimum REQUEST.json`. Such a graph has no tree mask,
so the runtime drafts chains only.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specedge.export.checkpoint import Checkpoint
from specedge.export.interop import STANDARD_GRAPH
from specedge.runtime.bundle import GraphSpec
from specedge.runtime.contracts import GraphNames
from specedge.runtime.errors import ExportError, MissingExtraError, UnsupportedModelError

__all__ = ["main", "write_through_optimum"]

_REFUSED = 3  # exit code of `main` where Optimum does not know the family


def write_through_optimum(checkpoint: Checkpoint, folder: Path, *, capacity: int) -> GraphSpec:
    """Writes onnx/model.onnx in fp32.

    Args:
        checkpoint: A model in a folder of Hugging Face layout.
        folder: The bundle being made.
        capacity: Rows the runtime may cache.

    Returns:
        The graph's entry in the manifest.

    Raises:
        MissingExtraError: Optimum is not installed.
        UnsupportedModelError: Optimum has no exporter for it either, or the graph lacks a cache.
        ExportError: The exporter failed.
    """
    family = checkpoint.config.get("model_type")
    if not checkpoint.path.is_dir():
        raise UnsupportedModelError(
            f"{checkpoint.path}: no builder for model_type {family!r}, and Optimum reads no GGUF; "
            "give the model as a folder or hub id"
        )
    if not _installed():
        raise MissingExtraError(f"no builder for model_type {family!r}, and Optimum, which may export it,", "optimum")
    with tempfile.TemporaryDirectory(prefix=".optimum-", dir=folder) as scratch:
        _run(checkpoint, Path(scratch))
        target = folder / STANDARD_GRAPH
        target.parent.mkdir(exist_ok=True)
        for path in sorted(Path(scratch).glob("model.onnx*")):
            shutil.move(path, target.with_name(path.name))
    return _describe(target, checkpoint.config, capacity)


def _installed() -> bool:
    if importlib.util.find_spec("optimum") is None:
        return False
    return importlib.util.find_spec("optimum.exporters.onnx") is not None


def _run(checkpoint: Checkpoint, scratch: Path) -> None:
    request = scratch / "request.json"
    request.write_text(json.dumps({"path": str(checkpoint.path), "output": str(scratch)}), encoding="utf-8")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-P", "-m", "specedge.export.optimum", str(request)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    last = (done.stderr.strip().splitlines() or ["no message"])[-1][:300]
    if done.returncode == _REFUSED:
        raise UnsupportedModelError(
            f"no builder for model_type {checkpoint.config.get('model_type')!r}, and Optimum cannot export it: {last}"
        )
    if done.returncode < 0:
        last = f"ended by signal {-done.returncode} (out of memory?)"
    raise ExportError(f"{checkpoint.name}: Optimum's exporter failed: {last}; nothing was kept")


def _describe(path: Path, config: Mapping[str, Any], capacity: int) -> GraphSpec:
    """Reads a graph's sizes off its inputs and outputs."""
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    inputs = {item.name: item.type.tensor_type for item in graph.input}
    outputs = {item.name: item.type.tensor_type for item in graph.output}
    layers = 0
    while GraphNames.past(layers, "key") in inputs and GraphNames.present(layers, "value") in outputs:
        layers += 1
    first, logits = inputs.get(GraphNames.past(0, "key")), outputs.get(GraphNames.LOGITS)
    if not layers or first is None or logits is None or GraphNames.INPUT_IDS not in inputs:
        raise UnsupportedModelError(
            f"model_type {config.get('model_type')!r}: Optimum's graph has no key-value cache that can be kept"
        )
    shape = [dimension.dim_value for dimension in first.shape.dim]
    vocab_size = logits.shape.dim[-1].dim_value or config["vocab_size"]
    hidden_size = next(config[key] for key in ("hidden_size", "n_embd", "d_model") if config.get(key))
    files = [path, path.with_name(f"{path.name}_data")]
    return GraphSpec(
        file=STANDARD_GRAPH,
        flavour="growing",
        precision="fp32",
        layers=layers,
        kv_heads=shape[1],
        head_dim=shape[3],
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        capacity=capacity,
        cache_dtype="float32" if first.elem_type == onnx.TensorProto.FLOAT else "float16",
        weight_bytes=sum(file.stat().st_size for file in files if file.exists()),
    )


def main(arguments: Sequence[str]) -> int:
    """Runs Optimum's exporter on the request; the exit code says whether it knows the family."""
    from optimum.exporters.onnx import main_export  # type: ignore[import-not-found,import-untyped,unused-ignore]

    request = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    try:
        main_export(
            request["path"],
            request["output"],
            task="text-generation-with-past",
            dtype="fp32",
            local_files_only=True,
            do_validation=False,  # our own checks follow
        )
    except (KeyError, ValueError, NotImplementedError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return _REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
