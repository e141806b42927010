"""A target whose activations are rounded gives a row the same bits however many rows run with it."""

from __future__ import annotations

import numpy as np
import pytest

from specedge.runtime.contracts import Draft
from specedge.runtime.engine import Engine
from specedge.runtime.graph import Decoder

pytest.importorskip("onnx", reason="writing a graph needs the export extra")

from specedge.export.decoder import write_decoder
from specedge.tests.reference import memory_checkpoint

PRECISIONS = ("int8", "int4")
WIDTHS = (2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16)
CAPACITY = 97
PROMPTS, TOKENS = 6, 128


@pytest.fixture(scope="module", params=PRECISIONS)
def graph(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("graph")
    checkpoint = memory_checkpoint(seed=5)
    spec = write_decoder(checkpoint, folder, stem="target", precision=request.param, capacity=CAPACITY)
    return folder / spec.file, spec


def passes(decoder, ids, width):
    """Logits after every row and the cache, with `width` rows a pass."""
    decoder.rewind(0)
    rows = [decoder.forward(ids[:11]).logits[:0]]
    for start in range(11, len(ids), width):
        part = ids[start : start + width]
        rows.append(decoder.forward(part[:1], Draft.chain(part[1:])).logits.copy())
        decoder.commit(range(len(part) - 1))
    return np.concatenate(rows), decoder.pool[:, :, :, : len(ids)].copy()


def differing(decoder, ids, widths):
    """Widths whose logits or cache are not those of single rows, bit for bit."""
    logits, cache = passes(decoder, ids, 1)
    assert len(logits) == len(ids) - 11
    found = ((width, *passes(decoder, ids, width)) for width in widths)
    return [width for width, rows, pool in found if not (np.array_equal(rows, logits) and np.array_equal(pool, cache))]


def test_every_width_gives_the_same_bits_up_to_the_last_row(graph):
    decoder = Decoder(*graph, threads=1, paired=True)
    assert (decoder.capacity, decoder.rows) == (CAPACITY - 1, CAPACITY)
    ids = np.random.default_rng(0).integers(0, 160, decoder.capacity).tolist()
    assert differing(decoder, ids, WIDTHS) == []


def test_a_lone_row_needs_company(graph):
    """Why rows run in pairs: once a lone row gives every width's bits, `paired` may go."""
    decoder = Decoder(*graph, threads=1)
    ids = np.random.default_rng(0).integers(0, 160, CAPACITY - 1).tolist()
    assert differing(decoder, ids, (2, 8)) == [2, 8]


def test_a_prompt_in_any_pieces_leaves_the_same_cache(graph):
    decoder = Decoder(*graph, threads=1, paired=True)
    ids = np.random.default_rng(1).integers(0, 160, 80).tolist()
    decoder.forward(ids)
    whole = decoder.pool[:, :, :, :80].copy()
    for pieces in ((1,) * 80, (79, 1), (1, 79), (17, 1, 40, 22)):
        decoder.rewind(0)
        start = 0
        for piece in pieces:
            decoder.forward(ids[start : start + piece])
            start += piece
        assert np.array_equal(decoder.pool[:, :, :, :80], whole)


def test_a_draft_fits_into_the_cache_of_a_paired_target(graph):
    target = Decoder(*graph, threads=1, paired=True)
    draft = Decoder(*graph, threads=1, host=target)
    target.forward([1, 2, 3])
    draft.follow(3)
    assert draft.pool is target.pool
    assert draft.forward([4]).logits.shape == (1, 160)


@pytest.mark.model
@pytest.mark.parametrize(
    ("precision", "draft"),
    [("int8", "self-int4"), pytest.param("int4", "self-int4:b64:sym", marks=pytest.mark.long)],
)
def test_a_rounded_target_gives_plain_decodings_ids(precision, draft, dev_prompts, tmp_path):
    from specedge.export.pipeline import ExportOptions, export

    bundle = tmp_path / "bundle"
    export("smollm2-135m", bundle, ExportOptions(precision=precision, drafts=(draft,), capacity=512))
    different = []
    with Engine(bundle, verify=False) as engine:
        chats = (engine.text.chat_prompt([{"role": "user", "content": prompt["turns"][0]}]) for prompt in dev_prompts)
        methods = engine.methods
        assert len(methods) == 6  # none, the draft, heads, heads with lookup, lookup, auto
        prompts = [ids for ids in chats if len(ids) + TOKENS <= engine.capacity][:PROMPTS]
        assert len(prompts) == PROMPTS
        for number, ids in enumerate(prompts):
            answers = {}
            for method in methods:
                *_, finish = engine.generate(ids, method=method, max_tokens=TOKENS)
                answers[method] = finish.ids
            different += [(number, method) for method in methods if answers[method] != answers["none"]]
        ids = [*prompts[0], *answers["none"]]
        assert differing(engine.target, ids, range(2, 17)) == []
    assert different == []
