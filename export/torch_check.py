"""The check against PyTorch: transformers loads the checkpoint itself, never our own tensors.

It runs in a process of its own, so that PyTorch and its copy of the weights leave
memory with it: `python -m specedge.export.torch_check REQUEST.json`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specedge.export.check import agreement, compare
from specedge.export.tolerances import Bound, tolerance_of
from specedge.runtime.contracts import Floats
from specedge.runtime.errors import ExportError, ParityError

__all__ = ["check_pytorch", "main", "missing_package"]

_TIMEOUT_SECONDS = 3600


def check_pytorch(
    path: Path,
    precision: str,
    prompts: Sequence[Sequence[int]],
    logits: Sequence[Floats],
    config: Mapping[str, Any] | None = None,
    *,
    compiled: bool = False,
) -> dict[str, Any]:
    """Compares the target's logits with those of PyTorch in fp32.

    Args:
        path: Folder in Hugging Face layout or GGUF file.
        config: The checkpoint's config.json; of a GGUF file it tells transformers what it would ignore.
        precision: Of the target graph.
        prompts: Token ids.
        logits: The target's, one array [tokens, vocab] a prompt.
        compiled: Whether it is made to be compiled, which rounds activations by shared steps.

    Returns:
        The report; its status is "skipped", with the reason, where PyTorch is not installed or
        transformers cannot load the checkpoint.

    Raises:
        ParityError: The logits differ by more than the precision's tolerance.
        ExportError: The check was killed, for want of memory most likely.
    """
    missing = missing_package(path)
    if missing:
        return {"status": "skipped", "reason": f"{missing} not installed"}
    with tempfile.TemporaryDirectory(prefix="specedge-") as scratch:
        report = _run(path, prompts, _ignored(config or {}) if path.is_file() else {}, Path(scratch))
        if report["status"] != "loaded":
            return report
        with np.load(Path(scratch) / "logits.npz") as arrays:
            expected = [arrays[str(index)] for index in range(len(prompts))]
    bound = tolerance_of(precision, compiled=compiled).pytorch
    return _judge(precision, bound, expected, logits, report)


def _judge(
    precision: str, bound: Bound, expected: Sequence[Floats], logits: Sequence[Floats], report: dict[str, Any]
) -> dict[str, Any]:
    worst = 0.0
    for index, (wanted, given) in enumerate(zip(expected, logits, strict=True)):
        if wanted.shape != given.shape:
            raise ParityError(
                f"PyTorch gives logits of shape {wanted.shape} and the graph {given.shape}; nothing was kept; "
                "please report this model"
            )
        worst = max(worst, compare(f"{precision} against PyTorch, prompt {index + 1}", given, wanted, bound))
    result = {**report, "status": "passed", **agreement(expected, logits, precision)}
    return result if bound.absolute is None else {**result, "max_abs": worst}


def missing_package(path: Path) -> str | None:
    """Name of the first package that checking this folder or GGUF file needs and that is not installed."""
    names = ["torch", "transformers", *(("accelerate", "gguf") if path.is_file() else ())]
    return next((name for name in names if importlib.util.find_spec(name) is None), None)


def _ignored(config: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers 5.24 does not read from a GGUF file: biases, and the divisors of Llama 3's rotation."""
    found: dict[str, Any] = {name: True for name in ("attention_bias", "mlp_bias") if config.get(name)}
    if config.get("rope_scaling"):
        scaling = dict(config["rope_scaling"])
        found["rope_scaling"] = scaling
        found["rope_parameters"] = {"rope_theta": config.get("rope_theta"), **scaling}
    return found


def _run(path: Path, prompts: Sequence[Sequence[int]], config: Mapping[str, Any], scratch: Path) -> dict[str, Any]:
    request = scratch / "request.json"
    output = str(scratch / "logits.npz")
    request.write_text(json.dumps({"path": str(path), "prompts": prompts, "config": config, "output": output}))
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        # freed tensors go back to the system instead of to malloc's pools
        "MALLOC_MMAP_THRESHOLD_": "131072",
    }
    command = [sys.executable, "-P", "-m", "specedge.export.torch_check", str(request)]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise ExportError("the check against PyTorch took over an hour; export with --no-verify") from None
    if done.returncode < 0:
        raise ExportError(
            f"the check against PyTorch was ended by signal {-done.returncode} (out of memory?); "
            "free some memory, or export with --no-verify"
        )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"status": "skipped", "reason": f"transformers cannot run this checkpoint: {last[:300]}"}
    versions: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return {"status": "loaded", **versions}


def main(arguments: Sequence[str]) -> None:
    """Loads a model in transformers and writes its logits of the prompts in the request."""
    import torch
    import transformers

    request = json.loads(Path(arguments[0]).read_text())
    model = _load(Path(request["path"]), request["config"])
    arrays = {}
    with torch.inference_mode():
        for index, prompt in enumerate(request["prompts"]):
            arrays[str(index)] = model(torch.tensor([prompt]), use_cache=False).logits[0].float().numpy()
    np.savez(request["output"], **arrays)
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__}))


def _load(path: Path, ignored: Mapping[str, Any]) -> Any:
    """The model in fp32, on the CPU, from a folder or a GGUF file."""
    import torch
    import transformers

    # the annotations of from_pretrained differ between transformers 4 and 5
    from_pretrained: Any = transformers.AutoModelForCausalLM.from_pretrained
    if path.is_file():
        _lighten_gguf()
        # Reading the file's head takes transformers seconds, so it is not read for nothing.
        config = {"config": _corrected(path, ignored)} if ignored else {}
        model = from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32, **config)
    else:
        model = from_pretrained(str(path), dtype=torch.float32, use_safetensors=True, local_files_only=True)
    return model.eval()


def _lighten_gguf() -> None:
    """Lets gguf's reader cut plain arrays out of the file, not memory maps.

    It keeps one for each token and merge, and a map weighs a kilobyte: 90 MB at the peak of SmolLM2-135M.
    """
    import gguf

    class Reader(gguf.GGUFReader):  # type: ignore[misc]  # gguf has no types
        data: Any

        def _get(self, *arguments: Any, **options: Any) -> Any:
            self.data = np.asarray(self.data)  # the same bytes, still mapped
            return super()._get(*arguments, **options)

    gguf.GGUFReader = Reader


def _corrected(path: Path, ignored: Mapping[str, Any]) -> Any:
    """The config that transformers reads from a GGUF file, with what it ignores."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    for name, value in ignored.items():
        # transformers 4 knows rope_scaling, 5 rope_parameters (and rope_scaling as another name of it)
        if name != "rope_scaling" or not hasattr(config, "rope_parameters"):
            setattr(config, name, value)
    return config


if __name__ == "__main__":
    main(sys.argv[1:])
