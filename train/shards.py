"""Rows and answers on disk, so that epochs are cheap and a killed run goes on where it was.

A folder holds `rows.json`, which says what the rows are of, and shards: safetensors files with
`tokens` int32 [n], `hidden` bfloat16 [n, hidden_size], `inner` bfloat16 [n, taps * hidden_size],
`numbers` int64 [answers] and `ends` int64 [answers], where in the n each answer ends.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specedge.runtime.errors import StorageError, UsageError
from specedge.train.answering import Answer

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["RowStore", "Rows"]

_FACTS = "rows.json"
_SHARD_TOKENS = 16384


@dataclass(frozen=True)
class Rows:
    """The rows of many answers, one behind the other.

    Attributes:
        tokens: int64 [n].
        hidden: bfloat16 [n, hidden_size].
        inner: bfloat16 [n, taps * hidden_size]; None where there are none.
        numbers: int64 [n], which answer a row is of.
    """

    tokens: Tensor
    hidden: Tensor
    inner: Tensor | None
    numbers: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, places: Any) -> Rows:
        inner = None if self.inner is None else self.inner[places]
        return Rows(self.tokens[places], self.hidden[places], inner, self.numbers[places])


class RowStore:
    """A folder of shards.

    Args:
        folder: Made if it is not there.
        facts: What the rows are of: where a folder has others, it is refused.
        rank: Which process writes; each writes shards of its own.

    Raises:
        UsageError: The folder is of something else.
        StorageError: It cannot be written.
    """

    def __init__(self, folder: Path, facts: Mapping[str, Any], rank: int = 0) -> None:
        self.folder, self._rank, self._pending = folder, rank, list[Answer]()
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder} is a file where a folder for rows belongs; give another name")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._claim(json.dumps(dict(facts), indent=1, sort_keys=True))
        except OSError as error:
            raise StorageError(f"{folder}: cannot be written ({error.strerror}); give another folder") from None

    def _claim(self, facts: str) -> None:
        path = self.folder / _FACTS
        if path.exists():
            if path.read_text(encoding="utf-8", errors="replace") != facts:
                raise UsageError(
                    f"{self.folder} holds rows of another model, other data or other settings; "
                    "give another folder, or delete it"
                )
            return
        if any(each.suffix != ".tmp" for each in self.folder.iterdir()):
            raise UsageError(f"{self.folder} is not empty and holds no rows; give another folder")
        beside = path.with_suffix(f".{os.getpid()}.tmp")
        beside.write_text(facts, encoding="utf-8")
        beside.replace(path)

    def done(self) -> set[int]:
        """Numbers of the answers that are stored."""
        numbers: set[int] = set()
        for path in self._shards():
            with _opened(path) as shard:
                numbers.update(shard.get_tensor("numbers").tolist())
        return numbers

    def tokens(self) -> int:
        """How many tokens the stored answers have."""
        total = 0
        for path in self._shards():
            with _opened(path) as shard:
                total += shard.get_slice("tokens").get_shape()[0]
        return total

    def add(self, answer: Answer) -> None:
        """Stores an answer; it is on disk once a shard is full or `flush` was called."""
        self._pending.append(answer)
        if sum(len(each.tokens) for each in self._pending) >= _SHARD_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Writes what is pending."""
        if self._pending:
            number = next(n for n in itertools.count() if not self._shard(n).exists())
            _save(self._pending, self._shard(number))
            self._pending = []

    def load(self) -> Rows:
        """All rows, in the order of the answers' numbers, so that who wrote them when makes no difference."""
        import torch

        parts: dict[int, Rows] = {}
        for path in self._shards():
            with _opened(path) as stored:
                shard = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  no mapping
            first = 0
            for number, end in zip(shard["numbers"].tolist(), shard["ends"].tolist(), strict=True):
                inner = shard["inner"][first:end] if "inner" in shard else None
                tokens = shard["tokens"][first:end].long()
                parts[number] = Rows(tokens, shard["hidden"][first:end], inner, torch.full_like(tokens, number))
                first = end
        return _joined([parts[number] for number in sorted(parts)])

    def _shard(self, number: int) -> Path:
        return self.folder / f"rows-{self._rank}-{number:05}.safetensors"

    def _shards(self) -> list[Path]:
        return sorted(self.folder.glob("rows-*.safetensors"))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """An open shard.

    Raises:
        StorageError: It is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as shard:
            yield shard
    except (SafetensorError, OSError, KeyError):
        raise StorageError(f"{path} is damaged; delete it, and what it held is written again") from None


def _joined(parts: Sequence[Rows]) -> Rows:
    import torch

    inner = [part.inner for part in parts if part.inner is not None]
    return Rows(
        torch.cat([part.tokens for part in parts]),
        torch.cat([part.hidden for part in parts]),
        torch.cat(inner) if inner else None,
        torch.cat([part.numbers for part in parts]),
    )


def _save(answers: Sequence[Answer], path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    ends = torch.tensor([len(each.tokens) for each in answers]).cumsum(0)
    tensors = {
        "tokens": torch.tensor([token for each in answers for token in each.tokens], dtype=torch.int32),
        "hidden": torch.cat([each.rows.hidden.cpu() for each in answers]),
        "numbers": torch.tensor([each.question.number for each in answers]),
        "ends": ends,
    }
    if answers[0].rows.inner is not None:
        tensors["inner"] = torch.cat([each.rows.inner.cpu() for each in answers if each.rows.inner is not None])
    beside = path.with_suffix(".tmp")
    try:
        save_file(tensors, str(beside))
        beside.replace(path)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror}); free some space") from None
