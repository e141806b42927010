"""What a target is asked: files of prompts, chats or texts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specedge.runtime.errors import PromptError, UsageError
from specedge.runtime.prompts import json_lines
from specedge.runtime.text import Text
from specedge.train.answering import Question

__all__ = ["Asked", "in_groups", "of_prompts", "read_questions"]

_MAX_LINE = 1 << 22
_GROUP = 512
_FORMS = '{"turns": ["a question"]}, {"messages": [{"role": "user", "content": "…"}, …]} or {"text": "…"}'


@dataclass(frozen=True)
class Asked:
    """Everything that is asked.

    Attributes:
        questions: Numbered from 0; those of one prompt have one remainder by `prompts`.
        prompts: How many prompts there are.
        left_out: Lines that are too long for the model.
    """

    questions: tuple[Question, ...]
    prompts: int
    left_out: int


def read_questions(
    paths: Sequence[Path],
    text: Text,
    *,
    length: int,
    capacity: int,
    temperatures: Sequence[float] = (0.0,),
    ends: Collection[int] = (),
) -> Asked:
    """Reads files of JSON lines.

    A line with `turns` holds a user's turns, of which the target answers the first; one with
    `messages` a chat, whose last answer of the assistant is taken as it is (or written, where a
    user has the last word); one with `text` a text, which is taken as it is, as far as `length` goes.

    Args:
        paths: The files.
        text: Tokenizer and chat template.
        length: Most tokens of an answer.
        capacity: Most tokens of a prompt and its answer; longer lines are left out.
        temperatures: Each prompt is answered once at each.
        ends: Tokens that end an answer; the first is put behind a chat's.

    Raises:
        UsageError: A file cannot be read, or a line of it is none of these; or nothing fits.
        PromptError: The chat template refuses a conversation.
    """
    pairs: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    left_out = 0
    for path in paths:
        for where, line in json_lines(path, f"write {_FORMS}", _MAX_LINE):
            prompt, answer = _tokens(line, where, text, tuple(sorted(ends))[:1])
            if prompt and len(prompt) + length <= capacity:
                pairs.append((prompt, answer))
            else:
                left_out += 1
    if not pairs and not left_out:
        raise UsageError(f"no line in {', '.join(map(str, paths))}; write {_FORMS}")
    if not pairs:
        raise UsageError(f"no line of {', '.join(map(str, paths))} leaves room for an answer; give shorter ones")
    return _asked(pairs, length, temperatures, left_out)


def of_prompts(prompts: Sequence[tuple[int, ...]], *, length: int, temperatures: Sequence[float] = (0.0,)) -> Asked:
    """Questions of prompts that are token ids already."""
    return _asked([(prompt, ()) for prompt in prompts], length, temperatures, 0)


def _asked(
    pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], length: int, temperatures: Sequence[float], left_out: int
) -> Asked:
    questions = []
    for round_, temperature in enumerate(temperatures):
        for number, (prompt, answer) in enumerate(pairs):
            if not answer or not round_:
                questions.append(Question(number + round_ * len(pairs), prompt, length, answer, temperature))
    return Asked(tuple(questions), len(pairs), left_out)


def in_groups(questions: Sequence[Question], seed: int) -> Iterator[Question]:
    """Questions in a random order, but near others of like length, which is faster; higher temperatures last."""
    order = np.random.default_rng(seed).permutation(len(questions)).tolist()
    order.sort(key=lambda place: questions[place].temperature)
    for first in range(0, len(order), _GROUP):
        group = [questions[place] for place in order[first : first + _GROUP]]
        yield from sorted(group, key=lambda each: len(each.prompt))


def _tokens(
    line: Mapping[str, Any], where: str, text: Text, end: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Prompt and answer of a line; (): the answer is to be written."""
    try:
        if isinstance(line.get("text"), str):
            ids = tuple(text.encode(line["text"]))
            return ids[:1], ids[1:]
        messages, answer = _conversation(line, where)
        prompt = tuple(text.chat_prompt(messages))
        return prompt, (*text.encode_more(answer), *end) if answer else ()
    except PromptError as error:
        raise PromptError(f"{where}: {error}") from None


def _conversation(line: Mapping[str, Any], where: str) -> tuple[list[dict[str, str]], str]:
    """What was said before the answer, and the answer; "": it is to be written."""
    if "messages" in line:
        messages = _messages(line["messages"], where)
        answer = messages.pop()["content"] if messages[-1]["role"] == "assistant" else ""
    elif isinstance(line.get("turns"), list) and line["turns"] and isinstance(line["turns"][0], str):
        messages, answer = [{"role": "user", "content": line["turns"][0]}], ""
    else:
        raise UsageError(f"{where}: neither turns, messages nor text; write {_FORMS}")
    if not messages or not messages[-1]["content"].strip():
        raise UsageError(f"{where}: nothing is asked; write {_FORMS}")
    return messages, answer


def _messages(raw: Any, where: str) -> list[dict[str, str]]:
    fits = isinstance(raw, list) and all(
        isinstance(each, dict) and isinstance(each.get("role"), str) and isinstance(each.get("content"), str)
        for each in raw
    )
    if not raw or not fits:
        raise UsageError(f"{where}: messages is no list of roles and contents; write {_FORMS}")
    return [{"role": each["role"], "content": each["content"]} for each in raw]
