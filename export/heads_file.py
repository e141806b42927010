"""Files of Medusa heads: this project's own, and the two public layouts.

Own: a safetensors file whose metadata holds `specedge_heads` (models/medusa.py), optionally
`specedge_calibration` (runtime/calibration.py), and whose tensors have the names of `tensor_shapes`,
as floats, or as int8 with a scale for each row beside them (`NAME.scale`). `vocabulary`, int32,
holds the ids of the tokens that heads guess among, where these are not all.

FasterDecoding's (https://github.com/FasterDecoding/Medusa, medusa_lm_head.pt, here as safetensors):
`0.0.linear.weight` and `.bias` for block 0 of head 0, `0.1.weight` for its vocabulary matrix.

vLLM's (vllm/model_executor/models/medusa.py): `blocks.0.layers.0.weight`, `lm_heads.0.weight`, or
one `lm_head.weight` for all, and `token_map` where the vocabulary is cut; "medusa_heads." may stand
before all of them.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specedge.export.reading import parse_json
from specedge.export.safetensors_file import SafetensorsFile
from specedge.models.medusa import MOST_HEADS, HeadsConfig, read_config, tensor_shapes
from specedge.quant.grid import Grid, Group, Rounded, dequantise, round_nearest
from specedge.runtime.calibration import HeadCalibration, head_calibration
from specedge.runtime.errors import CheckpointError, UnsupportedModelError, UsageError
from specedge.runtime.files import write_bytes

__all__ = ["Heads", "read_heads", "write_heads_file"]

Matrix = NDArray[np.float32]

_CONFIG, _CALIBRATION = "specedge_heads", "specedge_calibration"
_VOCABULARY = "vocabulary"
_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
_ROWS = Grid("integer", 8, narrow=True, scale_dtype="float16")
_SEVERAL = 4


@dataclass(frozen=True)
class Heads:
    """Heads as they were read.

    Attributes:
        config: What they are made of.
        tensors: Under the names of `tensor_shapes`.
        vocabulary: int64 [guesses], ids of the guessed tokens, ascending or not; None: all tokens.
        calibration: What was measured of them; None: nothing.
        where: The file.
    """

    config: HeadsConfig
    tensors: Mapping[str, Matrix]
    vocabulary: NDArray[np.int64] | None
    calibration: HeadCalibration | None
    where: Path

    @property
    def most_bytes(self) -> int:
        """What they take in a bundle, at most: in floats, with both ends of the vocabulary."""
        config = self.config
        return 4 * (sum(tensor.size for tensor in self.tensors.values()) + 2 * config.guesses * config.hidden_size)

    def check_target(self, hidden_size: int, vocab_size: int, layers: int) -> None:
        """Compares with a target.

        Raises:
            UsageError: They are another model's.
        """
        config = self.config
        if (config.hidden_size, config.vocab_size) != (hidden_size, vocab_size) or any(
            tap >= layers for tap in config.taps
        ):
            reading = f", reading layer {max(config.taps)}" if config.taps else ""
            theirs = f"{config.hidden_size} wide, {config.vocab_size:,} tokens{reading}"
            raise UsageError(
                f"{self.where}: heads of another model ({theirs}; this one has {hidden_size}, {vocab_size:,} and "
                f"{layers} layers); give heads that were trained for it"
            )


def read_heads(path: Path, vocab_size: int) -> Heads:
    """Reads heads.

    Args:
        path: A safetensors file, or a folder with one.
        vocab_size: Of the target; public layouts do not say it.

    Raises:
        CheckpointError: It is missing, damaged, or incomplete (the message names what is missing).
        UnsupportedModelError: It is a pickle, or no layout of heads that is known.
    """
    file = SafetensorsFile(_file(path))
    try:
        if _CONFIG in file.metadata:
            return _own(file)
        return _public(file, vocab_size)
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, (CheckpointError, UsageError)):
            raise
        raise CheckpointError(f"{file.path}: {error}; these heads cannot be used") from None


def write_heads_file(
    path: Path,
    config: HeadsConfig,
    tensors: Mapping[str, Matrix],
    vocabulary: NDArray[Any] | None,
    calibration: HeadCalibration | None,
    *,
    precision: str = "float16",
    notes: Mapping[str, str] | None = None,
) -> None:
    """Writes heads in this project's layout.

    Args:
        path: The file.
        config, tensors, vocabulary, calibration: As in `Heads`.
        precision: "float16", or "int8" for matrices with a scale for each row.
        notes: Further metadata: where they come from.

    Raises:
        StorageError: It cannot be written.
    """
    from dataclasses import asdict

    from safetensors.numpy import save

    stored: dict[str, NDArray[Any]] = {}
    for name, tensor in tensors.items():
        if precision == "int8" and tensor.ndim == 2:
            rounded = round_nearest(tensor, _ROWS)
            stored[name] = rounded.codes.astype(np.int8)
            stored[f"{name}.scale"] = rounded.group.scale[:, 0].astype(np.float16)
        else:
            stored[name] = tensor.astype(np.float16)
    if vocabulary is not None:
        stored[_VOCABULARY] = vocabulary.astype(np.int32)
    metadata = {_CONFIG: config.to_json(), **(notes or {})}
    if calibration is not None:
        metadata[_CALIBRATION] = json.dumps(asdict(calibration))
    write_bytes(path, save({name: np.ascontiguousarray(each) for name, each in stored.items()}, metadata))


def _file(path: Path) -> Path:
    if path.is_dir():
        found = sorted(path.glob("*.safetensors"))
        pickles = [each for each in sorted(path.iterdir()) if each.suffix in _PICKLES]
        if not found and pickles:
            path = pickles[0]
        elif len(found) == 1:
            return found[0]
        else:
            raise CheckpointError(f"{path} holds {len(found)} safetensors files; give the path of the heads' own")
    if path.suffix in _PICKLES:
        wanted = path.with_suffix(".safetensors")
        raise UnsupportedModelError(
            f"{path} is a pickle, which may run code when it is read; convert it where that does not matter: python -c "
            + shlex.quote(
                "import torch; from safetensors.torch import save_file; "
                f"save_file(torch.load({str(path)!r}, weights_only=True), {str(wanted)!r})"
            )
        )
    return path


def _own(file: SafetensorsFile) -> Heads:
    config = read_config(str(file.metadata[_CONFIG]), str(file.path))
    shapes = dict(tensor_shapes(config))
    _check_names(file, shapes, {_VOCABULARY, *(f"{name}.scale" for name in shapes)})
    tensors = {name: _tensor(file, name) for name in shapes}
    vocabulary = file.read_integers(_VOCABULARY) if _VOCABULARY in file.entries else None
    calibration = None
    if _CALIBRATION in file.metadata:
        calibration = head_calibration(parse_json(str(file.metadata[_CALIBRATION]), str(file.path)), str(file.path))
    return _checked(Heads(config, tensors, vocabulary, calibration, file.path))


def _tensor(file: SafetensorsFile, name: str) -> Matrix:
    if file.entries[name].dtype != "I8":
        return file.read(name)
    if f"{name}.scale" not in file.entries:
        raise CheckpointError(f"{file.path} lacks {name}.scale; is it whole?")
    scale, codes = file.read(f"{name}.scale"), file.read_integers(name)
    if codes.ndim != 2 or scale.shape != codes.shape[:1]:
        raise CheckpointError(f"{file.path}: {name}.scale does not fit its tensor; it is damaged")
    return dequantise(Rounded(_ROWS, codes.astype(np.int8), Group(scale[:, None], None, None), codes.shape[1]))


def _public(file: SafetensorsFile, vocab_size: int) -> Heads:
    names = {name.removeprefix("medusa_heads.").removeprefix("medusa_head."): name for name in file.entries}
    for layout in (_FASTER_DECODING, _VLLM):
        if any(re.fullmatch(layout.block, name) for name in names):
            return _checked(layout.read(file, names, vocab_size))
    raise UnsupportedModelError(
        f"{file.path} holds no Medusa heads of a layout that is known: neither 0.0.linear.weight (FasterDecoding), "
        "blocks.0.layers.0.weight (vLLM) nor this project's own"
    )


@dataclass(frozen=True)
class _Layout:
    """A public layout: patterns of its names, how they are written, and whether one matrix may be all heads'."""

    block: str
    block_name: str
    head: str
    head_name: str
    bias: str
    bias_name: str
    one_matrix: bool

    def read(self, file: SafetensorsFile, names: Mapping[str, str], vocab_size: int) -> Heads:
        heads, blocks, one = self._size(file, names)
        wanted = [self.block_name.format(head=head, block=block) for head in range(heads) for block in range(blocks)]
        matrices = [self.head_name.format(head=head, blocks=blocks) for head in range(heads)]
        own = not one and any(name in names for name in matrices)
        _check_present(file, names, [*wanted, *(matrices if own else ())])
        biases = [self.bias_name.format(head=head, block=block) for head in range(heads) for block in range(blocks)]
        unknown = sorted(set(names) - {*wanted, *matrices, *biases, "lm_head.weight", "token_map"})
        if unknown:
            raise CheckpointError(f"{file.path} holds {_listed(unknown)}, which is no part of Medusa heads")
        ids = self._ids(file, names, vocab_size)
        guesses = vocab_size if ids is None else len(ids)
        sides = file.entries[names[wanted[0]]].shape
        config = HeadsConfig(
            heads=heads,
            hidden_size=sides[0] if sides else 0,
            vocab_size=vocab_size,
            blocks=blocks,
            vocabulary=0 if ids is None else guesses,
            lm_head="own" if own else "shared",
        )
        tensors: dict[str, Matrix] = {}
        for place, (weight, bias) in enumerate(zip(wanted, biases, strict=True)):
            prefix = "heads.{}.blocks.{}.square".format(*divmod(place, blocks))
            tensors[f"{prefix}.weight"] = file.read(names[weight])
            given = names.get(bias)
            tensors[f"{prefix}.bias"] = np.zeros(config.hidden_size, np.float32) if given is None else file.read(given)
        for head, name in enumerate(matrices if own else ()):
            matrix = file.read(names[name])
            if ids is not None and matrix.ndim == 2 and guesses < len(matrix) == vocab_size:
                matrix = matrix[ids]
            tensors[f"heads.{head}.lm_head.weight"] = matrix
        return Heads(config, tensors, ids, None, file.path)

    def _size(self, file: SafetensorsFile, names: Mapping[str, str]) -> tuple[int, int, bool]:
        """How many heads there are, blocks of each, and whether one matrix is all heads'."""
        found = [place for pattern in (self.block, self.bias) for place in _numbers(names, pattern)]
        matrices = [place[0] for place in _numbers(names, self.head)]
        one = self.one_matrix and ("lm_head.weight" in names or matrices == [0])
        heads = 1 + max([place[0] for place in found] + ([] if one else matrices))
        blocks = 1 + max(place[1] for place in found)
        if heads > MOST_HEADS or blocks > MOST_HEADS:
            raise CheckpointError(
                f"{file.path} holds {heads} heads of {blocks} blocks, where {MOST_HEADS} are the most"
            )
        return heads, blocks, one and heads > 1

    @staticmethod
    def _ids(file: SafetensorsFile, names: Mapping[str, str], vocab_size: int) -> NDArray[np.int64] | None:
        if "token_map" not in names:
            return None
        ids = file.read_integers(names["token_map"])
        if ids.ndim != 1 or not len(ids) or ids.min() < 0 or ids.max() >= vocab_size:
            raise CheckpointError(f"{file.path}: token_map is no list of this model's {vocab_size:,} tokens")
        return ids


