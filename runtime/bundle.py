"""Reads and verifies a bundle: the manifest's closed schema, sizes, SHA-256, paths that stay inside.

A bundle is untrusted. Nothing of it is opened by ONNX Runtime or the tokenizer
before its size (always) and hash (`verify`) agree with the manifest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from specedge.runtime.errors import BundleError, BundleFileError
from specedge.runtime.schema import fields_of, mapping_of, one_line, parse_json
from specedge.runtime.specs import SAFE_PART, GraphSpec, HeadsSpec

__all__ = [
    "DEVICES",
    "FORMAT",
    "MANIFEST",
    "Bundle",
    "FileEntry",
    "GraphSpec",
    "HeadsSpec",
    "Manifest",
    "hash_file",
    "open_bundle",
    "write_manifest",
]

FORMAT = 1
MANIFEST = "specedge.json"
DEVICES = ("cpu", "cuda", "tensorrt")
_MAX_MANIFEST = 4 << 20
_HASH_CHUNK = 1 << 20


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and SHA-256 (hex) of a file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Content of specedge.json.

    Attributes:
        name: The model's short name.
        source: Where the checkpoint came from.
        family: Which builder wrote the graphs ("llama"), or "optimum".
        device: What the bundle was exported for.
        target: The graph that verifies.
        drafts: Draft models by name, the default first.
        heads: Heads by method: "medusa".
        standard: Path of the graph with standard inputs and outputs.
        vocab_size: Number of token ids the target gives logits for.
        bos_token_id: Begin-of-text token, if the tokenizer prepends one.
        eos_token_ids: Tokens that end a reply.
        files: Every other file of the bundle (tuning/ excepted) by path.
        checks: Report of the checks made at export.
        license: SPDX identifier of the weights, where known.
        exporter: Version of SpecEdge that wrote the bundle.
    """

    name: str
    source: str
    family: str
    device: str
    target: GraphSpec
    drafts: Mapping[str, GraphSpec]
    standard: str
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    files: Mapping[str, FileEntry]
    checks: Mapping[str, Any] = field(default_factory=dict)
    license: str | None = None
    exporter: str = ""
    heads: Mapping[str, HeadsSpec] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def memory_bytes(self) -> int:
        """Estimate of what running the target with its largest draft and its heads takes, as method auto does.

        Weights count twice (mapped and prepacked), and a cache where a draft has its own.
        """
        own = (2 * graph.weight_bytes + graph.cache_bytes * (not graph.shares_cache) for graph in self.drafts.values())
        heads = (2 * heads.weight_bytes for heads in self.heads.values())
        return 2 * self.target.weight_bytes + self.target.cache_bytes + max(own, default=0) + sum(heads)


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: its folder and manifest, sizes checked."""

    folder: Path
    manifest: Manifest

    def path(self, name: str) -> Path:
        """Full path of a listed file.

        Raises:
            BundleFileError: The manifest does not list it.
        """
        if name not in self.manifest.files:
            raise BundleFileError(f"{self.folder}: no {name!r} in this bundle; export it again")
        return self.folder / name

    def text(self, name: str) -> str:
        """Content of a listed text file."""
        try:
            return self.path(name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise BundleError(f"{self.folder / name}: not UTF-8 text; export the bundle again") from None

    def verify(self, progress: Callable[[int], None] | None = None) -> None:
        """Compares every file's SHA-256 with the manifest.

        Args:
            progress: Called with the number of bytes read since the last call.

        Raises:
            BundleError: A file differs.
        """
        for name, entry in self.manifest.files.items():
            if hash_file(self.folder / name, progress) != entry.sha256:
                raise BundleError(
                    f"{self.folder / name}: altered (SHA-256 differs from {MANIFEST}); export the bundle again"
                )


def hash_file(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """SHA-256 of a file, as hex."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_HASH_CHUNK):
            digest.update(chunk)
            if progress is not None:
                progress(len(chunk))
    return digest.hexdigest()


