"""The files beside the graphs that other tools read: Optimum, transformers, transformers.js, onnxruntime-genai.

What each loader demands was read out of its source; where two demands differ, both
forms are written (the chat template stands inline and as a file of its own).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specedge.export.checkpoint import Checkpoint, Tokenizer
from specedge.runtime.bundle import GraphSpec

__all__ = [
    "STANDARD_GRAPH",
    "config_json",
    "genai_config",
    "generation_config",
    "token_ids",
    "tokenizer_config",
    "write_interop",
]

STANDARD_GRAPH = "onnx/model.onnx"

# what only the class that wrote the file understands: PreTrainedTokenizerFast would choke on it or run it
_PRIVATE_TOKENIZER_KEYS = (
    "auto_map",
    "backend",
    "chat_template",
    "is_local",
    "local_files_only",
    "name_or_path",
    "processor_class",
    "tokenizer_file",
    "vocab_file",
    "merges_file",
)


def write_interop(folder: Path, checkpoint: Checkpoint, spec: GraphSpec) -> None:
    """Writes every file of a bundle but the graphs and the manifest.

    Args:
        folder: The bundle being made.
        checkpoint: Where the configuration and the tokenizer come from.
        spec: The target graph.
    """
    _write_json(folder / "config.json", config_json(checkpoint, spec))
    _write_json(folder / "generation_config.json", generation_config(checkpoint))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(checkpoint.tokenizer))
    _write_json(folder / "genai_config.json", genai_config(checkpoint, spec))
    (folder / "tokenizer.json").write_text(checkpoint.tokenizer.model, encoding="utf-8")
    if checkpoint.tokenizer.chat_template is not None:
        (folder / "chat_template.jinja").write_text(checkpoint.tokenizer.chat_template, encoding="utf-8")


def config_json(checkpoint: Checkpoint, spec: GraphSpec) -> dict[str, Any]:
    """config.json: the checkpoint's own, with what transformers.js needs to find the weights.

    transformers.js picks a file by its number format; here that is always `model.onnx`, whose
    format goes by the name "fp32" whatever the precision, and whose weights stand in one file.
    """
    config = {key: value for key, value in checkpoint.config.items() if key not in ("dtype", "auto_map")}
    config["torch_dtype"] = spec.cache_dtype  # this name is read by transformers 4 and 5
    hints: dict[str, Any] = {"dtype": "fp32", "use_external_data_format": {"model.onnx": 1}}
    if spec.cache_dtype == "float16":
        hints["kv_cache_dtype"] = "float16"
    config["transformers.js_config"] = hints
    return config


def generation_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """generation_config.json: the checkpoint's own; the token ids come from config.json where it has none."""
    generation = dict(checkpoint.generation)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if generation.get(key) is None and checkpoint.config.get(key) is not None:
            generation[key] = checkpoint.config[key]
    return generation


def tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """tokenizer_config.json for a class that transformers 4 and 5, transformers.js and genai know.

    transformers 5 names `TokenizersBackend` and lists `extra_special_tokens`, which 4.57 cannot
    load; `PreTrainedTokenizerFast` takes everything from tokenizer.json under both.
    """
    config = {key: value for key, value in tokenizer.config.items() if key not in _PRIVATE_TOKENIZER_KEYS}
    extra = config.get("extra_special_tokens")
    if isinstance(extra, list):
        del config["extra_special_tokens"]
        config.setdefault("additional_special_tokens", extra)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config.setdefault("clean_up_tokenization_spaces", False)
    # the class's default adds token_type_ids, which decoders refuse
    config["model_input_names"] = ["input_ids", "attention_mask"]
    if tokenizer.chat_template is not None:
        config["chat_template"] = tokenizer.chat_template
    return config


def genai_config(checkpoint: Checkpoint, spec: GraphSpec) -> dict[str, Any]:
    """genai_config.json: how onnxruntime-genai runs the standard graph, greedy until asked otherwise."""
    generation = generation_config(checkpoint)
    eos = token_ids(generation.get("eos_token_id"))
    pad = token_ids(generation.get("pad_token_id"))
    bos = token_ids(generation.get("bos_token_id"))
    heads = int(checkpoint.config.get("num_attention_heads", spec.hidden_size // spec.head_dim))
    return {
        "model": {
            # its decoder-only types run alike; "llama" names that pipeline in every version
            "type": "llama",
            "vocab_size": spec.vocab_size,
            "context_length": spec.capacity,
            "bos_token_id": bos[0] if bos else (eos[0] if eos else 0),
            "eos_token_id": eos,
            "pad_token_id": pad[0] if pad else (eos[0] if eos else 0),
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": STANDARD_GRAPH,
                "head_size": spec.head_dim,
                "hidden_size": spec.hidden_size,
                "num_attention_heads": heads,
                "num_hidden_layers": spec.layers,
                "num_key_value_heads": spec.kv_heads,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "position_ids": "position_ids",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {
            "do_sample": False,
            "max_length": spec.capacity,
            "min_length": 0,
            "num_beams": 1,
            "num_return_sequences": 1,
            "past_present_share_buffer": False,
            "repetition_penalty": 1.0,
            "temperature": 1.0,
            "top_k": 1,
            "top_p": 1.0,
        },
    }


def token_ids(value: Any) -> list[int]:
    """Token ids of a configuration, where one, many or none may be given."""
    if value is None:
        return []
    return [int(token) for token in value] if isinstance(value, (list, tuple)) else [int(value)]


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
