"""Texts to calibrate on: what the target answers to given prompts or, without any, what it writes by itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specedge.export.checkpoint import Checkpoint
from specedge.export.interop import generation_config, token_ids
from specedge.export.texts import Text
from specedge.export.writing import answer_prompts, write_texts
from specedge.runtime.errors import PromptError, UsageError
from specedge.runtime.graph import Decoder
from specedge.runtime.prompts import Prompt
from specedge.runtime.text import Text as Tokenizer

__all__ = ["FEWEST_PROMPTS", "LENGTH", "TOKENS", "TextSource", "chat_frame", "open_text", "text_source"]

Counter = Callable[[int, int], None]

TOKENS = 16384
"""Tokens of all texts."""

LENGTH = 256
"""Most tokens of a text that the target writes by itself."""

FEWEST_PROMPTS = 8

_ANSWER = 128  # most tokens of an answer to a given prompt
_TEMPERATURE = 1.0
_ROWS = 4096  # of the cache, where no prompt needs more
_FIRST_TOKENS = 64  # that texts begin with where a model names no begin of text

# User turns that begin and end differently: what their prompts have in common is the template's.
_PROBES = ("Why?", "1 + 1", "Tell me about rivers.", "écris une lettre")


@dataclass(frozen=True)
class TextSource:
    """Where the texts come from, checked before any work.

    Attributes:
        name: What the texts depend on, but for the model; for a fingerprint.
        prompts: Token ids of prompts to answer; (): the target writes by itself.
        starts: What its texts begin with.
        ends: Tokens that end a text.
        reply: What stands between question and answer of a chat.
        capacity: Most rows of a text.
        tokens: Of all texts.
        seed: Of the samples.
    """

    name: dict[str, Any]
    prompts: tuple[tuple[int, ...], ...]
    starts: tuple[tuple[int, ...], ...]
    ends: frozenset[int]
    reply: tuple[int, ...]
    capacity: int
    tokens: int
    seed: int

    @property
    def length(self) -> int:
        """Most tokens of a text that the target writes by itself."""
        return min(LENGTH, self.capacity - 1)

    @property
    def rows(self) -> int:
        """Rows of the cache to write in."""
        return min(self.capacity, max(_ROWS, max(map(len, self.prompts), default=0) + _ANSWER + 1))

    def write(self, target: Decoder, progress: Counter | None = None) -> list[Text]:
        """Lets a target write the texts; its cache is emptied."""
        if self.prompts:
            return answer_prompts(
                target,
                self.prompts,
                length=_ANSWER,
                ends=self.ends,
                temperature=_TEMPERATURE,
                seed=self.seed,
                progress=progress,
            )
        return write_texts(
            target,
            count=self.tokens,
            length=self.length,
            starts=self.starts,
            temperature=_TEMPERATURE,
            seed=self.seed,
            ends=self.ends,
            reply=self.reply,
            tokens=self.tokens,
            progress=progress,
        )


def text_source(
    checkpoint: Checkpoint,
    prompts: Sequence[Prompt] | None,
    *,
    capacity: int,
    vocab_size: int,
    tokens: int = TOKENS,
    seed: int = 0,
) -> TextSource:
    """Says where texts come from.

    Args:
        checkpoint: The model; its chat template renders prompts.
        prompts: To answer, as many as `tokens` need, in an order that the seed gives; None: none are needed.
        capacity: Most rows of a text.
        vocab_size: How many token ids the model has.
        tokens: Of all texts, at most about so many.
        seed: Of the samples.

    Raises:
        UsageError: There are too few prompts, or one is longer than the capacity.
        PromptError: A prompt that the tokenizer or the chat template refuses.
        BundleError: The tokenizer or the chat template is at fault.
    """
    tokenizer, ends = open_text(checkpoint, vocab_size)
    name: dict[str, Any] = {
        "tokens": tokens,
        "seed": seed,
        "temperature": _TEMPERATURE,
        "length": min(LENGTH, capacity - 1),
        "prompts": None,
    }
    if prompts is not None:
        chosen = _chosen(_rendered(tokenizer, prompts, capacity), tokens, seed)
        digest = hashlib.sha256(repr(chosen).encode()).hexdigest()
        return TextSource({**name, "prompts": digest}, chosen, (), ends, (), capacity, tokens, seed)
    header, reply = chat_frame(tokenizer, checkpoint.tokenizer.chat_template is not None)
    room = min(LENGTH, capacity - 1)
    if header and reply and len(header) + len(reply) + _ANSWER // 8 < room:
        return TextSource(name, (), (header,), ends, reply, capacity, tokens, seed)
    begin = [*tokenizer.encode(""), *token_ids(generation_config(checkpoint).get("bos_token_id")), *sorted(ends)]
    starts = tuple((token,) for token in begin[:1] if 0 <= token < vocab_size)
    if not starts:
        drawn = np.random.default_rng(seed).integers(vocab_size, size=_FIRST_TOKENS)
        starts = tuple((int(token),) for token in drawn)
    return TextSource(name, (), starts, ends, (), capacity, tokens, seed)


def open_text(checkpoint: Checkpoint, vocab_size: int) -> tuple[Tokenizer, frozenset[int]]:
    """A checkpoint's tokenizer with its chat template, and the tokens that end an answer."""
    ends = frozenset(
        token for token in token_ids(generation_config(checkpoint).get("eos_token_id")) if 0 <= token < vocab_size
    )
    files = checkpoint.tokenizer
    text = Tokenizer(
        files.model, files.config, files.chat_template, vocab_size=vocab_size, eos=tuple(ends), where=checkpoint.name
    )
    return text, ends


