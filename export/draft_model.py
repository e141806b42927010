"""A draft that is another model: found like any, and refused where its tokens are not the target's."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from specedge.export.checkpoint import Checkpoint, Tokenizer
from specedge.export.layers import read_decoder
from specedge.export.options import Progress
from specedge.export.sources import resolve
from specedge.quant.formats import Format
from specedge.runtime.errors import UnsupportedModelError, UsageError

__all__ = ["check_same_tokens", "draft_capacity", "resolve_draft"]

_LONGEST = 40

_log = logging.getLogger("specedge.export")


def resolve_draft(
    model: str, target: Checkpoint, form: Format, *, offline: bool = False, progress: Progress | None = None
) -> Checkpoint:
    """Finds a draft model and makes sure that it can draft for the target.

    Args:
        model: A folder, a hub id, a GGUF file or a built-in name.
        target: The target's checkpoint.
        form: Number format of the draft.
        offline: Fetch nothing.
        progress: Called while something is downloaded.

    Raises:
        UsageError: There is no such model, or its tokens are others.
        CheckpointError: It cannot be read.
        DownloadError: It cannot be fetched.
        UnsupportedModelError: No builder covers it.
    """
    checkpoint = resolve(model, offline=offline, progress=progress)
    check_same_tokens(target.tokenizer, checkpoint.tokenizer, checkpoint.name)
    try:
        read_decoder(checkpoint, form, 1)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"draft {checkpoint.name}: {error}") from None
    return checkpoint


def check_same_tokens(target: Tokenizer, draft: Tokenizer, name: str) -> None:
    """Whether every id that both tokenizers know stands for the same token.

    Ids that only one of them knows do not matter: a draft never proposes what it lacks, and what
    the target lacks is never accepted.

    Args:
        target, draft: The tokenizers; added and special tokens count like all others.
        name: The draft's, for the message.

    Raises:
        UsageError: They differ; the first token that does is named.
    """
    ours, theirs = _tokens(target), _tokens(draft)
    for token in sorted(ours.keys() & theirs.keys()):
        if ours[token] != theirs[token]:
            raise UsageError(
                f"draft {name}: token {token} is {_shown(theirs[token])} where the target has {_shown(ours[token])}; "
                "a draft needs the target's tokenizer, so choose a model of the same family"
            )
    if not ours.keys() & theirs.keys():
        raise UsageError(f"draft {name}: its tokenizer and the target's have no id in common; choose another model")


def draft_capacity(checkpoint: Checkpoint, capacity: int, form: Format) -> int:
    """Rows of a draft model's cache: the target's, or what its own context holds; it then stops drafting sooner."""
    most = read_decoder(checkpoint, form, 1).dimensions.positions
    if most < capacity:
        _log.info(
            "draft %s: its context ends at %d of %d tokens; it drafts no further", checkpoint.name, most, capacity
        )
    return min(most, capacity)


def _tokens(tokenizer: Tokenizer) -> Mapping[int, str]:
    from tokenizers import Tokenizer as Encoder

    return {number: text for text, number in Encoder.from_str(tokenizer.model).get_vocab(True).items()}


def _shown(token: str) -> str:
    return repr(token if len(token) <= _LONGEST else token[:_LONGEST] + "…")
