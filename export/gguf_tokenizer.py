"""tokenizer.json and tokenizer_config.json from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specedge.export.checkpoint import Tokenizer
from specedge.export.gguf_config import token_id
from specedge.export.gguf_file import GgufFile
from specedge.export.reading import brief
from specedge.runtime.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    import tokenizers

__all__ = ["PRE_TOKENIZERS", "PreTokenizer", "gguf_tokenizer"]

# Token types of tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
_SPACE = "▁"  # how SentencePiece writes a space

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before byte-pair merges: one row for each value of tokenizer.ggml.pre.

    Attributes:
        patterns: Regular expressions applied one after the other; each match, and each gap, is a piece.
        whole_words: Whether a piece that is a token stands, whatever the merges say.
        add_bos: Whether a text begins with BOS where the file does not say.
        nfc: Whether text is normalised to NFC first, as the model's own tokenizer does.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False
    nfc: bool = False


def _rows(row: PreTokenizer, *names: str) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names, row)


# Which names share a pattern: llama.cpp, src/llama-vocab.cpp. The patterns are those of the models' own tokenizers.
PRE_TOKENIZERS = {
    **_rows(PreTokenizer((_GPT2,)), "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"),
    **_rows(
        PreTokenizer((r"\p{N}", _GPT2)),
        *("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
    ),
    **_rows(PreTokenizer((_LLAMA3,), whole_words=True, add_bos=True), "llama-bpe", "llama3", "llama-v3", "falcon3"),
    **_rows(PreTokenizer((_LLAMA3,)), "dbrx", "smaug-bpe"),
    **_rows(PreTokenizer((_QWEN2,), nfc=True), "qwen2"),
    **_rows(PreTokenizer((_QWEN2,)), "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"),
    **_rows(PreTokenizer((_TEKKEN,), whole_words=True, add_bos=True), "tekken"),
    # What llama.cpp does with files of converters that did not know the model; not what any model was trained with.
    **_rows(PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")), "default"),
}


@dataclass(frozen=True)
class _Vocabulary:
    """The vocabulary as the file lists it: texts and types by id."""

    texts: list[str]
    types: list[int]
    path: Path

    @property
    def ids(self) -> dict[str, int]:
        return {text: number for number, text in enumerate(self.texts)}


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer that the file describes.

    Raises:
        UnsupportedModelError: Its kind, or the way it cuts text, is unknown.
        CheckpointError: The metadata is incomplete or contradicts itself.
    """
    kind = file.metadata.get("tokenizer.ggml.model")
    if not isinstance(kind, str) or kind not in ("gpt2", "llama"):
        raise UnsupportedModelError(f"{file.path}: a tokenizer of the kind {brief(kind)}; gpt2 and llama can be read")
    vocabulary = _vocabulary(file)
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(file, vocabulary)
    else:
        tokenizer, add_bos = _sentence_piece(file, vocabulary), True
    _add_special(tokenizer, vocabulary)
    names = {
        name: vocabulary.texts[number]
        for name in ("bos", "eos", "unknown", "padding")
        if (number := token_id(file.metadata, name, len(vocabulary.texts), file.path)) is not None
    }
    before = _flag(file, "add_bos_token", add_bos) and "bos" in names
    after = _flag(file, "add_eos_token", False) and "eos" in names
    _add_template(tokenizer, names["bos"] if before else None, names["eos"] if after else None)
    template = file.metadata.get("tokenizer.chat_template")
    return Tokenizer(tokenizer.to_str(), _config(file.metadata, names), template if isinstance(template, str) else None)


def _flag(file: GgufFile, key: str, default: bool) -> bool:
    value = file.metadata.get(f"tokenizer.ggml.{key}", default)
    if not isinstance(value, bool):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.{key} is {brief(value)} where true or false belongs")
    return value


