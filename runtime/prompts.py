"""Files of prompts: JSON lines, each with an id, a category and the turns of a conversation."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specedge.runtime.errors import UsageError

__all__ = ["Prompt", "json_lines", "read_prompts", "spread"]

_MAX_LINE = 1 << 20
_WANTED = 'write {"question_id": 1, "category": "writing", "turns": ["..."]}'


@dataclass(frozen=True)
class Prompt:
    """One line of a prompt file; `text` is its first turn."""

    question_id: str
    category: str
    text: str


def read_prompts(path: Path, limit: int | None = None, *, labelled: bool = True) -> list[Prompt]:
    """Reads a prompt file, in its order, at most `limit` prompts of each category.

    Each line is an object with `question_id` (or `id`), `category` and `turns`.

    Args:
        path: The file.
        limit: Most prompts of each category; None: all.
        labelled: Every line must have its id and category. Else a line without takes its number
            for the one and "prompt" for the other.

    Raises:
        UsageError: The file cannot be read, has no prompt, or a line of it is not one.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"limit is {limit}: give the number of prompts a category, 1 or more")
    seen: Counter[str] = Counter()
    prompts = []
    for where, raw in json_lines(path, _WANTED):
        number = int(where.rpartition(":")[2])
        prompt = _prompt(raw, where, {} if labelled else {"question_id": number, "category": "prompt"})
        seen[prompt.category] += 1
        if limit is None or seen[prompt.category] <= limit:
            prompts.append(prompt)
    if not prompts:
        raise UsageError(f"{path}: no prompt in this file; write one JSON object a line")
    return prompts


def json_lines(path: Path, wanted: str, longest: int = _MAX_LINE) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file of JSON lines, each with where it stands ("FILE:LINE"); empty lines are passed over.

    Args:
        path: The file.
        wanted: What a line should be, for messages.
        longest: Most characters of a line.

    Raises:
        UsageError: The file cannot be read, or a line of it is no object.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; give a file of prompts, one JSON object a line") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not UTF-8 text; give a file of prompts, one JSON object a line") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        if len(line) > longest:
            raise UsageError(f"{where}: {len(line):,} characters, more than a prompt can have")
        try:
            raw = json.loads(line)
        except (ValueError, RecursionError):
            raise UsageError(f"{where}: not JSON; {wanted}") from None
        if not isinstance(raw, dict):
            raise UsageError(f"{where}: not an object; {wanted}")
        yield where, raw


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` of the prompts, the categories taking turns; each category's in the order of the file."""
    seen: Counter[str] = Counter()
    turns = []
    for prompt in prompts:
        turns.append(seen[prompt.category])
        seen[prompt.category] += 1
    order = sorted(range(len(prompts)), key=turns.__getitem__)  # stable: within a turn, the order of the file
    return [prompts[place] for place in order[:count]]


def _prompt(raw: dict[str, Any], where: str, defaults: Mapping[str, object]) -> Prompt:
    """One line of a prompt file, checked; what it lacks is taken from `defaults`."""
    raw.setdefault("question_id", raw.get("id"))
    for name in ("question_id", "category", "turns"):
        if raw.get(name) is None:
            raw[name] = defaults.get(name)
        if raw[name] is None:
            raise UsageError(f"{where}: {name} is missing; {_WANTED}")
    identity, category, turns = raw["question_id"], raw["category"], raw["turns"]
    if isinstance(identity, bool) or not isinstance(identity, (int, str)):
        raise UsageError(f"{where}: question_id is neither a number nor text; {_WANTED}")
    if not isinstance(category, str) or not category.strip() or not category.isprintable():
        raise UsageError(f"{where}: category is not a printable name; {_WANTED}")
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0].strip():
        raise UsageError(f"{where}: turns is not a list that begins with a text; {_WANTED}")
    return Prompt(str(identity), category, turns[0])
