"""A folder in Hugging Face layout as a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from specedge.export.checkpoint import Checkpoint, Tokenizer
from specedge.export.hf_config import end_ids, normalise_config
from specedge.export.reading import brief, parse_json, read_json, read_text, spdx
from specedge.export.safetensors_file import SafetensorsFile, SafetensorsTensors
from specedge.runtime.errors import CheckpointError, UnsupportedModelError

__all__ = ["read_folder"]

_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")


def read_folder(path: Path, *, name: str | None = None, source: str | None = None) -> Checkpoint:
    """Read a folder with config.json, safetensors and tokenizer.json.

    Args:
        path: The folder.
        name: Short name of the model; the folder's by default.
        source: For the manifest; "folder:NAME" by default.

    Raises:
        CheckpointError: A file is missing, damaged, or contradicts another.
        UnsupportedModelError: The weights are in a form that cannot be read.
    """
    name = name or path.resolve().name
    config = _config(path)
    tensors = _tensors(path)
    generation = _optional(path / "generation_config.json")
    generation["eos_token_id"] = end_ids(generation, config)
    return Checkpoint(
        name=name,
        source=source or f"folder:{name}",
        config=config,
        generation=generation,
        tensors=tensors,
        tokenizer=_tokenizer(path),
        path=path,
        license=_license(path / "README.md"),
    )


def _config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        if (path / "adapter_config.json").is_file():
            raise UnsupportedModelError(f"{path} is an adapter without its model; merge it into the model first")
        raise CheckpointError(f"{path} holds no config.json; give a folder in Hugging Face layout, or a GGUF file")
    config = normalise_config(read_json(file), file)
    if isinstance(config.get("quantization_config"), dict):
        method = config["quantization_config"].get("quant_method")
        raise UnsupportedModelError(
            f"{path} is quantised already ({brief(method)}); give the original, in BF16, F16 or F32"
        )
    return config


def _tensors(path: Path) -> SafetensorsTensors:
    """The weights: by the index, or of the one file there is."""
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if index.is_file():
        return SafetensorsTensors(_sharded(path, index), path)
    found = [single] if single.is_file() else sorted(path.glob("*.safetensors"))
    if len(found) == 1:
        file = SafetensorsFile(found[0])
        return SafetensorsTensors(dict.fromkeys(file.entries, file), path)
    if found:
        raise CheckpointError(f"{path} holds {len(found)} safetensors files but no {index.name}; download it")
    pickles = [file.name for pattern in _PICKLES for file in sorted(path.glob(pattern))]
    if pickles:
        raise UnsupportedModelError(
            f"{path} holds only pickled weights ({pickles[0]}), which can run code when they are read; if you trust "
            f"them, convert them with transformers: AutoModelForCausalLM.from_pretrained({str(path)!r})"
            ".save_pretrained('new folder')"
        )
    raise CheckpointError(f"{path} holds no weights (model.safetensors); is the download complete?")


def _sharded(path: Path, index: Path) -> dict[str, SafetensorsFile]:
    """The file of each tensor that the index lists."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{index} has no weight_map; download it again")
    files: dict[str, SafetensorsFile] = {}
    for name, shard in places.items():
        # A plain name under POSIX and Windows rules: nothing outside the folder is opened.
        if not isinstance(shard, str) or not re.fullmatch(r"[^/\\:\x00-\x1f]+\.safetensors", shard):
            raise CheckpointError(f"{index} places tensor {brief(name)} in {brief(shard)}, which is no file name")
        if shard not in files:
            files[shard] = SafetensorsFile(path / shard)
        if name not in files[shard].entries:
            raise CheckpointError(f"{index} places tensor {brief(name)} in {shard}, which does not hold it")
    return {name: files[shard] for name, shard in places.items()}


def _tokenizer(path: Path) -> Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(
            f"{path} holds no tokenizer.json; write one with transformers: "
            f"AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({str(path)!r})"
        )
    text = read_text(file)
    if not isinstance(parse_json(text, str(file)).get("model"), dict):
        raise CheckpointError(f"{file} describes no tokenizer: it has no model")
    config = _optional(path / "tokenizer_config.json")
    inline = config.pop("chat_template", None)
    for key, value in _optional(path / "special_tokens_map.json").items():
        config.setdefault(key, value)
    return Tokenizer(text, config, _chat_template(path, inline))


def _chat_template(path: Path, inline: object) -> str | None:
    """The template: a file of its own goes before the one in tokenizer_config.json, as in transformers."""
    if (path / "chat_template.jinja").is_file():
        return read_text(path / "chat_template.jinja")
    template = _optional(path / "chat_template.json").get("chat_template", inline)
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{path}: the chat template is {type(template).__name__} where text belongs")
    return template


def _optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _license(readme: Path) -> str | None:
    """The license that the head of a model card names."""
    if not readme.is_file():
        return None
    head = re.match(r"---\s*\n(.*?)\n---", read_text(readme), re.DOTALL)
    found = re.search(r"^license:\s*[\"']?([\w.+-]+)", head[1], re.MULTILINE) if head else None
    return spdx(found[1]) if found else None