def _config(metadata: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """tokenizer_config.json; the class is one that transformers 4 and 5 both know."""
    keys = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    config: dict[str, Any] = {keys[name]: text for name, text in names.items()}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    limit = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    return config | ({"model_max_length": limit} if isinstance(limit, int) else {})


def _vocabulary(file: GgufFile) -> _Vocabulary:
    texts = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise CheckpointError(f"{file.path} holds no vocabulary (tokenizer.ggml.tokens); convert the model again")
    if len(set(texts)) != len(texts):
        raise CheckpointError(f"{file.path} lists a token twice; convert the model again")
    types = _numbers(file, "token_type") or [1] * len(texts)
    if len(types) != len(texts):
        raise CheckpointError(f"{file.path} lists {len(texts):,} tokens but {len(types):,} token types")
    return _Vocabulary(texts, types, file.path)


def _numbers(file: GgufFile, key: str) -> list[Any]:
    """A list of numbers; empty if it is not there."""
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    if value is not None and not isinstance(value, np.ndarray):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.{key} must be a list of numbers")
    return [] if value is None else list(value.tolist())


def _byte_level(file: GgufFile, vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """Byte-level BPE, and whether BOS is added by default."""
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Built

    name = file.metadata.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise UnsupportedModelError(f"{file.path}: unknown tokenizer.ggml.pre {brief(name)}; known are {known}")
    row = PRE_TOKENIZERS[name]
    ids = vocabulary.ids
    lines = file.metadata.get("tokenizer.ggml.merges")
    if not isinstance(lines, list):
        raise CheckpointError(f"{file.path} holds no merges (tokenizer.ggml.merges); convert the model again")
    merges = [_merge(line, ids, file.path) for line in lines]
    tokenizer = Built(models.BPE(vocab=ids, merges=merges, ignore_merges=row.whole_words))
    if row.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in row.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, row.add_bos


def _merge(line: object, ids: Mapping[str, int], path: Path) -> tuple[str, str]:
    # Checked here because the tokenizers package panics on a merge it cannot make.
    left, found, right = str(line).partition(" ")
    if not found or left not in ids or right not in ids or left + right not in ids:
        raise CheckpointError(f"{path} holds the merge {brief(line)}, whose parts or result are no tokens")
    return left, right


def _sentence_piece(file: GgufFile, vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: merges are made from the scores, unknown characters become byte tokens."""
    from tokenizers import Tokenizer as Built
    from tokenizers import decoders, models, normalizers

    ids = vocabulary.ids
    fallback = all(f"<0x{byte:02X}>" in ids for byte in range(256))
    unknown = token_id(file.metadata, "unknown", len(ids), file.path)
    if unknown is None and _UNKNOWN in vocabulary.types:
        unknown = vocabulary.types.index(_UNKNOWN)
    if unknown is None and not fallback:
        raise CheckpointError(f"{file.path} has neither byte tokens nor an unknown token")
    tokenizer = Built(
        models.BPE(
            vocab=ids,
            merges=_merges_by_score(file, vocabulary),
            unk_token=None if unknown is None else vocabulary.texts[unknown],
            fuse_unk=True,
            byte_fallback=fallback,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if _flag(file, "add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_by_score(file: GgufFile, vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every way to make a token out of two others, best score first.

    SentencePiece joins the neighbours whose joint token has the best score; a merge list in order of score does the
    same. Control, unknown, unused and byte tokens are never made of text, so they are left out.
    """
    scores = _numbers(file, "scores")
    if len(scores) != len(vocabulary.texts):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.scores must hold one number for each token")
    plain = {
        text: number
        for number, (text, kind) in enumerate(zip(vocabulary.texts, vocabulary.types, strict=True))
        if kind not in (_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE)
    }
    merges = [
        (-float(scores[number]), plain[text[:cut]], plain[text[cut:]])
        for text, number in plain.items()
        for cut in range(1, len(text))
        if text[:cut] in plain and text[cut:] in plain
    ]
    merges.sort()
    return [(vocabulary.texts[left], vocabulary.texts[right]) for _, left, right in merges]


def _add_special(tokenizer: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Tokens that are found in the text before it is cut: control tokens (special) and user-defined ones."""
    from tokenizers import AddedToken

    by_kind: dict[int, list[str]] = {}
    for text, kind in zip(vocabulary.texts, vocabulary.types, strict=True):
        by_kind.setdefault(kind, []).append(text)
    special = by_kind.get(_CONTROL, []) + by_kind.get(_UNKNOWN, [])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    plain = by_kind.get(_USER_DEFINED, [])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in plain])


def _add_template(tokenizer: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Put BOS and EOS around a text that is encoded with special tokens."""
    from tokenizers import processors

    special = {text: tokenizer.token_to_id(text) for text in (bos, eos) if text is not None}
    if not special:
        return
    single = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    pair = [*single, *(f"{part}:1" for part in [*([bos] if bos else []), "$B", *([eos] if eos else [])])]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=list(special.items())
    )
