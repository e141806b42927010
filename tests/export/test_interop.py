"""Other tools open a bundle: the files they ask for, and (second environment) the tools themselves."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from specedge.export.checkpoint import Checkpoint, Tokenizer
from specedge.export.interop import config_json, genai_config, generation_config, tokenizer_config, write_interop
from specedge.runtime.bundle import GraphSpec
from specedge.tests.export.bundles import TEXTS

SPEC = GraphSpec(
    file="onnx/target.onnx",
    flavour="gqa",
    precision="fp32",
    layers=2,
    kv_heads=2,
    head_dim=128,
    hidden_size=64,
    vocab_size=320,
    capacity=512,
    cache_dtype="float32",
    weight_bytes=1,
)


def checkpoint(**given) -> Checkpoint:
    values = {
        "name": "tiny",
        "source": "folder:tiny",
        "config": {"model_type": "llama", "num_attention_heads": 4, "eos_token_id": 2, "dtype": "bfloat16"},
        "tensors": {},
        "tokenizer": Tokenizer("{}", {"tokenizer_class": "TokenizersBackend", "eos_token": "</s>"}, "{{ messages }}"),
        "path": Path("tiny"),
        **given,
    }
    return Checkpoint(**values)


class TestTokenizerConfig:
    def test_names_a_class_that_both_transformers_know(self):
        config = tokenizer_config(checkpoint().tokenizer)
        assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert config["eos_token"] == "</s>"

    def test_has_the_template_inline_where_there_is_one(self):
        assert tokenizer_config(checkpoint().tokenizer)["chat_template"] == "{{ messages }}"
        assert "chat_template" not in tokenizer_config(Tokenizer("{}", {}))

    def test_turns_the_list_of_transformers_5_into_the_key_of_4(self):
        config = tokenizer_config(Tokenizer("{}", {"extra_special_tokens": ["<a>"]}))
        assert config["additional_special_tokens"] == ["<a>"]
        assert "extra_special_tokens" not in config
        named = tokenizer_config(Tokenizer("{}", {"extra_special_tokens": {"image_token": "<i>"}}))
        assert named["extra_special_tokens"] == {"image_token": "<i>"}

    def test_drops_what_would_run_code_or_look_for_other_files(self):
        config = tokenizer_config(Tokenizer("{}", {"auto_map": {"AutoTokenizer": "x.Y"}, "vocab_file": "/etc/passwd"}))
        assert not {"auto_map", "vocab_file"} & set(config)


class TestConfig:
    def test_tells_transformers_js_where_the_weights_are(self):
        hints = config_json(checkpoint(), SPEC)["transformers.js_config"]
        assert hints == {"dtype": "fp32", "use_external_data_format": {"model.onnx": 1}}
        half = config_json(checkpoint(), replace(SPEC, cache_dtype="float16"))
        assert half["transformers.js_config"]["kv_cache_dtype"] == "float16"

    def test_names_the_type_the_graph_has_not_the_checkpoints(self):
        config = config_json(checkpoint(), SPEC)
        assert config["torch_dtype"] == "float32"
        assert "dtype" not in config

    def test_drops_code(self):
        config = {"model_type": "llama", "auto_map": {"AutoModel": "x.Y"}}
        assert "auto_map" not in config_json(checkpoint(config=config), SPEC)

    def test_generation_takes_missing_ids_from_the_configuration(self):
        assert generation_config(checkpoint())["eos_token_id"] == 2
        assert generation_config(checkpoint(generation={"eos_token_id": [2, 7]}))["eos_token_id"] == [2, 7]


class TestGenai:
    def test_describes_the_standard_graph(self):
        model = genai_config(checkpoint(generation={"eos_token_id": [2, 7]}), SPEC)["model"]
        assert (model["type"], model["vocab_size"], model["context_length"]) == ("llama", 320, 512)
        assert (model["eos_token_id"], model["pad_token_id"]) == ([2, 7], 2)
        decoder = model["decoder"]
        assert decoder["filename"] == "onnx/model.onnx"
        # not hidden_size / heads, which is 16 here
        assert (decoder["head_size"], decoder["num_attention_heads"], decoder["num_key_value_heads"]) == (128, 4, 2)

    def test_names_the_graphs_own_inputs_and_outputs(self, tiny_bundle):
        onnx = pytest.importorskip("onnx")
        decoder = json.loads((tiny_bundle / "genai_config.json").read_text())["model"]["decoder"]
        graph = onnx.load(tiny_bundle / decoder["filename"], load_external_data=False).graph
        layers = range(decoder["num_hidden_layers"])

        def expand(names):
            return {name % layer if "%" in name else name for name in names.values() for layer in layers}

        assert {item.name for item in graph.input} == expand(decoder["inputs"])
        assert {item.name for item in graph.output} == expand(decoder["outputs"])


def test_every_file_is_written_and_a_base_model_has_no_template(tmp_path):
    write_interop(tmp_path, checkpoint(), SPEC)
    written = {path.name for path in tmp_path.iterdir()}
    assert written == TEXTS
    base = tmp_path / "base"
    base.mkdir()
    write_interop(base, checkpoint(tokenizer=Tokenizer("{}", {})), SPEC)
    assert not (base / "chat_template.jinja").exists()


def test_transformers_of_this_environment_reads_the_tokenizer(tiny_bundle):
    """4.57 in the second environment, the newest in the first."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer as Plain

    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tiny_bundle))
    text = "def reverse(text): return text[::-1]<|im_end|>\n"
    assert tokenizer(text)["input_ids"] == Plain.from_file(str(tiny_bundle / "tokenizer.json")).encode(text).ids
    assert set(tokenizer(text)) == {"input_ids", "attention_mask"}
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("assistant\n")
    assert transformers.AutoConfig.from_pretrained(str(tiny_bundle)).rms_norm_eps == 1e-5


