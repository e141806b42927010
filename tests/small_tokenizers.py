"""Small tokenizers of the two kinds there are: byte-level BPE, and SentencePiece-like BPE with byte fallback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["CHATML", "CONTROLS", "byte_level", "sentence_piece", "size"]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_WORDS = ("the", "in", "he", "er", "an", "re", "on", "at", "en", "nd", "ti", "es", "or", "te", "of", "ed", "is", "it")


def byte_level(controls: Sequence[str] = CONTROLS, **changes: Any) -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE: control tokens first, then all bytes, then merges."""
    from tokenizers.pre_tokenizers import ByteLevel

    pieces = [*controls, *sorted(ByteLevel.alphabet())]
    merges = [[word[0], word[1]] for word in _WORDS if len(word) == 2] + [["Ġ", "t"], ["Ġt", "he"], ["t", "he"]]
    pieces += dict.fromkeys(left + right for left, right in merges)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(number, text) for number, text in enumerate(controls)],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(pieces, merges, byte_fallback=False),
        **changes,
    }


def sentence_piece(controls: Sequence[str] = ("<unk>", "<s>", "</s>"), **changes: Any) -> dict[str, Any]:
    """tokenizer.json of a BPE as llama.cpp's SentencePiece models have it; texts begin with <s>."""
    letters = [*"abcdefghijklmnopqrstuvwxyz", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ", *".,:;!?<>|/_()[]'0123456789\n", "▁"]
    merges = [["▁", "t"], ["h", "e"], ["▁t", "he"], ["i", "n"], ["▁", "a"]]
    pieces = [*controls, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    pieces += [left + right for left, right in merges]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(number, text) for number, text in enumerate(controls)],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": _bpe(pieces, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True),
        **changes,
    }


def size(tokenizer: dict[str, Any]) -> int:
    """Number of its ids."""
    return len(tokenizer["model"]["vocab"])


def _added(number: int, text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, **flags, "special": True}


def _bpe(pieces: Sequence[str], merges: Sequence[list[str]], **changes: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {piece: number for number, piece in enumerate(pieces)},
        "merges": list(merges),
        **changes,
    }
