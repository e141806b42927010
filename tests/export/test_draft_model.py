"""Draft models: the same tokens, padded vocabularies, shorter contexts, and the text of plain decoding."""

from __future__ import annotations

import io
import json
import shutil

import pytest

from specedge.export.checkpoint import Tokenizer
from specedge.export.draft_model import check_same_tokens
from specedge.export.graphs import make_plan
from specedge.export.options import ExportOptions
from specedge.export.pipeline import export
from specedge.export.sources import resolve
from specedge.runtime.bundle import open_bundle
from specedge.runtime.engine import Engine
from specedge.runtime.errors import CheckpointError, SpecEdgeError, UsageError
from specedge.runtime.show import bundle_table, show
from specedge.tests.tiny import TinyLlama, tiny_tokenizer, write_tiny_checkpoint, write_tiny_gguf

TARGET = TinyLlama(layers=4)
WAYS = (
    {},
    {"draft_length": 1},
    {"draft_length": 8},
    {"temperature": 0.9, "seed": 3},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, "no_repeat_ngram": 4},
)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A target; draft models of the same tokens, some padded to another width, and one of others."""
    home = tmp_path_factory.mktemp("models")
    write_tiny_checkpoint(home / "target", TARGET)
    write_tiny_checkpoint(home / "same", TinyLlama(layers=4))
    write_tiny_checkpoint(home / "short", TinyLlama(layers=1, seed=3, context=64))
    for name, vocab in (("wide", 384), ("narrow", 280)):
        write_tiny_checkpoint(home / name, TinyLlama(layers=1, vocab=vocab, seed=3))
        shutil.copy(home / "target" / "tokenizer.json", home / name / "tokenizer.json")
    write_tiny_checkpoint(home / "other", TinyLlama(layers=1))
    tokenizer = (home / "other" / "tokenizer.json").read_text(encoding="utf-8")
    swapped = json.loads(tokenizer)
    vocab = swapped["model"]["vocab"]
    texts = {number: text for text, number in vocab.items()}
    vocab[texts[30]], vocab[texts[40]] = 40, 30
    (home / "other" / "tokenizer.json").write_text(json.dumps(swapped), encoding="utf-8")
    write_tiny_gguf(home / "small.gguf", TinyLlama(layers=1, seed=3))
    return home


def options_of(home):
    drafts = [f"{home / name}:fp32" for name in ("same", "short", "wide", "narrow", "small.gguf")]
    drafts += [f"{home / 'same'}:int4", "layers-3", "layers-2:fp32", "layers-1:int4"]
    return ExportOptions(drafts=tuple(drafts), capacity=256)


@pytest.fixture(scope="module")
def bundle(home):
    export(str(home / "target"), home / "bundle", options_of(home))
    return home / "bundle"


def test_the_size_is_known_beforehand(home, bundle):
    drafts = open_bundle(bundle).manifest.drafts
    estimate = make_plan(resolve(str(home / "target")), options_of(home), torch=False).estimate
    assert estimate.drafts == pytest.approx(
        sum(spec.weight_bytes for spec in drafts.values()), rel=0.2
    )  # pages of 4096 bytes count in files so small


def test_what_the_manifest_says(bundle):
    manifest = open_bundle(bundle).manifest
    drafts = manifest.drafts
    assert list(drafts) == [
        "same:fp32", "short:fp32", "wide:fp32", "narrow:fp32", "small.gguf:fp32", "same:int4",
        "layers-3", "layers-2:fp32", "layers-1:int4",
    ]  # fmt: skip
    assert [spec.vocab_size for spec in drafts.values()][:4] == [320, 320, 384, 280]
    assert [spec.capacity for spec in drafts.values()][:3] == [256, 64, 256]
    for name, spec in drafts.items():
        assert spec.shares_cache == name.startswith("layers-")
        assert len(spec.cache_layers) == (spec.layers if spec.shares_cache else 0)
        assert manifest.checks["drafts"][name]["status"] == "passed"
    assert drafts["layers-3"].precision == "int8-block"
    assert drafts["layers-3"].layers == 3


@pytest.mark.parametrize("options", WAYS, ids=["greedy", "one", "eight", "exact", "penalties"])
def test_the_text_is_plain_decodings(bundle, options):
    with Engine(bundle, threads=1, verify=False) as engine:
        for prompt in ("the quick brown fox", "def reverse(text):", [7] * 30):
            *_, plain = engine.generate(prompt, method="none", max_tokens=48, **options)
            for method in engine.methods:
                engine.reset()
                *_, finish = engine.generate(prompt, method=method, max_tokens=48, **options)
                assert finish.ids == plain.ids, method
                assert finish.stats.notes == (), method
                if method == "draft:same:fp32":
                    assert finish.stats.alpha == 1
                assert (finish.stats.proposed > 0) == (method != "none"), method


def test_rejection_sampling_takes_drafts_of_every_width(bundle):
    with Engine(bundle, threads=1, verify=False) as engine:
        for method in engine.methods:
            *_, finish = engine.generate(
                "the dog", method=method, max_tokens=40, temperature=1.0, accept="rejection", seed=1
            )
            assert finish.stats.notes == (), method
            assert len(finish.ids) <= 40


def test_a_token_that_a_narrow_draft_lacks(bundle):
    """It runs another in its place: the guess is worse, the reply the same, and drafting goes on."""
    with Engine(bundle, threads=1, verify=False) as engine:
        prompt = [300, 310, 319, 5, 290]
        *_, plain = engine.generate(prompt, method="none", max_tokens=40)
        *_, finish = engine.generate(prompt, method="draft:narrow:fp32", max_tokens=40)
        assert finish.ids == plain.ids
        assert finish.stats.notes == ()
        assert finish.stats.proposed > 0


def test_a_draft_stops_where_its_context_ends(bundle):
    with Engine(bundle, threads=1, verify=False, capacity=200) as engine:
        *_, plain = engine.generate([9] * 40, method="none", max_tokens=120)
        *_, finish = engine.generate([9] * 40, method="draft:short:fp32", max_tokens=120)
        assert finish.ids == plain.ids
        assert finish.stats.notes == ()
        assert finish.stats.proposed > 0
        *_, beyond = engine.generate([9] * 90, method="draft:short:fp32", max_tokens=20)
        assert beyond.stats.proposed == 0
        assert beyond.stats.notes == ()


def test_methods_and_tables_name_the_drafts(bundle):
    with Engine(bundle, threads=1, verify=False) as engine:
        assert "draft:layers-3" in engine.methods
        assert "draft:narrow:fp32" in engine.methods
    out = io.StringIO()
    show(bundle_table(open_bundle(bundle)), out)
    text = out.getvalue()
    kept = open_bundle(bundle).manifest.drafts["layers-2:fp32"].cache_layers
    assert f"2 of the target's layers {kept[0]}{'-' if kept[1] == kept[0] + 1 else ' '}{kept[1]}, " in text
    assert "in the target's cache" in text
    assert "280 tokens" in text


@pytest.mark.parametrize(
    ("draft", "error", "message"),
    [
        (
            "other",
            UsageError,
            r"draft other: token 30 is '.+' where the target has '.+'; a draft needs the target's tok",
        ),
        ("nothing", CheckpointError, "does not exist"),
        ("layers-4", UsageError, "draft layers-4: target has 4 layers, so give fewer"),
    ],
)
def test_a_draft_that_cannot_be_leaves_no_bundle(home, tmp_path, draft, error, message):
    name = draft if draft.startswith("layers-") else str(home / draft)
    with pytest.raises(error, match=message) as caught:
        export(str(home / "target"), tmp_path / "bundle", ExportOptions(drafts=(name,), verify=False))
    assert isinstance(caught.value, SpecEdgeError)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_special_token_that_differs_is_named():
    ours = tiny_tokenizer()
    theirs = json.loads(ours.to_str())
    theirs["added_tokens"][2]["content"] = "<|end|>"
    vocab = theirs["model"]["vocab"]
    vocab["<|end|>"] = vocab.pop("<|im_end|>")
    with pytest.raises(UsageError, match=r"draft d: token 2 is '<\|end\|>' where the target has '<\|im_end\|>'"):
        check_same_tokens(Tokenizer(ours.to_str(), {}), Tokenizer(json.dumps(theirs), {}), "d")


def test_tokens_that_only_one_tokenizer_has_do_not_matter():
    ours, theirs = tiny_tokenizer(), tiny_tokenizer()
    theirs.add_tokens(["<tool>", "<more>"])
    for one, other in ((ours, theirs), (theirs, ours)):
        check_same_tokens(Tokenizer(one.to_str(), {}), Tokenizer(other.to_str(), {}), "d")