PROMPTS = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "def reverse(text):\n",
)
TOKENS = 24

GREEDY = """
import json, sys
from pathlib import Path
from specedge.runtime.bundle import open_bundle
from specedge.runtime.graph import Decoder
bundle, prompts, tokens = open_bundle(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
target, replies = bundle.manifest.target, []
for prompt in prompts:
    decoder, reply, pending = Decoder(bundle.path(target.file), target, capacity=128), [], prompt
    while len(reply) < tokens and not set(reply[-1:]) & set(bundle.manifest.eos_token_ids):
        reply.append(int(decoder.forward(pending).logits[0].argmax()))
        pending = reply[-1:]
    replies.append(reply)
print(json.dumps(replies))
"""


def encoded(bundle: Path) -> list[list[int]]:
    from tokenizers import Tokenizer as Plain

    tokenizer = Plain.from_file(str(bundle / "tokenizer.json"))
    return [tokenizer.encode(prompt).ids for prompt in PROMPTS]


def greedy(bundle: Path) -> list[list[int]]:
    """Our own decoder's replies, from a process of its own: its thread pool is not for other tools' sessions."""
    command = [sys.executable, "-c", GREEDY, str(bundle), json.dumps(encoded(bundle)), str(TOKENS)]
    done = subprocess.run(command, check=True, cwd=bundle, capture_output=True, text=True)
    replies = json.loads(done.stdout)
    assert all(replies)
    return replies


LOADERS = """
import json, sys
import numpy as np
folder, prompts, tokens = sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])

def optimum():
    import torch
    from optimum.onnxruntime import ORTModelForCausalLM
    model = ORTModelForCausalLM.from_pretrained(folder)
    for prompt in prompts:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        reply = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
        yield reply[0, len(prompt):].tolist()

def batch():
    import torch
    from optimum.onnxruntime import ORTModelForCausalLM
    model = ORTModelForCausalLM.from_pretrained(folder)
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    replies = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
    yield from replies[:, longest:].tolist()

def genai():
    import onnxruntime_genai as og
    model = og.Model(folder)
    for prompt in prompts:
        parameters = og.GeneratorParams(model)
        parameters.set_search_options(max_length=len(prompt) + tokens, do_sample=False)
        generator = og.Generator(model, parameters)
        generator.append_tokens(np.array(prompt, np.int32))
        reply = []
        while not generator.is_done():
            generator.generate_next_token()
            reply.append(int(generator.get_next_tokens()[0]))
        yield reply

print(json.dumps(list(globals()[sys.argv[1]]())))
"""


def replies_of(loader: str, bundle: Path) -> list[list[int]]:
    command = [sys.executable, "-c", LOADERS, loader, str(bundle), json.dumps(encoded(bundle)), str(TOKENS)]
    done = subprocess.run(command, check=False, cwd=bundle, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; the second environment has it")


def check_loader(loader: str, bundle: Path) -> None:
    found, wanted = replies_of(loader, bundle), greedy(bundle)
    for ours, theirs in zip(wanted, found, strict=True):
        assert theirs[: len(ours)] == ours  # a batch is padded after the shorter reply's end


@pytest.mark.optimum
@pytest.mark.parametrize("loader", ["optimum", "batch", "genai"])
class TestLoaders:
    def test_the_tiny_model(self, loader, tiny_bundle):
        need("onnxruntime_genai" if loader == "genai" else "optimum")
        check_loader(loader, tiny_bundle)

    @pytest.mark.model
    def test_the_real_model(self, loader, model_bundle):
        need("onnxruntime_genai" if loader == "genai" else "optimum")
        check_loader(loader, model_bundle)


@pytest.mark.optimum
def test_genai_encodes_and_templates_alike(tiny_bundle):
    need("onnxruntime_genai")
    code = (
        "import json, sys, onnxruntime_genai as og\n"
        "tokenizer = og.Tokenizer(og.Model(sys.argv[1]))\n"
        "ids = [[int(token) for token in tokenizer.encode(text)] for text in json.loads(sys.argv[2])]\n"
        "chat = json.dumps([{'role': 'user', 'content': 'hi'}])\n"
        "print(json.dumps([ids, tokenizer.apply_chat_template(chat, add_generation_prompt=True)]))\n"
    )
    command = [sys.executable, "-c", code, str(tiny_bundle), json.dumps(PROMPTS)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    ids, chat = json.loads(done.stdout)
    assert ids == encoded(tiny_bundle)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
