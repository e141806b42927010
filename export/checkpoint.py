"""A checkpoint as the exporter sees it, wherever it came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from specedge.quant.grid import Grid, Rounded

__all__ = ["Checkpoint", "ReplacedTensors", "RoundedTensors", "Tensors", "Tokenizer"]


class Tensors(Protocol):
    """Tensors by their Hugging Face names, read one at a time when asked for."""

    def __contains__(self, name: str) -> bool: ...

    def __iter__(self) -> Iterator[str]: ...

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        """The tensor as float32; a linear layer's weight is [out, in], q and k for half-split rotation."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape, without reading the data."""
        ...


@runtime_checkable
class RoundedTensors(Tensors, Protocol):
    """Tensors of a file that holds them rounded, and gives them as it has them."""

    def grid(self, name: str) -> Grid | None:
        """The grid a tensor lies on, without reading the data; None: plain floats.

        Raises:
            UnsupportedModelError: No grid can hold it as it is.
        """
        ...

    def rounded(self, name: str) -> Rounded | None:
        """The matrix on that grid: `dequantise` gives what `__getitem__` gives; None: plain floats."""
        ...


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer in the form of Hugging Face's files.

    Attributes:
        model: Text of tokenizer.json.
        config: Content of tokenizer_config.json, without the chat template.
        chat_template: The Jinja template; None for base models.
    """

    model: str
    config: Mapping[str, Any]
    chat_template: str | None = None


@dataclass(frozen=True)
class Checkpoint:
    """One model, read but not yet loaded.

    Attributes:
        name: Short name, e.g. "smollm2-135m".
        source: Where it came from, for the manifest: "builtin:NAME", "gguf:NAME", "hub:ID@REVISION", "folder:NAME".
        config: Content of Hugging Face's config.json; rope_theta and rope_scaling stand at top level.
        generation: Content of generation_config.json; eos_token_id is a list.
        tensors: The weights.
        tokenizer: The tokenizer.
        path: Folder or GGUF file that transformers can load itself, for the parity check.
        license: SPDX identifier, where the source names one.
    """

    name: str
    source: str
    config: Mapping[str, Any]
    tensors: Tensors
    tokenizer: Tokenizer
    path: Path
    generation: Mapping[str, Any] = field(default_factory=dict)
    license: str | None = None


class ReplacedTensors:
    """Tensors, some of them replaced by others of the same shape."""

    def __init__(self, tensors: Tensors, replaced: Mapping[str, NDArray[np.float32]]) -> None:
        self._tensors = tensors
        self._replaced = replaced

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        return self._replaced[name] if name in self._replaced else self._tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors.shape(name)
