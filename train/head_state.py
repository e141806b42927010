"""The state of a training on disk, so that a killed run goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specedge.runtime.errors import StorageError, UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["load_state", "save_state", "state_path"]

_MOMENTS = ("exp_avg", "exp_avg_sq")


def state_path(output: Path) -> Path:
    """Where the state of a training stands until its heads are written."""
    return output.with_name(f"{output.name}.training")


def save_state(
    path: Path, parameters: Mapping[str, Tensor], optimiser: torch.optim.Optimizer, step: int, facts: Mapping[str, Any]
) -> None:
    """Writes parameters, the moments of Adam, and how many steps are done.

    Raises:
        StorageError: It cannot be written.
    """
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        tensors[name] = parameter.detach().float().cpu().contiguous().clone()
        for kind in _MOMENTS:
            moment = optimiser.state[parameter].get(kind)
            if moment is not None:
                tensors[f"{kind}.{name}"] = moment.detach().float().cpu().contiguous()
    beside = path.with_name(f"{path.name}.part")
    metadata = {"step": str(step), "facts": json.dumps(dict(facts), sort_keys=True)}
    try:
        save_file(tensors, str(beside), metadata)
        beside.replace(path)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror}); free some space") from None


def load_state(
    path: Path, parameters: Mapping[str, Tensor], optimiser: torch.optim.Optimizer, facts: Mapping[str, Any]
) -> int:
    """Takes up what `save_state` wrote.

    Returns:
        How many steps are done; 0 where there is no such file.

    Raises:
        UsageError: It is of a training with other settings.
        StorageError: It is damaged.
    """
    from safetensors import SafetensorError

    if not path.exists():
        return 0
    try:
        return _load(path, parameters, optimiser, json.dumps(dict(facts), sort_keys=True))
    except (SafetensorError, OSError, KeyError, RuntimeError):
        raise StorageError(f"{path} is damaged; delete it to begin anew") from None


def _load(path: Path, parameters: Mapping[str, Tensor], optimiser: torch.optim.Optimizer, facts: str) -> int:
    import torch
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as stored:
        metadata = stored.metadata() or {}
        if metadata.get("facts") != facts:
            raise UsageError(f"{path} is the state of a training with other settings; delete it to begin anew")
        step = int(metadata["step"])
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(stored.get_tensor(name))
                moments = {kind: stored.get_tensor(f"{kind}.{name}").to(parameter.device) for kind in _MOMENTS}
                optimiser.state[parameter] = {"step": torch.tensor(float(step)), **moments}
    return step
