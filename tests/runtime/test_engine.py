"""The engine on a small real bundle: methods agree, replies close anywhere, caches are reused, errors are clear."""

from __future__ import annotations

import gc
import json
import shutil
import threading

import numpy as np
import pytest

from specedge.runtime.bundle import MANIFEST
from specedge.runtime.engine import Engine
from specedge.runtime.errors import BundleError, PromptError, UsageError
from specedge.runtime.events import Finish, Notice, Token
from specedge.runtime.options import Options
from specedge.runtime.overhead import loop_cost

PROMPT = "def reverse(text): return"
# A random model says one token over and over where nothing keeps it from that.
FREE = Options(max_tokens=48, repetition_penalty=1.1, no_repeat_ngram=2)


@pytest.fixture(scope="module")
def engine(tiny_bundle):
    with Engine(tiny_bundle, threads=1) as engine:
        yield engine


@pytest.fixture(autouse=True)
def fresh(request):
    if "engine" in request.fixturenames:
        request.getfixturevalue("engine").reset()


def collect(generation):
    events = list(generation)
    assert isinstance(events[-1], Finish)
    assert generation.finish is events[-1]
    tokens = [event for event in events[:-1] if not isinstance(event, Notice)]
    assert all(isinstance(event, Token) for event in tokens)
    return events[:-1], events[-1]


def consistent(engine):
    """The cache holds every committed token but the newest."""
    session = engine._session
    return session.target.length == max(len(session.tokens) - 1, 0)


def test_the_methods_of_a_bundle(engine):
    assert engine.methods == ("none", "draft:self-int4", "draft:self-int8", "ngram", "auto")
    assert engine.default_method == "auto"
    assert engine.resolve_method("draft") == "draft:self-int4"
    with pytest.raises(UsageError, match=r"method 'medusa' is not in .*choose one of none, draft:self-int4"):
        engine.generate(PROMPT, method="medusa")


@pytest.mark.parametrize("policy", ["fixed", "speed", "thresholds", "steps"])
@pytest.mark.parametrize("method", ["draft", "ngram", "none"])
def test_every_policy_gives_the_same_reply_and_says_what_it_did(engine, policy, method):
    plain = collect(engine.generate(PROMPT, FREE, method="none"))[1]
    finish = collect(engine.generate(PROMPT, FREE, method=method, policy=policy, measure_baseline=True))[1]
    stats = finish.stats
    assert finish.ids == plain.ids
    assert sum(stats.rounds.values()) == stats.passes == stats.corrected + stats.bonus
    assert stats.accepted + stats.corrected + stats.bonus == stats.decoded
    assert stats.discarded == stats.proposed - stats.accepted >= 0
    assert sum(stood for _, stood in stats.depths) == stats.accepted
    assert sum(tested for tested, _ in stats.depths) == stats.evaluated
    assert stats.step_ms == tuple(sorted(stats.step_ms))
    assert (stats.speedup is not None) == (stats.baseline_ms is not None) == (stats.passes >= 12)
    assert (stats.forecast is not None) == (policy == "speed" and method != "none")


@pytest.mark.parametrize(
    "options",
    [Options(max_tokens=48), FREE, Options(max_tokens=48, temperature=0.9, seed=5)],
    ids=["greedy", "penalties", "sampled"],
)
@pytest.mark.parametrize("draft_length", [1, 3, 8])
def test_every_method_gives_the_same_reply(engine, options, draft_length):
    finishes = {}
    for method in engine.methods:
        engine.reset()
        tokens, finish = collect(engine.generate(PROMPT, options, method=method, draft_length=draft_length))
        assert tuple(token.id for token in tokens) == finish.ids
        assert "".join(token.text for token in tokens) == finish.text
        assert consistent(engine)
        assert finish.stats.method == method
        assert finish.stats.notes == ()
        finishes[method] = finish
    assert len({finish.ids for finish in finishes.values()}) == 1
    assert finishes["draft:self-int8"].stats.accepted > 0