def _numbers(names: Iterable[str], pattern: str) -> list[tuple[int, ...]]:
    return [tuple(map(int, found.groups())) for name in names if (found := re.fullmatch(pattern, name))]


_NUMBER = r"(\d{1,9})"
_FASTER_DECODING = _Layout(
    rf"{_NUMBER}\.{_NUMBER}\.linear\.weight",
    "{head}.{block}.linear.weight",
    rf"{_NUMBER}\.{_NUMBER}\.weight",
    "{head}.{blocks}.weight",
    rf"{_NUMBER}\.{_NUMBER}\.linear\.bias",
    "{head}.{block}.linear.bias",
    one_matrix=False,
)
_VLLM = _Layout(
    rf"blocks\.{_NUMBER}\.layers\.{_NUMBER}\.weight",
    "blocks.{head}.layers.{block}.weight",
    rf"lm_heads\.{_NUMBER}\.weight",
    "lm_heads.{head}.weight",
    rf"blocks\.{_NUMBER}\.layers\.{_NUMBER}\.bias",
    "blocks.{head}.layers.{block}.bias",
    one_matrix=True,
)


def _check_names(file: SafetensorsFile, shapes: Mapping[str, Any], further: Iterable[str]) -> None:
    _check_present(file, {name: name for name in file.entries}, shapes)
    unknown = sorted(set(file.entries) - set(shapes) - set(further))
    if unknown:
        raise CheckpointError(f"{file.path} holds {_listed(unknown)}, which its description does not know")