def _rendered(tokenizer: Tokenizer, prompts: Sequence[Prompt], capacity: int) -> list[tuple[int, ...]]:
    if len(prompts) < FEWEST_PROMPTS:
        raise UsageError(
            f"{len(prompts)} prompts are too few to calibrate on: give {FEWEST_PROMPTS} or more, "
            "or none, and the model writes its own"
        )
    rendered = []
    for prompt in prompts:
        ids = tuple(tokenizer.chat_prompt([{"role": "user", "content": prompt.text}]))
        if not ids or len(ids) + _ANSWER >= capacity:
            raise UsageError(
                f"calibration prompt {prompt.question_id} has {len(ids):,} tokens, which leaves no room for an answer "
                f"of {_ANSWER} in {capacity:,}; shorten it, or raise --capacity"
            )
        rendered.append(ids)
    return rendered


def _chosen(prompts: Sequence[tuple[int, ...]], tokens: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """Prompts in a random order, until they and their answers may come to `tokens`; never too few."""
    chosen: list[tuple[int, ...]] = []
    total = 0
    for place in np.random.default_rng(seed).permutation(len(prompts)):
        if total >= tokens and len(chosen) >= FEWEST_PROMPTS:
            break
        chosen.append(prompts[place])
        total += len(prompts[place]) + _ANSWER
    return tuple(chosen)


def chat_frame(tokenizer: Tokenizer, chat: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What a chat template puts before a user's words, and between them and the answer; () where it cannot be told."""
    if not chat:
        return (), ()
    try:
        rendered = [tuple(tokenizer.chat_prompt([{"role": "user", "content": probe}])) for probe in _PROBES]
    except PromptError:  # a template that takes no single user turn
        return (), ()
    before = _common(rendered)
    after = _common([ids[::-1] for ids in rendered])[::-1]
    fits = all(len(before) + len(after) < len(ids) for ids in rendered)
    return (before, after) if fits else ((), ())


def _common(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The longest beginning that all have."""
    same = next((place for place, items in enumerate(zip(*rows, strict=False)) if len(set(items)) > 1), None)
    return min(rows, key=len) if same is None else rows[0][:same]
