"""A tiny random Llama checkpoint: as a folder in Hugging Face layout, and as a GGUF file of the same model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

__all__ = ["CHAT_TEMPLATE", "SPECIAL", "TinyLlama", "tiny_tokenizer", "write_tiny_checkpoint", "write_tiny_gguf"]

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = (
    "the quick brown fox jumps over the lazy dog and then the other dog said hello to the fox",
    "def reverse(text): return text[::-1]  # a function that reverses a string",
    "Speculative decoding drafts tokens and verifies them. Paris is the capital of France. 1 2 3 4 5 10 100",
)


@dataclass(frozen=True)
class TinyLlama:
    """A model: its shape and its seed say everything."""

    layers: int = 2
    hidden: int = 64
    intermediate: int = 96
    heads: int = 4
    kv_heads: int = 2
    vocab: int = 320
    tied: bool = True
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    attention_bias: bool = False
    context: int = 512
    head_dim: int | None = None
    seed: int = 0
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def config(self) -> dict[str, Any]:
        """config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling,
            "max_position_embeddings": self.context,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "attention_bias": self.attention_bias,
            "mlp_bias": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": "float32",
            **self.overrides,
        }

    def tensors(self) -> dict[str, np.ndarray]:
        """Hugging Face tensors, float32, [out, in]; large enough that the argmax of the logits varies."""
        random = np.random.default_rng(self.seed)

        def normal(*shape: int, scale: float) -> np.ndarray:
            return (scale * random.standard_normal(shape)).astype(np.float32)

        def linear(rows: int, columns: int) -> np.ndarray:
            return normal(rows, columns, scale=columns**-0.5)

        def norm() -> np.ndarray:
            return 1 + normal(self.hidden, scale=0.1)

        query, value = self.heads * self.head, self.kv_heads * self.head
        result = {"model.embed_tokens.weight": normal(self.vocab, self.hidden, scale=0.5)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            result[prefix + "input_layernorm.weight"] = norm()
            for part, rows in (("q", query), ("k", value), ("v", value)):
                result[f"{prefix}self_attn.{part}_proj.weight"] = linear(rows, self.hidden)
                if self.attention_bias:
                    result[f"{prefix}self_attn.{part}_proj.bias"] = normal(rows, scale=0.2)
            result[prefix + "self_attn.o_proj.weight"] = linear(self.hidden, query)
            if self.attention_bias:
                result[prefix + "self_attn.o_proj.bias"] = normal(self.hidden, scale=0.2)
            result[prefix + "post_attention_layernorm.weight"] = norm()
            result[prefix + "mlp.gate_proj.weight"] = linear(self.intermediate, self.hidden)
            result[prefix + "mlp.up_proj.weight"] = linear(self.intermediate, self.hidden)
            result[prefix + "mlp.down_proj.weight"] = linear(self.hidden, self.intermediate)
        result["model.norm.weight"] = norm()
        if not self.tied:
            result["lm_head.weight"] = normal(self.vocab, self.hidden, scale=0.5)
        return result


def tiny_tokenizer(vocab: int = 320) -> Any:
    """A byte-level BPE tokenizer of exactly `vocab` tokens (at least 259): specials, bytes, merges, spare tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    missing = vocab - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<spare_{number}>" for number in range(missing)])
    assert tokenizer.get_vocab_size() == vocab, f"a vocabulary of {vocab} is too small for bytes and specials"
    return tokenizer


def write_tiny_checkpoint(folder: Path, model: TinyLlama | None = None) -> Path:
    """Write the model in Hugging Face layout; the folder is made, and given back."""
    model = model or TinyLlama()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(model.tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2],
        "unk_token": SPECIAL[0],
        "pad_token": SPECIAL[2],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.context,
    }
    generation = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    contents = {"config": model.config, "generation_config": generation, "tokenizer_config": tokenizer_config}
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
    (folder / "tokenizer.json").write_text(tiny_tokenizer(model.vocab).to_str(), encoding="utf-8")
    return folder


_GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def _interleave(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of q or k as llama.cpp's converter does: row i + d/2 of a head comes to stand beside row i."""
    head = tensor.shape[0] // heads
    order = [start + part for start in range(head // 2) for part in (0, head // 2)]
    return np.concatenate([tensor[first : first + head][order] for first in range(0, heads * head, head)])


def write_tiny_gguf(
    path: Path,
    model: TinyLlama | None = None,
    *,
    rope_freqs: np.ndarray | None = None,
    kinds: Callable[[str], str] = lambda name: "F32",
) -> Path:
    """Write the model as a GGUF file.

    Args:
        path: The file.
        model: The model.
        rope_freqs: What the frequencies are divided by, as converters write it for Llama 3.1's scaling.
        kinds: GGML number format by Hugging Face name; asked for matrices, the rest is float32.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    model = model or TinyLlama()
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_license("apache-2.0")
    writer.add_block_count(model.layers)
    writer.add_context_length(model.context)
    writer.add_embedding_length(model.hidden)
    writer.add_feed_forward_length(model.intermediate)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_key_length(model.head)
    writer.add_value_length(model.head)
    writer.add_rope_dimension_count(model.head)
    writer.add_rope_freq_base(model.rope_theta)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(model.vocab)
    _add_tokenizer(writer, model.vocab)
    for name, tensor in model.tensors().items():
        if "q_proj" in name or "k_proj" in name:
            tensor = _interleave(tensor, model.heads if "q_proj" in name else model.kv_heads)
        kind = GGMLQuantizationType[kinds(name) if tensor.ndim == 2 else "F32"]
        writer.add_tensor(_gguf_name(name), quants.quantize(tensor, kind), raw_dtype=kind)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    if name in _GGUF_WHOLE:
        return _GGUF_WHOLE[name]
    _, _, layer, rest = name.split(".", 3)
    part, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_GGUF_PARTS[part]}.{kind}"


def _add_tokenizer(writer: Any, vocab: int) -> None:
    content = json.loads(tiny_tokenizer(vocab).to_str())
    added = {token["id"]: token for token in content["added_tokens"]}
    texts = {number: text for text, number in content["model"]["vocab"].items()}
    texts |= {number: token["content"] for number, token in added.items()}
    # 1 normal, 3 control, 4 user-defined
    types = [(3 if added[number]["special"] else 4) if number in added else 1 for number in range(vocab)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([texts[number] for number in range(vocab)])
    writer.add_token_types(types)
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    )
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