def _check_present(file: SafetensorsFile, names: Mapping[str, str], wanted: Iterable[str]) -> None:
    missing = [name for name in wanted if name not in names]
    if missing:
        raise CheckpointError(f"{file.path} lacks {_listed(missing)}; is it whole?")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SEVERAL} more" if len(names) > _SEVERAL else ""
    return ", ".join(names[:_SEVERAL]) + more


def _checked(heads: Heads) -> Heads:
    """Shapes and ids that make sense."""
    for name, shape in tensor_shapes(heads.config):
        found = heads.tensors[name].shape
        if found != shape:
            raise CheckpointError(f"{heads.where}: tensor {name} has shape {list(found)} where {list(shape)} belongs")
    ids, config = heads.vocabulary, heads.config
    if (ids is None) != (not config.vocabulary) or (
        ids is not None and (ids.shape != (config.vocabulary,) or len(set(ids.tolist())) != len(ids) or ids.min() < 0)
    ):
        raise CheckpointError(f"{heads.where}: its list of tokens does not fit its description")
    if ids is not None and ids.max() >= config.vocab_size:
        raise CheckpointError(f"{heads.where}: it guesses token {ids.max()} of {config.vocab_size}; another model's?")
    calibration = heads.calibration
    if calibration is not None and len(calibration.top) != config.heads:
        raise CheckpointError(f"{heads.where}: its calibration is of {len(calibration.top)} heads, not {config.heads}")
    return heads
