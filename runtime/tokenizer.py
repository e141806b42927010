"""Opens an untrusted tokenizer.json.

The `tokenizers` library panics (an exception that `except Exception` misses) or aborts
the process on some files, so what is known to do so is refused before the library sees
the file, and what panics nevertheless becomes an ordinary error.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specedge.runtime.errors import BundleError, SpecEdgeError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["OpenedTokenizer", "contained", "open_tokenizer"]

_MAX_TEXT = 64 << 20  # the largest in use (Gemma 3) has 33 MB
_MAX_GROWTH = 64  # how many times longer all replacements together may make a text
_SLACK = 1024  # added tokens just past the vocabulary happen (Gemma 3's image token): they are left out
_MODELS = ("BPE", "Unigram", "WordPiece", "WordLevel")


@dataclass(frozen=True)
class OpenedTokenizer:
    """A tokenizer that finds control tokens in a text only under secret names.

    Attributes:
        tokenizer: Takes the texts of control tokens as ordinary text.
        controls: Id of each control token by its text.
        names: Secret name of each control token by its text; nobody who writes a text can guess it.
        restore: Id of the control token by the id of its secret name.
    """

    tokenizer: Tokenizer
    controls: Mapping[str, int]
    names: Mapping[str, str]
    restore: Mapping[int, int]


@contextmanager
def contained(message: str, kind: type[SpecEdgeError] = BundleError) -> Iterator[None]:
    """Turns whatever the tokenizers library raises, panics included, into one error."""
    try:
        yield
    except (SpecEdgeError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        # PanicException derives from BaseException and cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{message}: {_short(error)}") from None


def open_tokenizer(text: str, where: str, vocab_size: int, eos: Collection[int] = ()) -> OpenedTokenizer:
    """Checks and opens a tokenizer.

    Args:
        text: Content of tokenizer.json.
        where: What to call it in errors.
        vocab_size: How many token ids the model has.
        eos: Tokens that end a reply; they are control tokens whatever the file says.

    Raises:
        BundleError: It is damaged, or asks for something harmful.
    """
    from tokenizers import Tokenizer

    try:
        raw = _parse(text)
        _check_model(raw["model"], vocab_size)
        _check_steps(raw)
        added = _check_added(raw.get("added_tokens") or [], vocab_size)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BundleError(f"{where}: {_short(error)}; export the bundle again") from None
    for token in added:
        token["special"] = bool(token.get("special")) or token["id"] in eos
    raw["added_tokens"] = added
    source = json.dumps(raw)
    with contained(f"{where}: not a tokenizer"):
        tokenizer = Tokenizer.from_str(source)
        for token in added:
            if tokenizer.token_to_id(token["content"]) != token["id"]:
                raise ValueError(f"added token {token['content']!r} does not get its id {token['id']}")
        if missing := [token for token in eos if tokenizer.id_to_token(token) is None]:
            raise ValueError(f"the end-of-text token {missing[0]} is not in the vocabulary")
        return _hide_controls(tokenizer, [token for token in added if token["special"] and token["content"]])


def _hide_controls(tokenizer: Tokenizer, controls: list[dict[str, Any]]) -> OpenedTokenizer:
    """Gives each control token a secret name, at an id past all others, and takes its own text for text."""
    from tokenizers import AddedToken

    secret = secrets.token_hex(16)
    names: dict[str, str] = {}
    restore: dict[int, int] = {}
    for number, token in enumerate(controls):
        name = f"\ue000{secret}{number}\ue001"
        flags = {flag: bool(token.get(flag)) for flag in ("lstrip", "rstrip", "single_word", "normalized")}
        past = tokenizer.get_vocab_size(with_added_tokens=True)
        tokenizer.add_tokens([AddedToken(name, special=False, **flags)])
        hidden = tokenizer.token_to_id(name)
        if hidden is None or tokenizer.get_vocab_size(with_added_tokens=True) != past + 1 or hidden in restore:
            raise ValueError("no more tokens can be added")
        names[token["content"]] = name
        restore[hidden] = token["id"]
    tokenizer.encode_special_tokens = True
    return OpenedTokenizer(tokenizer, {token["content"]: token["id"] for token in controls}, names, restore)


def _parse(text: str) -> dict[str, Any]:
    if len(text) > _MAX_TEXT:
        raise ValueError(f"{len(text):,} characters where {_MAX_TEXT:,} are allowed")
    raw = json.loads(text)
    if not isinstance(raw, dict) or not isinstance(raw.get("model"), dict):
        raise ValueError("not a tokenizer: it has no model")
    for name in ("truncation", "padding"):
        if raw.get(name) is not None:
            raise ValueError(f"{name} is set, which has no place in a bundle")
    return raw


def _check_model(model: Mapping[str, Any], vocab_size: int) -> None:
    kind = model.get("type", "BPE")
    if kind not in _MODELS:
        raise ValueError(f"model type {kind!r} is none of {', '.join(_MODELS)}")
    vocab = model["vocab"]
    ids = range(len(vocab)) if kind == "Unigram" else vocab.values()
    if any(isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size for token in ids):
        raise ValueError(f"the vocabulary has an id outside 0 to {vocab_size - 1}")
    if kind == "BPE":
        _check_merges(model, vocab)


def _check_merges(model: Mapping[str, Any], vocab: Mapping[str, int]) -> None:
    """A merge of pieces that are not there, or make none, panics at encode time."""
    prefix = model.get("continuing_subword_prefix") or ""
    for merge in model.get("merges") or ():
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        if left not in vocab or right not in vocab or left + right[len(prefix) :] not in vocab:
            raise ValueError(f"the merge of {left!r} and {right!r} has no place in the vocabulary")


def _check_added(added: list[dict[str, Any]], vocab_size: int) -> list[dict[str, Any]]:
    """The added tokens that the model can be given."""
    for token in added:
        number = token["id"]
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < vocab_size + _SLACK:
            raise ValueError(f"added token {token['content']!r} has the id {number}, outside the vocabulary")
        if not isinstance(token["content"], str):
            raise ValueError(f"added token {number} is not text")
    return [token for token in added if token["id"] < vocab_size]


def _check_steps(raw: Mapping[str, Any]) -> None:
    """Chained replacements may not make a text many times longer."""
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        growth = 1
        for step in _steps(raw.get(part)):
            if step.get("type") == "Replace":
                pattern = step["pattern"].get("String")
                growth *= max(1, -(-len(step["content"]) // (len(pattern) if pattern else 1)))
            elif step.get("type") == "Prepend" and len(step["prepend"]) > _MAX_GROWTH:
                raise ValueError(f"the {part} puts {len(step['prepend']):,} characters before a text")
            if growth > _MAX_GROWTH:
                raise ValueError(f"the {part} makes texts more than {_MAX_GROWTH} times longer")


def _steps(step: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if step is None:
        return
    yield step
    for name in ("normalizers", "pretokenizers", "decoders"):
        for inner in step.get(name) or ():
            yield from _steps(inner)


def _short(error: BaseException) -> str:
    text = "".join(character if character.isprintable() else "?" for character in str(error))
    if isinstance(error, KeyError):
        text = f"{text} is missing"
    return text if len(text) <= 160 else text[:157] + "..."
