"""A model on the Hugging Face hub as a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

from specedge.export.checkpoint import Checkpoint
from specedge.export.folder import read_folder
from specedge.runtime.errors import CheckpointError, DownloadError, MissingExtraError

__all__ = ["read_hub"]

_WANTED = ["*.json", "*.safetensors", "*.jinja", "README.md"]
# No pickles, and nothing of other tools: subfolders (onnx/, original/) and a second copy of the weights.
_UNWANTED = ["*/*", "consolidated*.safetensors"]


def read_hub(model: str, *, revision: str | None = None, offline: bool = False) -> Checkpoint:
    """Download a model, or find it in huggingface_hub's cache, and read it.

    Args:
        model: "organisation/name".
        revision: Commit, tag or branch; the main branch by default.
        offline: Take it from the cache or fail.

    Raises:
        DownloadError: It cannot be fetched.
        CheckpointError: What was fetched cannot be read.
        MissingExtraError: huggingface_hub is not installed.
    """
    folder = _fetch(model, revision, offline)
    # The hub's cache names the folder after the commit, which says more than a branch.
    commit = folder.name if re.fullmatch(r"[0-9a-f]{40}", folder.name) else revision or "main"
    return read_folder(folder, name=model.rpartition("/")[2], source=f"hub:{model}@{commit}")


def _fetch(model: str, revision: str | None, offline: bool) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise MissingExtraError("huggingface_hub", "export") from error
    at = f"{model} (revision {revision})" if revision else model
    try:
        return Path(
            huggingface_hub.snapshot_download(
                model,
                revision=revision,
                local_files_only=offline,
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED,
            )
        )
    except errors.GatedRepoError as error:
        raise DownloadError(f"{at} is gated: accept its terms on the hub, then run: hf auth login") from error
    except errors.RevisionNotFoundError as error:
        raise DownloadError(f"{model} has no revision {revision} on the hub") from error
    except errors.RepositoryNotFoundError as error:
        raise DownloadError(f"{model} is not on the hub, or private: check the name, or run: hf auth login") from error
    except errors.LocalEntryNotFoundError as error:
        why = (
            "offline was asked for; run once with a network"
            if offline
            else "the hub is out of reach: check the network"
        )
        raise DownloadError(f"{at} is not in the hub's cache, and {why}") from error
    except errors.HFValidationError as error:
        raise CheckpointError(f"{model!r} is no hub id: {_first_line(error)}") from error
    # What carries the bytes (requests, httpx or hf_xet, by the version of huggingface_hub) raises errors of its own.
    except Exception as error:
        raise DownloadError(f"{at} cannot be fetched from the hub: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
