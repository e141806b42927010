"""The promise, on the real model: whatever drafts, greedy ids are plain decoding's, and those are PyTorch's."""

from __future__ import annotations

import random

import numpy as np
import pytest

from specedge.runtime.costs import Costs
from specedge.runtime.director import Director
from specedge.runtime.drafters.guard import GuardedDrafter
from specedge.runtime.drafters.tree import Tree
from specedge.runtime.engine import Engine
from specedge.runtime.loop import generate
from specedge.runtime.options import Options
from specedge.runtime.sampler import NumpySampler
from specedge.runtime.stopping import StopRule
from specedge.runtime.verifiers import Greedy
from specedge.tests.fakes import Anything, BrokenDrafter, random_tree

pytestmark = pytest.mark.model

PROMPTS = 40
TOKENS = 128
METHODS = ("none", "auto", "draft:self-int8", "medusa", "ngram")
TIE = 1e-3
"""Two logits nearer than this may change places between two correct computations."""


@pytest.fixture(scope="module")
def engine(model_bundle):
    with Engine(model_bundle, verify=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def prompts(engine, dev_prompts):
    """40 prompts that leave room for an answer, spread over the categories, as token ids."""
    by_category: dict[str, list[dict]] = {}
    for prompt in dev_prompts:
        by_category.setdefault(prompt["category"], []).append(prompt)
    spread = [prompts[turn] for turn in range(8) for prompts in by_category.values() if turn < len(prompts)]
    chats = (engine.text.chat_prompt([{"role": "user", "content": prompt["turns"][0]}]) for prompt in spread)
    fitting = [ids for ids in chats if len(ids) + TOKENS <= engine.capacity][:PROMPTS]
    assert len(fitting) == PROMPTS
    return fitting


@pytest.fixture(scope="module")
def answers(engine, prompts):
    """Each method's ids for every prompt; only the first of a prompt runs it, the others find it in the cache."""
    found: dict[str, list[tuple[int, ...]]] = {method: [] for method in METHODS}
    for ids in prompts:
        for method in METHODS:
            *_, finish = engine.generate(ids, method=method, max_tokens=TOKENS)
            assert not any("failed" in note for note in finish.stats.notes)
            assert method == METHODS[0] or finish.stats.cached_tokens == len(ids) - 1
            found[method].append(finish.ids)
    return found


@pytest.fixture(scope="module")
def plain(prompts, answers):
    """Plain decoding's answers: (prompt ids, answer ids)."""
    return list(zip(prompts, answers["none"], strict=True))


@pytest.mark.parametrize("method", METHODS[1:])
def test_every_method_gives_plain_decodings_ids(answers, method):
    pairs = zip(answers[method], answers["none"], strict=True)
    assert [index for index, (given, expected) in enumerate(pairs) if given != expected] == []


@pytest.mark.parametrize("seed", range(3))
def test_every_tree_of_heads_gives_plain_decodings_ids(engine, plain, seed, monkeypatch):
    """Trees of up to 31 nodes, of any shape."""
    for _ in engine.generate(plain[0][0], method="medusa", max_tokens=2):
        pass
    drafter = engine.drafting.opened("medusa")
    rng = random.Random(seed)
    for ids, expected in plain[seed::8]:
        shape = random_tree(rng, rng.randrange(2, 31), 6)
        paths: list[tuple[int, ...]] = []
        for rank, parent in zip(shape.tokens, shape.parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), rank))
        tree = Tree.of([path for path in paths if len(path) <= drafter.model.spec.heads])
        monkeypatch.setattr(drafter, "_tree", tree)
        *_, finish = engine.generate(ids, method="medusa", draft_length=31, max_tokens=48)
        assert finish.ids == expected[:48]
        assert finish.stats.proposed > 0


@pytest.mark.parametrize("seed", range(2))
def test_switching_every_round_changes_no_token(engine, plain, seed):
    """Any drafter, any length, from round to round, and drafters that fail among them."""
    rng = random.Random(seed)
    drafters = {method: engine.drafting.drafter(method) for method in engine.methods if method != "auto"}
    drafters |= {f"broken-{way}": BrokenDrafter(way, rng.randint(0, 4)) for way in BrokenDrafter.WAYS}
    used = set()
    for ids, expected in plain[seed::10]:
        policy = Anything(list(drafters), rng.random())
        director = Director({name: GuardedDrafter(each) for name, each in drafters.items()}, policy, Costs({1: 1}, {}))
        tokens, stop = list(ids), StopRule(engine.manifest.eos_token_ids, 64, lambda token: ("", False))
        engine.reset()
        for item in generate(engine.target, director, Greedy(), NumpySampler(Options(), 0, 0), tokens, stop):
            used.add(item.draft.by)
        engine.reset()
        assert tuple(tokens[len(ids) :]) == expected[:64]
    assert {"draft:self-int4", "draft:self-int8", "medusa", "medusa+ngram", "ngram"} <= used


def test_plain_decoding_gives_pytorchs_ids(plain, record_property):
    """One pass of PyTorch over each answer: at every place its likeliest token has to be the one that stands there."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM

    from specedge.export.sources import resolve

    path = resolve("smollm2-135m").path
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    ties = wrong = places = 0
    for ids, expected in plain:
        with torch.inference_mode():
            logits = model(torch.tensor([[*ids, *expected[:-1]]]), use_cache=False).logits[0, len(ids) - 1 :].numpy()
        places += len(expected)
        for row, token in zip(logits, expected, strict=True):
            if row.argmax() != token:
                ties += 1
                wrong += row.max() - row[token] >= TIE
    record_property("ties", ties)
    print(f"{places} places, {ties} ties within {TIE}, {wrong} differences")
    assert places > 20 * PROMPTS
    assert wrong == 0
    assert ties <= places // 500


def test_pytorchs_own_generate_gives_the_same_ids(plain):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM

    from specedge.export.sources import resolve

    path = resolve("smollm2-135m").path
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    for ids, expected in sorted(plain, key=lambda item: len(item[0]))[:4]:
        with torch.inference_mode():
            output = model.generate(
                torch.tensor([ids]), do_sample=False, max_new_tokens=TOKENS, attention_mask=torch.ones(1, len(ids))
            )[0, len(ids) :]
        assert tuple(output.tolist()) == expected


def test_a_seed_gives_the_same_text_under_every_method(engine, plain):
    for ids, _ in plain[:3]:
        texts = set()
        for method in ("none", "draft:self-int8", "medusa", "ngram"):
            engine.reset()
            *_, finish = engine.generate(
                ids, method=method, max_tokens=64, temperature=0.8, top_k=40, repetition_penalty=1.1, seed=11
            )
            texts.add(finish.ids)
        assert len(texts) == 1


def test_cached_turns_give_what_a_fresh_prefill_gives(engine):
    """A chat's second turn runs only new tokens; its reply is that of the whole conversation run anew."""
    chat = engine.chat()
    engine.reset()
    for _ in chat.send("Name three colours.", max_tokens=40):
        pass
    *_, second = chat.send("And three animals?", max_tokens=40)
    assert second.stats.cached_tokens > 0.6 * len(second.prompt_ids)
    pool = engine.target.pool[:, :, :, : len(second.prompt_ids)].copy()
    engine.reset()
    *_, again = engine.generate(second.prompt_ids, max_tokens=40)
    assert again.ids == second.ids
    assert np.abs(engine.target.pool[:, :, :, : len(second.prompt_ids)] - pool).max() < 2e-3