def test_statistics_add_up(engine):
    tokens, finish = collect(engine.generate(PROMPT, FREE, method="draft:self-int8"))
    stats = finish.stats
    assert stats.tokens == len(tokens) == len(finish.ids)
    assert stats.accepted <= stats.evaluated <= stats.proposed
    assert stats.decoded == stats.passes + stats.accepted
    assert stats.tau == stats.decoded / stats.passes
    assert stats.alpha == stats.accepted / stats.evaluated
    assert sum(token.origin == "draft" for token in tokens) == stats.accepted
    assert stats.prompt_tokens == len(finish.prompt_ids)
    assert stats.decode_ms == pytest.approx(stats.draft_ms + stats.verify_ms + stats.host_ms)
    assert 0 < stats.prefill_ms < stats.ttft_ms
    assert stats.peak_memory_bytes > 10 << 20


@pytest.mark.parametrize("method", ["none", "draft:self-int8", "ngram"])
def test_a_reply_closed_after_any_token_is_the_start_of_the_whole_one(engine, method):
    whole = collect(engine.generate(PROMPT, FREE, method=method, draft_length=6))[1]
    for taken in (0, 1, 2, 3, 5, 8, 13):
        generation = engine.generate(PROMPT, FREE, method=method, draft_length=6)
        ids = [next(generation).id for _ in range(taken)]
        generation.close()
        finish = generation.finish
        assert (finish.reason, list(finish.ids)) == ("cancelled", ids)
        assert finish.ids == whole.ids[:taken]
        assert finish.stats.tokens == taken
        assert finish.stats.accepted <= finish.stats.evaluated
        assert consistent(engine)
        assert next(generation, None) is None
        resumed = collect(engine.generate([*finish.prompt_ids, *ids], FREE, max_tokens=48 - taken, method=method))[1]
        assert finish.ids + resumed.ids == whole.ids
        assert resumed.stats.cached_tokens >= len(finish.prompt_ids) + taken - 1


def test_a_second_reply_ends_the_first(engine):
    first = engine.generate(PROMPT, FREE)
    next(first)
    second = engine.generate("the quick brown fox", FREE)
    assert first.finish.reason == "cancelled"
    collect(second)
    assert len(first.finish.ids) == 1


