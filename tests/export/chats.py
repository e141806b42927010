"""A tiny random model in memory that has a tokenizer and, if wanted, a chat template."""

from __future__ import annotations

import dataclasses
from typing import Any

from specedge.export.checkpoint import Checkpoint, Tokenizer
from specedge.tests.reference import memory_checkpoint
from specedge.tests.tiny import CHAT_TEMPLATE, SPECIAL, tiny_tokenizer

__all__ = ["VOCAB", "chat_checkpoint"]

VOCAB = 320


def chat_checkpoint(template: str | None = CHAT_TEMPLATE, **changes: Any) -> Checkpoint:
    """A model that could chat."""
    texts = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2]}
    return dataclasses.replace(
        memory_checkpoint(vocab_size=VOCAB, max_position_embeddings=1024, **changes),
        tokenizer=Tokenizer(tiny_tokenizer(VOCAB).to_str(), texts, template),
        generation={"bos_token_id": 1, "eos_token_id": [2]},
    )
