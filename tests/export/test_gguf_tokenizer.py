"""Tokenizers from GGUF metadata: byte-level BPE, and SentencePiece against its own algorithm."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from tokenizers import Tokenizer

from specedge.export.gguf_file import GgufFile
from specedge.export.gguf_tokenizer import PRE_TOKENIZERS, gguf_tokenizer
from specedge.runtime.errors import CheckpointError, UnsupportedModelError
from specedge.tests.tiny import CHAT_TEMPLATE, tiny_tokenizer, write_tiny_gguf

TEXTS = [
    "",
    "   ",
    "the quick brown fox, 12345 and café 😀\r\n\r\n\tIt's  here",
    "<|im_start|>user\nhello<|im_end|>",
    "你好，世界！aaaaaaaaaaaaaaaaaaaaaaaa",
]


@pytest.fixture
def tiny(tmp_path):
    return GgufFile(write_tiny_gguf(tmp_path / "tiny.gguf"))


def build(file) -> Tokenizer:
    return Tokenizer.from_str(gguf_tokenizer(file).model)


def pieces(name: str, text: str) -> list[str]:
    """How a row of the table cuts a text, in characters."""
    from tokenizers import Regex, pre_tokenizers

    row = PRE_TOKENIZERS[name]
    steps = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in row.patterns]
    return [piece for piece, _ in pre_tokenizers.Sequence(steps).pre_tokenize_str(text)]


def test_ids_are_those_of_the_tokenizer_the_file_was_made_from(tiny):
    original, rebuilt = tiny_tokenizer(), build(tiny)
    for text in TEXTS:
        assert rebuilt.encode(text).ids == original.encode(text).ids, text
        assert rebuilt.decode(original.encode(text).ids) == original.decode(original.encode(text).ids)


def test_config_and_template(tiny):
    result = gguf_tokenizer(tiny)
    assert result.chat_template == CHAT_TEMPLATE
    assert result.config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert (result.config["bos_token"], result.config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert "chat_template" not in result.config
    del tiny.metadata["tokenizer.chat_template"]
    assert gguf_tokenizer(tiny).chat_template is None


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, []),
        ({"add_bos_token": True}, [1]),
        ({"add_eos_token": True}, [2]),
        ({"add_bos_token": True, "add_eos_token": True}, [1, 2]),
    ],
)
def test_begin_and_end_stand_around_a_text_where_the_file_says(tiny, flags, expected):
    tiny.metadata["tokenizer.ggml.add_bos_token"] = False
    tiny.metadata |= {f"tokenizer.ggml.{key}": value for key, value in flags.items()}
    tokenizer = build(tiny)
    assert tokenizer.encode("").ids == expected
    inside = tokenizer.encode("the fox", add_special_tokens=False).ids
    assert sorted(tokenizer.encode("the fox").ids) == sorted([*expected, *inside])
    assert tokenizer.encode("the", "fox").ids.count(1) == 2 * expected.count(1)


def test_begin_is_the_default_of_llama_3_alone(tiny):
    del tiny.metadata["tokenizer.ggml.add_bos_token"]
    assert build(tiny).encode("").ids == []
    tiny.metadata["tokenizer.ggml.pre"] = "llama-bpe"
    assert build(tiny).encode("").ids == [1]


def test_text_of_special_tokens_is_plain_text_when_asked_for(tiny):
    tokenizer = build(tiny)
    assert tokenizer.encode("<|im_start|>").ids == [1]
    tokenizer.encode_special_tokens = True
    ids = tokenizer.encode("<|im_start|>").ids
    assert len(ids) > 1 and tokenizer.decode(ids) == "<|im_start|>"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "It's 12345  a\n\nb", ["It", "'s", " 12345", " ", " a", "\n", "\n", "b"]),
        ("smollm", "x 123", ["x", " ", "1", "2", "3"]),
        ("llama-bpe", "IT'S 12345", ["IT", "'S", " ", "123", "45"]),
        ("llama-bpe", "a!\n\n b", ["a", "!\n\n", " b"]),
        ("qwen2", "x 123", ["x", " ", "1", "2", "3"]),
        ("tekken", "camelCase 12", ["camel", "Case", " ", "1", "2"]),
        ("default", "x1234=a", ["x", "123", "4", "=", "a"]),
    ],
)
def test_how_text_is_cut(name, text, expected):
    assert pieces(name, text) == expected


def test_every_row_keeps_every_character():
    for name in PRE_TOKENIZERS:
        for text in TEXTS:
            assert "".join(pieces(name, text)) == text, name


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        ("tokenizer.ggml.model", "t5", UnsupportedModelError, "kind 't5'"),
        ("tokenizer.ggml.model", ["gpt2"], UnsupportedModelError, "kind"),
        ("tokenizer.ggml.pre", "nobody-knows", UnsupportedModelError, "'nobody-knows'; known are .*smollm"),
        ("tokenizer.ggml.pre", np.array([1, 2]), UnsupportedModelError, "unknown tokenizer.ggml.pre"),
        ("tokenizer.ggml.tokens", ["a", "a"], CheckpointError, "a token twice"),
        ("tokenizer.ggml.tokens", [], CheckpointError, "no vocabulary"),
        ("tokenizer.ggml.token_type", np.array([1, 2]), CheckpointError, "2 token types"),
        ("tokenizer.ggml.token_type", ["1"], CheckpointError, "list of numbers"),
        ("tokenizer.ggml.merges", ["the longestwordthatisnotoken"], CheckpointError, "merge"),
        ("tokenizer.ggml.merges", ["nospace"], CheckpointError, "merge"),
        ("tokenizer.ggml.merges", 7, CheckpointError, "no merges"),
        ("tokenizer.ggml.add_bos_token", "yes", CheckpointError, "true or false"),
    ],
)
def test_metadata_that_makes_no_tokenizer(tiny, key, value, error, message):
    tiny.metadata[key] = value
    with pytest.raises(error, match=message) as raised:
        gguf_tokenizer(tiny)
    assert str(tiny.path) in str(raised.value) and "\n" not in str(raised.value)


WORDS = ["▁the", "▁th", "▁t", "he", "th", "in", "▁in", "er", "▁a", "an", "▁an", "and", "▁and", "nd"]
WORDS += ["aa", "aaaa", "▁▁", "▁x", "lo", "low"]


def sentence_piece(tmp_path, *, prefix: bool, byte_tokens: bool = True) -> GgufFile:
    """A small vocabulary: unknown, begin, end, bytes, letters, words in order of score, user-defined tokens."""
    letters = list("▁abcdefghijklmnopqrstuvwxyz<>/1")
    texts, types, scores = ["<unk>", "<s>", "</s>"], [2, 3, 3], [0.0, 0.0, 0.0]
    if byte_tokens:
        texts += [f"<0x{byte:02X}>" for byte in range(256)]
        types += [6] * 256
        scores += [0.0] * 256
    texts += [*letters, *WORDS, "   ", "<tool>"]
    types += [1] * (len(letters) + len(WORDS)) + [4, 4]
    scores += [-1000.0] * len(letters) + [-float(rank) for rank in range(len(WORDS))] + [0.0, 0.0]
    file = GgufFile(write_tiny_gguf(tmp_path / "spm.gguf"))
    file.metadata |= {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": np.array(types),
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.add_space_prefix": prefix,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
    }
    del file.metadata["tokenizer.ggml.add_bos_token"]
    return file


def reference(file: GgufFile, text: str) -> list[int]:
    """SentencePiece's algorithm as its paper and source tell it: join the best-scored pair, leftmost first."""
    texts = file.metadata["tokenizer.ggml.tokens"]
    types = file.metadata["tokenizer.ggml.token_type"]
    scores = file.metadata["tokenizer.ggml.scores"]
    ids = {word: number for number, word in enumerate(texts)}
    plain = {word: scores[number] for word, number in ids.items() if types[number] == 1}
    user = sorted((word for word, number in ids.items() if types[number] == 4), key=len, reverse=True)
    result: list[int] = []

    def segment(part: str) -> None:
        if not part:
            return
        prefix = "▁" if file.metadata["tokenizer.ggml.add_space_prefix"] else ""
        symbols = list(prefix + part.replace(" ", "▁"))
        while True:
            pairs = [(plain.get(a + b), -at) for at, (a, b) in enumerate(pairwise(symbols))]
            best = max((pair for pair in pairs if pair[0] is not None), default=None)
            if best is None:
                break
            at = -best[1]
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        for symbol in symbols:
            result.extend([ids[symbol]] if symbol in plain else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()])

    rest, start = text, 0
    while start < len(rest):
        found = next((word for word in user if rest.startswith(word, start)), None)
        if found is None:
            start += 1
            continue
        segment(rest[:start])
        result.append(ids[found])
        rest, start = rest[start + len(found) :], 0
    segment(rest)
    return result


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_piece_gives_the_ids_of_its_algorithm(tmp_path, rng, prefix):
    file = sentence_piece(tmp_path, prefix=prefix)
    tokenizer = build(file)
    alphabet = [*" aehinrtdlowx<>1é你😀\n", "the", " and", "   ", "<tool>", "aa", "<0x0A>"]
    texts = ["the lower and  the x", "aaaaaaaaa", " ", "a   b<tool>the", "<0x41>"]
    texts += ["".join(rng.choice(alphabet, rng.integers(1, 25))) for _ in range(500)]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == reference(file, text), text
        if not prefix:
            assert tokenizer.decode(ids) == text


def test_sentence_piece_begins_with_bos_and_keeps_the_prefix_out_of_decoded_text(tmp_path):
    tokenizer = build(sentence_piece(tmp_path, prefix=True))
    ids = tokenizer.encode("the x").ids
    assert ids[0] == 1 and tokenizer.id_to_token(ids[1]) == "▁the"
    assert tokenizer.decode(ids) == "the x"


def test_sentence_piece_without_bytes_falls_back_to_unknown(tmp_path):
    file = sentence_piece(tmp_path, prefix=False, byte_tokens=False)
    assert build(file).encode("é", add_special_tokens=False).ids == [0]
    file.metadata["tokenizer.ggml.token_type"][0] = 1
    del file.metadata["tokenizer.ggml.unknown_token_id"]
    with pytest.raises(CheckpointError, match="neither byte tokens nor an unknown"):
        gguf_tokenizer(file)


def test_sentence_piece_needs_a_score_for_each_token(tmp_path):
    file = sentence_piece(tmp_path, prefix=False)
    file.metadata["tokenizer.ggml.scores"] = np.zeros(3, np.float32)
    with pytest.raises(CheckpointError, match="one number for each token"):
        gguf_tokenizer(file)