def test_an_interrupt_keeps_what_was_said(engine, monkeypatch):
    generation = engine.generate(PROMPT, FREE, method="none")
    seen = [next(generation).id for _ in range(4)]
    target = engine._session.target
    with monkeypatch.context() as patch:
        patch.setattr(target, "commit", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            list(generation)
    assert generation.finish.ids == tuple(seen)
    assert consistent(engine)
    whole = collect(engine.generate(PROMPT, FREE, method="none"))[1]
    assert whole.ids[:4] == tuple(seen)


def test_only_new_tokens_are_run(engine):
    first = collect(engine.generate(PROMPT, FREE))[1]
    longer = [*first.prompt_ids, *first.ids[:20], 5, 6, 7]
    again = collect(engine.generate(longer, FREE))[1]
    assert again.stats.cached_tokens >= len(first.prompt_ids) + 20 - 1
    engine.reset()
    anew = collect(engine.generate(longer, FREE))[1]
    assert anew.stats.cached_tokens == 0
    assert anew.ids == again.ids


def test_methods_may_change_between_replies(engine):
    expected = collect(engine.generate(PROMPT, FREE, method="none"))[1]
    prompt = list(expected.prompt_ids)
    for taken, method in ((5, "draft:self-int8"), (11, "ngram"), (7, "draft:self-int4"), (9, "draft:self-int8")):
        piece = collect(engine.generate(prompt, FREE, max_tokens=taken, method=method))[1]
        prompt += piece.ids
    assert tuple(prompt[len(expected.prompt_ids) :]) == expected.ids[:32]


@pytest.mark.parametrize("weight", ["model.norm.weight", "model.layers.0.input_layernorm.weight"])
def test_a_draft_with_nan_weights_leaves_the_text_alone(engine, tiny_bundle, tmp_path, weight):
    """With the second weight its keys and values are NaN too, and it writes them into the target's cache."""
    onnx = pytest.importorskip("onnx")
    folder = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, folder)
    draft = folder / "drafts/self-int8/draft.onnx"
    graph = onnx.load(draft, load_external_data=False).graph
    place = next({e.key: e.value for e in t.external_data} for t in graph.initializer if t.name == weight)
    with draft.with_name(place["location"]).open("r+b") as stream:
        stream.seek(int(place["offset"]))
        stream.write(np.full(int(place["length"]) // 4, np.nan, np.float32).tobytes())
    expected = collect(engine.generate(PROMPT, FREE, method="none"))[1]
    assert len(set(expected.ids)) > 3
    with pytest.raises(BundleError, match="altered"):
        Engine(folder, threads=1)
    with Engine(folder, threads=1, verify=False) as broken:
        for _ in range(2):
            finish = collect(broken.generate(PROMPT, FREE, method="draft:self-int8"))[1]
            assert finish.ids == expected.ids
            assert len(finish.stats.notes) == 1
            assert "draft:self-int8 failed" in finish.stats.notes[0]


def test_a_draft_of_the_target_works_in_its_cache(engine):
    """It runs no prompt: after a long one its first draft costs what any other does, and rows are the target's own."""
    first = collect(engine.generate(PROMPT, FREE, method="draft:self-int8"))[1]
    drafter = engine.drafting.opened("draft:self-int8")
    assert drafter.model.pool is engine.target.pool
    pool = engine.target.pool[:, :, :, : engine.target.length].copy()
    engine.reset()
    engine.target.forward([*first.prompt_ids, *first.ids[:-1]])
    assert np.abs(engine.target.pool[:, :, :, : engine.target.length] - pool).max() < 1e-4


def test_a_draft_with_a_cache_of_its_own_catches_up(engine, tiny_bundle, tmp_path):
    """Other drafts (a separate model, another cache type) run what they lack; the text is the same."""
    folder = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, folder)
    text = (folder / MANIFEST).read_text()
    assert text.count('"shares_cache": true') == 2
    (folder / MANIFEST).write_text(text.replace('"shares_cache": true', '"shares_cache": false'))
    with Engine(folder, threads=1) as separate:
        for options in (FREE, Options(max_tokens=48, temperature=0.9, seed=5)):
            for method in ("draft:self-int4", "draft:self-int8"):
                expected = collect(engine.generate(PROMPT, options, method=method))[1]
                finish = collect(separate.generate(PROMPT, options, method=method))[1]
                assert finish.ids == expected.ids
                assert finish.stats.notes == ()
                assert finish.stats.accepted > 0
        assert separate.drafting.opened("draft:self-int8").model.pool is not separate.target.pool


def test_the_context_is_never_passed(tiny_bundle):
    with Engine(tiny_bundle, threads=1, capacity=40) as engine:
        assert engine.capacity == 40
        for method in engine.methods:
            engine.reset()
            finish = collect(engine.generate(PROMPT, max_tokens=None, method=method, draft_length=8))[1]
            assert finish.reason == "length" or finish.ids[-1] in engine.manifest.eos_token_ids
            assert len(finish.prompt_ids) + len(finish.ids) <= 40
        with pytest.raises(PromptError, match=r"prompt has 40 tokens .* holds 40: shorten it, start the chat anew"):
            engine.generate([5] * 40)
        assert collect(engine.generate([5] * 39, max_tokens=None))[1].stats.tokens == 1


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        ([-1], "outside the vocabulary"),
        ([320], "vocabulary of 320"),
        ([1.7], "give a text, or a sequence of token ids"),
        (b"abc", "the prompt is bytes: give a text"),
        (None, "the prompt is NoneType"),
    ],
)
def test_prompts_that_cannot_be_run(engine, prompt, message):
    with pytest.raises(PromptError, match=message):
        engine.generate(prompt)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"draft_length": 0}, "draft_length is 0: give a number from 1 to 63; to decode plainly use method none"),
        ({"draft_length": 64}, "draft_length is 64"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0: give a number from more than 0.0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"seed": 1 << 64}, "seed is"),
        ({"accept": "always"}, "accept is 'always': choose one of exact, rejection"),
        ({"stop": "x"}, "give a tuple of texts"),
        ({"stop": ("",)}, "none of them empty"),
        ({"stop": None}, "give a tuple of texts"),
        ({"draft_length": 2.5}, "draft_length is 2.5: give a whole number"),
        ({"seed": "x"}, "seed is 'x': give a whole number"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"policy": "fast"}, "policy is 'fast': choose one of fixed, speed, thresholds, steps"),
        ({"policy": "steps", "method": "auto"}, "method auto goes with policy speed"),
        ({"draft_temperature": 0}, "draft_temperature is 0: give a number from more than 0.0"),
        ({"deadline_ms": 0}, "deadline_ms is 0: give a number from more than 0.0"),
        ({"deadline_ms": float("inf")}, "deadline_ms is inf"),
        ({"max_step_ms": "10"}, "max_step_ms is '10'"),
        ({"deadline_ms": 10**400}, "deadline_ms is 1000"),
        ({"method": 5}, "method is 5: give a name"),
        ({"measure_baseline": 1}, "measure_baseline is 1: give True or False"),
        ({"tempreature": 1}, "unknown option tempreature; the options are method, accept"),
    ],
)
def test_options_that_make_no_sense(engine, override, message):
    with pytest.raises(UsageError) as caught:
        engine.generate(PROMPT, **override)
    assert message in str(caught.value)


