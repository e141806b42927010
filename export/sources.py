"""Where a model comes from: one function that reads a name, a folder, a GGUF file or a hub id as a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

from specedge.export.builtin import BUILTINS, fetch
from specedge.export.checkpoint import Checkpoint
from specedge.export.folder import read_folder
from specedge.export.gguf_config import gguf_config, gguf_generation, gguf_tensors
from specedge.export.gguf_file import GgufFile
from specedge.export.gguf_tokenizer import gguf_tokenizer
from specedge.export.hub import read_hub
from specedge.export.options import Progress
from specedge.export.reading import spdx
from specedge.runtime.errors import CheckpointError, UsageError

__all__ = ["read_gguf", "resolve"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve(
    model: str, *, revision: str | None = None, offline: bool = False, progress: Progress | None = None
) -> Checkpoint:
    """Find a model and read what is needed to export it; the weights are read later, one at a time.

    Args:
        model: A built-in name, the path of a GGUF file or of a folder in Hugging Face layout, or a hub id.
        revision: Commit, tag or branch; for hub ids only.
        offline: Never touch the network.
        progress: Called while something is downloaded.

    Raises:
        UsageError: There is no such name, or a revision was given for something that has none.
        CheckpointError: What was found cannot be read.
        DownloadError: It cannot be fetched.
    """
    if progress:
        progress("resolve", 0, 1)
    checkpoint = _find(model, revision, offline, progress)
    if progress:
        progress("resolve", 1, 1)
    return checkpoint


def _find(model: str, revision: str | None, offline: bool, progress: Progress | None) -> Checkpoint:
    path = Path(model).expanduser()
    here = model in BUILTINS or path.exists()
    if not here and _HUB_ID.fullmatch(model) and path.suffix != ".gguf":
        return read_hub(model, revision=revision, offline=offline)
    if not here and (path.suffix == ".gguf" or "/" in model or "\\" in model):
        raise CheckpointError(f"{model} does not exist; give a folder, a GGUF file, a hub id, or one of: {_known()}")
    if not here:
        raise UsageError(f"unknown model {model!r}; known names: {_known()}; or give a folder, a GGUF file or a hub id")
    if revision is not None:
        raise UsageError(f"a revision goes with a hub id such as organisation/name, not with {model}")
    if model in BUILTINS:
        file = fetch(model, offline=offline, progress=progress)
        return read_gguf(file, name=model, source=f"builtin:{model}", license=BUILTINS[model].license)
    return _read_directory(path) if path.is_dir() else _read_file(path)


def _known() -> str:
    return ", ".join(sorted(BUILTINS))


def _read_file(path: Path) -> Checkpoint:
    return read_gguf(path, name=path.stem, source=f"gguf:{path.name}")


def _read_directory(path: Path) -> Checkpoint:
    if (path / "specedge.json").is_file():
        raise CheckpointError(f"{path} is a bundle already; run: specedge chat {path}")
    ggufs = sorted(path.glob("*.gguf"))
    if not ggufs or (path / "config.json").is_file():
        return read_folder(path)
    if len(ggufs) > 1:
        raise CheckpointError(f"{path} holds {len(ggufs)} GGUF files; give the path of one, e.g. {ggufs[0]}")
    return _read_file(ggufs[0])


def read_gguf(path: Path, *, name: str, source: str, license: str | None = None) -> Checkpoint:
    """A GGUF file as a checkpoint.

    Args:
        path: The file.
        name: Short name of the model.
        source: For the manifest.
        license: SPDX identifier; by default what the file says.

    Raises:
        CheckpointError: It is no GGUF file, or a damaged one.
        UnsupportedModelError: Its architecture, tokenizer or a feature is unknown.
    """
    file = GgufFile(path)
    config = gguf_config(file)
    stated = file.metadata.get("general.license")
    return Checkpoint(
        name=name,
        source=source,
        config=config,
        generation=gguf_generation(file, config["vocab_size"]),
        tensors=gguf_tensors(file),
        tokenizer=gguf_tokenizer(file),
        path=path,
        license=license or spdx(stated if isinstance(stated, str) else None),
    )
