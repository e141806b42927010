"""From a checkpoint to a bundle: resolve, write, check, finish. Calls the rooms in order, knows none inside."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from specedge import __version__
from specedge.export.checkpoint import Checkpoint
from specedge.export.emulation import emulated, emulated_file
from specedge.export.graphs import Graphs, make_plan
from specedge.export.interop import generation_config, token_ids, write_interop
from specedge.export.memory import release_memory
from specedge.export.options import PHASES, ExportOptions, Progress
from specedge.export.writer import check_apart, check_name, check_space, staged
from specedge.runtime.bundle import FileEntry, Manifest, hash_file, open_bundle, write_manifest
from specedge.runtime.errors import SpecEdgeError, StorageError
from specedge.runtime.files import cache_folder

__all__ = ["PHASES", "ExportOptions", "Progress", "bundle_for", "export"]

_DEFAULTS = ExportOptions()
_log = logging.getLogger("specedge.export")


def export(model: str, output: Path, options: ExportOptions = _DEFAULTS, progress: Progress | None = None) -> Manifest:
    """Exports a model.

    Args:
        model: A folder, a hub id, a GGUF file or a built-in name.
        output: Folder of the bundle. It appears when everything is written and checked.
        options: What to export.
        progress: Told how far each phase is.

    Returns:
        The manifest; `checks` holds the report of the checks.

    Raises:
        UsageError: An option out of range.
        CheckpointError: The checkpoint cannot be read, or (UnsupportedModelError) no builder covers it.
        DownloadError: It cannot be fetched.
        StorageError: The name is taken, or the disk refuses.
        ParityError: The graphs do not compute what the checkpoint says.
        MissingExtraError: The model needs a package of an extra.
    """
    from specedge.export.sources import resolve
    from specedge.export.torch_check import missing_package

    report: Progress = progress if progress is not None else _silent
    output = Path(os.path.realpath(output))
    check_name(output, options.force)
    if options.calibration is not None:
        check_apart(Path(os.path.realpath(options.calibration)), output)
    checkpoint = resolve(model, revision=options.revision, offline=options.offline, progress=report)
    plan = make_plan(checkpoint, options, torch=missing_package(checkpoint.path) is None, report=report)
    disk, memory = plan.estimate.disk, plan.estimate.memory
    _log.info(
        "%s: takes about %s MB of disk and %s MB of memory", checkpoint.name, _megabytes(disk), _megabytes(memory)
    )
    check_space(output, disk)
    with staged(output, force=options.force) as folder:
        graphs = plan.write(folder, report)
        report("interop files", 0, 1)
        write_interop(folder, checkpoint, graphs.target)
        report("interop files", 1, 1)
        checks = {}
        if options.verify:
            with _runnable(folder, graphs) as stand_ins:
                checks = _check(folder, checkpoint, stand_ins, report)
        manifest = _manifest(checkpoint, options.device, graphs, checks, _hash(folder, report))
        write_manifest(folder, manifest)
        open_bundle(folder)
    size = sum(entry.size for entry in manifest.files.values())
    report("finish", size, size)
    return manifest


def bundle_for(name: str, progress: Progress | None = None, offline: bool = False) -> Path:
    """The bundle of a built-in model, exported with the defaults into the user's cache on first use.

    Args:
        name: A built-in name.
        progress: Told how far each phase is, where there is something to do.
        offline: Fetch nothing.

    Raises:
        SpecEdgeError: As `export`.
    """
    folder = cache_folder() / "bundles" / name
    if _is_whole(folder):
        return folder
    try:
        export(name, folder, ExportOptions(offline=offline, force=folder.exists()), progress)
    except StorageError:
        if not _is_whole(folder):  # else another process made it meanwhile
            raise
    return folder


def _is_whole(folder: Path) -> bool:
    try:
        open_bundle(folder)
    except SpecEdgeError:  # missing, of another format version, or damaged: it is made anew
        return False
    return True


@contextmanager
def _runnable(folder: Path, graphs: Graphs) -> Iterator[Graphs]:
    """The graphs as this machine's CPU can run them, while the block lasts."""
    with ExitStack() as stack:
        target = stack.enter_context(emulated(folder, graphs.target))
        drafts = {name: stack.enter_context(emulated(folder, spec)) for name, spec in graphs.drafts.items()}
        standard = stack.enter_context(emulated_file(folder, graphs.standard, target.cache_dtype))
        yield replace(graphs, target=target, drafts=drafts, standard=standard)


def _check(folder: Path, checkpoint: Checkpoint, graphs: Graphs, report: Progress) -> dict[str, Any]:
    """Both checks, one after the other, each model released before the next."""
    from specedge.export.check import check_draft, check_growing, check_prompts, check_target
    from specedge.export.heads_check import check_heads
    from specedge.export.torch_check import check_pytorch

    target, steps = graphs.target, 1 + len(graphs.drafts)
    prompts = check_prompts(checkpoint.tokenizer.model, target.vocab_size)
    report("self-check", 0, steps)
    if target.tree:
        own, logits = check_target(folder, target, graphs.standard, prompts)
    else:
        own, logits = check_growing(folder, target, prompts)
    drafts, heads = {}, {}
    for done, (name, spec) in enumerate(graphs.drafts.items(), start=1):
        report("self-check", done, steps)
        drafts[name] = check_draft(folder, name, spec, prompts, logits)
    for name, found in graphs.heads.items():
        heads[name] = check_heads(folder, name, found, target, prompts)
    report("self-check", steps, steps)
    report("parity check", 0, 1)
    release_memory()
    parity = check_pytorch(checkpoint.path, target.precision, prompts, logits, checkpoint.config, compiled=target.fixed)
    report("parity check", 1, 1)
    return {"self": own, "drafts": drafts, "heads": heads, "pytorch": parity}


def _hash(folder: Path, report: Progress) -> dict[str, FileEntry]:
    """Size and SHA-256 of every file, by its path with slashes."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    total, done = sum(path.stat().st_size for path in paths), 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        report("finish", done, total)

    return {
        path.relative_to(folder).as_posix(): FileEntry(path.stat().st_size, hash_file(path, count)) for path in paths
    }


def _manifest(
    checkpoint: Checkpoint, device: str, graphs: Graphs, checks: Mapping[str, Any], files: Mapping[str, FileEntry]
) -> Manifest:
    vocab_size = graphs.target.vocab_size
    generation = generation_config(checkpoint)
    ends = dict.fromkeys(token for token in token_ids(generation.get("eos_token_id")) if 0 <= token < vocab_size)
    return Manifest(
        name=checkpoint.name,
        source=checkpoint.source,
        family=graphs.family,
        device=device,
        target=graphs.target,
        drafts=graphs.drafts,
        standard=graphs.standard,
        vocab_size=vocab_size,
        bos_token_id=_prepended(checkpoint, token_ids(generation.get("bos_token_id"))),
        eos_token_ids=tuple(ends),
        files=files,
        checks=checks,
        license=checkpoint.license,
        exporter=__version__,
        heads=graphs.heads,
    )


def _prepended(checkpoint: Checkpoint, begin: list[int]) -> int | None:
    """The begin-of-text token, if the tokenizer puts it before a text; many models name one and do not."""
    from tokenizers import Tokenizer

    first = Tokenizer.from_str(checkpoint.tokenizer.model).encode("a").ids[:1]
    return first[0] if first and first[0] in begin else None


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f}"


def _silent(phase: str, done: int, total: int) -> None:
    pass