def open_bundle(folder: str | os.PathLike[str], *, verify: bool = False) -> Bundle:
    """Opens a bundle.

    Args:
        folder: The bundle's folder.
        verify: Also compare every SHA-256 (a pass over all weights).

    Raises:
        BundleError: Not a bundle, or damaged.
        BundleFileError: The folder or a file of it is missing.
    """
    root = Path(folder)
    if root.exists() and not root.is_dir():
        raise BundleError(f"{root}: a file, not a bundle; make one of it with: specedge export {root} -o FOLDER")
    if not root.is_dir():
        raise BundleFileError(f"{root}: no such folder; make a bundle with: specedge export MODEL -o {root}")
    source = root / MANIFEST
    if not source.is_file():
        raise BundleError(f"{root}: not a bundle (no {MANIFEST}); make one with: specedge export MODEL -o FOLDER")
    bundle = Bundle(root, _parse_manifest(source))
    _check_files(bundle)
    if verify:
        bundle.verify()
    return bundle


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes specedge.json into a bundle that is being made."""
    text = json.dumps(dataclasses.asdict(manifest), indent=2, ensure_ascii=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def _check_files(bundle: Bundle) -> None:
    """Every listed file is a plain file of the listed size; graphs and texts the runtime opens are listed."""
    for name, entry in bundle.manifest.files.items():
        path = bundle.folder / name
        try:
            status = os.lstat(path)
        except OSError:
            raise BundleFileError(f"{path}: missing; export the bundle again") from None
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise BundleError(
                f"{path}: not a plain file of its own (a link or a device); copy the bundle with its contents"
            )
        if any((bundle.folder / parent).is_symlink() for parent in PurePosixPath(name).parents if parent.name):
            raise BundleError(f"{path}: behind a link; copy the bundle with its contents")
        if status.st_size != entry.size:
            raise BundleError(f"{path}: {status.st_size:,} bytes where {entry.size:,} belong; export the bundle again")
    manifest = bundle.manifest
    graphs = [file for graph in (manifest.target, *manifest.drafts.values()) for file in graph.files]
    for name in (manifest.standard, *graphs, *(heads.file for heads in manifest.heads.values())):
        bundle.path(name)


def _parse_manifest(source: Path) -> Manifest:
    if source.stat().st_size > _MAX_MANIFEST:
        raise BundleError(f"{source}: larger than a manifest can be; export the bundle again")
    try:
        return _manifest(parse_json(source.read_text(encoding="utf-8")))
    except RecursionError:
        raise BundleError(f"{source}: nested too deeply; export the bundle again") from None
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise BundleError(f"{source}: {one_line(error)}; export the bundle again") from None


def _manifest(raw: Any) -> Manifest:
    values = fields_of(Manifest, raw, "the manifest")
    if values["format"] != FORMAT:
        raise ValueError(f"format {values['format']!r} where this version reads {FORMAT}")
    if values["device"] not in DEVICES:
        raise ValueError(f"device {values['device']!r} is none of {', '.join(DEVICES)}")
    values["target"] = _graph(values["target"], "target")
    values["drafts"] = {
        _name(name): _graph(graph, f"draft {name!r}") for name, graph in mapping_of(values["drafts"], "drafts").items()
    }
    values["heads"] = {
        _name(name): _heads(heads, f"heads {name!r}")
        for name, heads in mapping_of(values.get("heads", {}), "heads").items()
    }
    values["files"] = {
        _safe_path(name): FileEntry(**fields_of(FileEntry, entry, f"file {name!r}"))
        for name, entry in mapping_of(values["files"], "files").items()
    }
    if len({name.casefold() for name in values["files"]}) != len(values["files"]):
        raise ValueError("two files differ only in case")
    _safe_path(values["standard"])
    values["eos_token_ids"] = tuple(_token(token, values["vocab_size"]) for token in values["eos_token_ids"])
    if values["bos_token_id"] is not None:
        _token(values["bos_token_id"], values["vocab_size"])
    manifest = Manifest(**values)
    for graph in (manifest.target, *manifest.drafts.values()):
        if graph.shares_cache and (graph is manifest.target or not (graph.tree and manifest.target.tree)):
            raise ValueError(f"{graph.file} cannot share the target's cache")
        if graph.vocab_size != manifest.vocab_size and (graph is manifest.target or graph.shares_cache):
            raise ValueError(f"{graph.file} has {graph.vocab_size} tokens where {manifest.vocab_size} belong")
        if any(not 0 <= layer < manifest.target.layers for layer in graph.cache_layers):
            raise ValueError(f"{graph.file}: cache_layers are not all within the target's {manifest.target.layers}")
    for heads in manifest.heads.values():
        reads = (heads.hidden_size, heads.taps or manifest.target.taps)
        if not manifest.target.tree or reads != (manifest.target.hidden_size, manifest.target.taps):
            raise ValueError(f"{heads.file} reads rows that the target does not give")
    return manifest


def _graph(raw: Any, where: str) -> GraphSpec:
    values = fields_of(GraphSpec, raw, where)
    for name in ("cache_layers", "taps"):
        values[name] = _layers(values[name], f"{where}: {name}")
    spec = GraphSpec(**values)
    for file in spec.files:
        _safe_path(file)
    return spec


def _heads(raw: Any, where: str) -> HeadsSpec:
    values = fields_of(HeadsSpec, raw, where)
    spec = HeadsSpec(**{**values, "taps": _layers(values["taps"], f"{where}: taps")})
    _safe_path(spec.file)
    return spec


def _layers(raw: Any, where: str) -> tuple[int, ...]:
    if any(type(layer) is not int for layer in raw):
        raise ValueError(f"{where} are not whole numbers")
    return tuple(raw)


def _token(value: Any, vocab_size: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        raise ValueError(f"token id {one_line(value)} is outside the vocabulary of {vocab_size}")
    return value


def _name(name: str) -> str:
    if not SAFE_PART.fullmatch(name) or name.startswith("."):
        raise ValueError(f"name {name!r} has characters other than letters, digits and ._+:@,=-")
    return name


def _safe_path(name: Any) -> str:
    """A relative path with slashes that stays inside the folder under POSIX and Windows rules."""
    if not isinstance(name, str):
        raise ValueError(f"path {one_line(name)} is not text")
    parts = PurePosixPath(name).parts
    if (
        not parts
        or "/".join(parts) != name
        or any(part in (".", "..") or not SAFE_PART.fullmatch(part) for part in parts)
    ):
        raise ValueError(f"path {name!r} leaves the bundle or has characters that are not portable")
    if re.match(r"[A-Za-z]:", name):
        raise ValueError(f"path {name!r} leaves the bundle")
    return name
