"""Questions that a target writes itself, as a user would (Magpie, Xu et al. 2024, arXiv 2406.08464)."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path

from specedge.export.calibration import fingerprint_of
from specedge.export.calibration_texts import chat_frame
from specedge.export.checkpoint import Checkpoint
from specedge.models import find_family, read_dimensions
from specedge.runtime.errors import StorageError, UsageError
from specedge.runtime.files import write_text
from specedge.runtime.text import Text
from specedge.train.answering import Question, answer_questions
from specedge.train.target import BatchTarget, fast_dtype, load_target

__all__ = ["self_questions"]

_LONGEST = 96
_SHORTEST = 3
_SLOTS = 64
_TEMPERATURE = 1.0


def self_questions(
    checkpoint: Checkpoint,
    text: Text,
    count: int,
    path: Path,
    *,
    ends: Collection[int],
    seed: int = 0,
    device: object = None,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> list[tuple[int, ...]]:
    """Prompts with questions that the target wrote; kept in a file, from which they come the next time.

    Args:
        checkpoint: The target, a chat model.
        text: Its tokenizer and chat template.
        count: How many to write; those that are too short or stand twice are left out.
        path: Where they are kept.
        ends: Tokens that end a text.
        seed: Of the samples.
        device: Where to compute; None: the CPU.
        progress: Told of tokens written.

    Raises:
        UsageError: The model has no chat template that tells a question from an answer.
    """
    import torch

    header, reply = chat_frame(text, checkpoint.tokenizer.chat_template is not None)
    if not header or not reply:
        raise UsageError(
            f"--data self: {checkpoint.name} has no chat template in which it could ask itself; give --data FILE.jsonl"
        )
    about = {"model": fingerprint_of(checkpoint, None).model, "count": count, "seed": seed}
    vocab_size = read_dimensions(find_family(checkpoint.config.get("model_type")), checkpoint.config).vocab_size
    if (kept := _read(path, about, vocab_size)) is not None:
        return kept
    where = device if isinstance(device, torch.device) else torch.device("cpu")
    dtype = fast_dtype(where)
    target = BatchTarget(
        load_target(checkpoint, dtype, where), min(_SLOTS, count), len(header) + _LONGEST + 1, (), dtype
    )
    questions = [Question(number, header, _LONGEST, temperature=_TEMPERATURE) for number in range(count)]
    stop, written = {*ends, reply[0]}, 0

    def tell(tokens: int) -> None:
        nonlocal written
        written += tokens
        progress("ask", written, count * _LONGEST)

    found: dict[int, tuple[int, ...]] = {}
    for answer in answer_questions(target, questions, ends=stop, seed=seed, progress=tell):
        asked = answer.tokens[:-1] if answer.tokens[-1] in stop else answer.tokens
        if len(asked) >= _SHORTEST:
            found[answer.question.number] = (*header, *asked, *reply)
    prompts = list(dict.fromkeys(found[number] for number in sorted(found)))
    write_text(path, json.dumps({"about": about, "prompts": prompts}))
    return prompts


def _read(path: Path, about: dict[str, object], vocab_size: int) -> list[tuple[int, ...]] | None:
    if not path.exists():
        return None
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        prompts = [tuple(prompt) for prompt in raw["prompts"]]
        fits = raw["about"] == about
        if not prompts or any(
            type(token) is not int or not 0 <= token < vocab_size for each in prompts for token in each
        ):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise StorageError(f"{path} is damaged; delete it") from None
    if not fits:
        raise UsageError(f"{path} holds questions of another model or with other settings; delete it")
    return prompts