def test_numbers_of_numpy_are_numbers(engine):
    options = Options(temperature=np.float32(0.5), top_k=np.int64(5), seed=np.int64(5), max_tokens=np.int32(4))
    assert type(options.top_k) is int
    assert len(collect(engine.generate(np.array([5, 6, 7]), options))[1].ids) == 4


def test_a_stop_text_is_not_part_of_the_reply(engine):
    whole = collect(engine.generate(PROMPT, FREE))[1]
    stop = whole.text[10:13]
    for method in engine.methods:
        finish = collect(engine.generate(PROMPT, FREE, method=method, stop=(stop,)))[1]
        assert finish.reason == "stop"
        assert finish.text == whole.text[: whole.text.index(stop)]
        assert consistent(engine)


def test_a_closed_engine_says_so(tiny_bundle):
    engine = Engine(tiny_bundle, threads=1)
    engine.close()
    engine.close()
    with pytest.raises(UsageError, match="this engine is closed"):
        engine.generate(PROMPT)


def test_threads_take_turns(engine):
    """A second reply ends the first, wherever it comes from; neither sees the other's half-done round."""
    whole = collect(engine.generate(PROMPT, FREE, method="none"))[1].ids
    finishes = []

    def work():
        for _ in range(8):
            generation = engine.generate(PROMPT, FREE, method="none")
            for _ in generation:
                pass
            finishes.append(generation.finish)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(finishes) == 24
    assert all(finish.ids == whole[: len(finish.ids)] for finish in finishes)
    assert consistent(engine)


@pytest.mark.parametrize("threads", [0, -1, 100_000, "a", 1.5, True])
def test_a_number_of_threads_that_cannot_be(tiny_bundle, threads):
    with pytest.raises(UsageError, match=r"threads is .*: give a number from 1 to [0-9]+"):
        Engine(tiny_bundle, threads=threads)


def test_a_bundle_damaged_in_any_file_is_refused(tiny_bundle, tmp_path):
    for name in json.loads((tiny_bundle / MANIFEST).read_text())["files"]:
        copy = tmp_path / "copy"
        shutil.copytree(tiny_bundle, copy)
        data = bytearray((copy / name).read_bytes())
        data[len(data) // 2] ^= 1
        (copy / name).write_bytes(bytes(data))
        with pytest.raises(BundleError, match="altered"):
            Engine(copy, threads=1)
        shutil.rmtree(copy)


def test_what_the_loop_adds_is_measured_and_leaves_no_trace(engine):
    expected = collect(engine.generate(PROMPT, FREE))[1]
    cost = loop_cost(engine)
    assert cost["ratio"] == pytest.approx(cost["loop_ms"] / cost["bare_ms"], rel=0.5)
    assert 0 < cost["host_ms"] < cost["loop_ms"] * 100
    again = collect(engine.generate(PROMPT, FREE))[1]
    assert (again.ids, again.stats.cached_tokens) == (expected.ids, 0)


def test_a_cache_too_small_for_the_measurement(tiny_bundle):
    with Engine(tiny_bundle, threads=1, capacity=64) as small:
        assert loop_cost(small) is None


def test_an_engine_that_is_closed_frees_its_models(tiny_bundle):
    import psutil

    process = psutil.Process()
    sizes = []
    for _ in range(6):
        engine = Engine(tiny_bundle, threads=1)
        collect(engine.generate(PROMPT, FREE))
        engine.close()
        del engine
        gc.collect()
        sizes.append(process.memory_info().rss)
    assert sizes[-1] - sizes[2] < 8 << 20
