"""The decoder against a numpy reference: pieces, padded widths, trees, commits, rewinds, both cache types."""

from __future__ import annotations

import numpy as np
import pytest

from specedge.runtime.bundle import GraphSpec
from specedge.runtime.contracts import EMPTY_DRAFT, Draft
from specedge.runtime.errors import BundleError, UsageError
from specedge.runtime.graph import PREFILL_CHUNK, Decoder

pytest.importorskip("onnx", reason="writing a graph needs the export extra")

from specedge.export.decoder import write_decoder
from specedge.tests.reference import forward, memory_checkpoint

CAPACITY = 96
TOLERANCE = {"fp32": 2e-4, "fp16": 6e-2}


@pytest.fixture(scope="module")
def checkpoint():
    return memory_checkpoint(seed=3)


@pytest.fixture(scope="module", params=["fp32", "fp16"])
def graph(request, checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("graph")
    spec = write_decoder(checkpoint, folder, stem="target", precision=request.param, capacity=CAPACITY)
    return folder / spec.file, spec


@pytest.fixture
def decoder(graph):
    return Decoder(*graph, threads=1)


@pytest.fixture
def close(graph):
    def check(found, expected):
        assert np.abs(found - expected).max() <= TOLERANCE[graph[1].precision]

    return check


def random_draft(rng, nodes, vocab=160):
    return Draft(
        tuple(int(token) for token in rng.integers(0, vocab, nodes)),
        tuple(int(rng.integers(-1, node)) if node else -1 for node in range(nodes)),
    )


def paths(draft):
    for node in range(len(draft.tokens)):
        path, at = [], node
        while at >= 0:
            path.append(at)
            at = draft.parents[at]
        yield node, path[::-1]


def test_a_prompt_in_pieces_of_every_width(decoder, checkpoint, close):
    ids = np.random.default_rng(0).integers(0, 160, 60)
    expected, hidden = forward(checkpoint, ids)
    done = 0
    for width in (1, 2, 3, 5, 9, 13, 27):
        rows = decoder.forward(ids[done : done + width].tolist())
        done += width
        assert rows.logits.shape == (1, 160)
        close(rows.logits[0], expected[done - 1])
        close(rows.hidden[0], hidden[done - 1])
        assert decoder.length == done


def test_random_trees_give_every_node_the_logits_of_its_own_path(decoder, checkpoint, close):
    rng = np.random.default_rng(1)
    committed = rng.integers(0, 160, 7).tolist()
    decoder.forward(committed)
    for nodes in (1, 3, 6, 7, 10, 20):
        pending = rng.integers(0, 160, int(rng.integers(1, 4))).tolist()
        draft = random_draft(rng, nodes)
        rows = decoder.forward(pending, draft)
        committed += pending
        assert rows.logits.shape == (1 + nodes, 160)
        close(rows.logits[0], forward(checkpoint, np.array(committed))[0][-1])
        for node, path in paths(draft):
            chain = np.array([*committed, *(draft.tokens[at] for at in path)])
            logits, hidden = forward(checkpoint, chain)
            close(rows.logits[node + 1], logits[-1])
            close(rows.hidden[node + 1], hidden[-1])
        decoder.commit(())


def test_the_cache_after_an_accepted_path_is_that_of_a_fresh_prefill(graph, decoder, close):
    rng = np.random.default_rng(2)
    prompt = rng.integers(0, 160, 11).tolist()
    draft = random_draft(rng, 14)
    leaf = max(paths(draft), key=lambda item: len(item[1]))[1]
    decoder.forward(prompt, draft)
    decoder.commit(leaf)
    fresh = Decoder(*graph, threads=1)
    fresh.forward([*prompt, *(draft.tokens[node] for node in leaf)])
    assert decoder.length == fresh.length == len(prompt) + len(leaf)
    close(decoder.pool[:, :, :, : decoder.length], fresh.pool[:, :, :, : fresh.length])


def test_rewinding_leaves_no_trace(decoder, checkpoint, close):
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 160, 20).tolist()
    decoder.forward(ids[:10])
    decoder.forward(rng.integers(0, 160, 8).tolist(), random_draft(rng, 9))
    decoder.rewind(10)
    rows = decoder.forward(ids[10:])
    close(rows.logits[0], forward(checkpoint, np.array(ids))[0][-1])


def test_a_tree_leaves_no_mask_for_the_next_pass(decoder, checkpoint, close):
    """The mask's buffer outlives the pass: the same width, used for a chain, must see everything again."""
    rng = np.random.default_rng(4)
    ids = rng.integers(0, 160, 30).tolist()
    decoder.forward(ids[:9])
    decoder.forward(ids[9:10], Draft((1, 2, 3), (-1, -1, -1)))
    decoder.commit(())
    rows = decoder.forward(ids[10:11], Draft.chain(ids[11:14]))
    expected = forward(checkpoint, np.array(ids[:14]))[0]
    close(rows.logits, expected[10:14])


def test_up_to_the_last_row_of_the_cache_and_no_further(decoder, checkpoint, close):
    ids = np.random.default_rng(5).integers(0, 160, CAPACITY).tolist()
    decoder.forward(ids[: CAPACITY - 10])
    rows = decoder.forward(ids[CAPACITY - 10 : CAPACITY - 9], Draft.chain(ids[CAPACITY - 9 :]))
    close(rows.logits, forward(checkpoint, np.array(ids))[0][-10:])
    decoder.commit(tuple(range(9)))
    assert decoder.length == CAPACITY
    with pytest.raises(ValueError, match="do not fit into a cache of 96"):
        decoder.forward([1])


def test_a_prompt_longer_than_a_chunk(tmp_path):
    checkpoint = memory_checkpoint(seed=5, max_position_embeddings=1024)
    spec = write_decoder(checkpoint, tmp_path, stem="target", precision="fp32", capacity=1024)
    decoder = Decoder(tmp_path / spec.file, spec, threads=1)
    ids = np.random.default_rng(6).integers(0, 160, 2 * PREFILL_CHUNK + 40).tolist()
    draft = Draft.chain(ids[-3:])
    rows = decoder.forward(ids[:-3], draft)
    assert decoder.length == len(ids) - 3
    assert np.abs(rows.logits - forward(checkpoint, np.array(ids))[0][-4:]).max() < TOLERANCE["fp32"]


def test_misuse_is_refused_before_the_graph_sees_it(decoder):
    with pytest.raises(ValueError, match="at least one pending token"):
        decoder.forward([])
    with pytest.raises(ValueError, match="outside the vocabulary of 160"):
        decoder.forward([160])
    with pytest.raises(ValueError, match="outside the vocabulary of 160"):
        decoder.forward([1], Draft.chain([-1]))
    decoder.forward([1, 2], Draft.chain([3]))
    with pytest.raises(ValueError, match="not within the 1 nodes"):
        decoder.commit((1,))
    decoder.commit((0,))
    with pytest.raises(ValueError, match="not within the 0 nodes"):
        decoder.commit((0,))
    assert decoder.length == 3
    assert decoder.forward([4], EMPTY_DRAFT).logits.shape == (1, 160)


def test_a_tree_as_wide_as_the_cache_is_refused(graph, checkpoint, close):
    """GroupQueryAttention would take it for a first prompt; one row fewer is right."""
    decoder = Decoder(*graph, capacity=16, threads=1)
    rng = np.random.default_rng(8)
    with pytest.raises(ValueError, match="cannot fill an empty cache"):
        decoder.forward([1], Draft((2,) * 15, (-1,) * 15))
    draft = random_draft(rng, 14)
    rows = decoder.forward([1], draft)
    for node, path in paths(draft):
        chain = np.array([1, *(draft.tokens[at] for at in path)])
        close(rows.logits[node + 1], forward(checkpoint, chain)[0][-1])


def test_a_smaller_cache_than_exported(graph, checkpoint, close):
    decoder = Decoder(*graph, capacity=16, threads=1)
    ids = np.random.default_rng(7).integers(0, 160, 12)
    close(decoder.forward(ids.tolist()).logits[0], forward(checkpoint, ids)[0][-1])
    assert decoder.pool.shape[3] == 16
    for capacity in (97, 1, "a", 20.5, True):
        with pytest.raises(UsageError, match="exported for 2 to 96 rows"):
            Decoder(*graph, capacity=capacity, threads=1)


@pytest.mark.parametrize(
    "change",
    [{"layers": 3}, {"layers": 1}, {"kv_heads": 1}, {"head_dim": 8}, {"hidden_size": 63}, {"vocab_size": 159}],
)
def test_a_manifest_that_lies_about_the_graph(graph, change):
    path, spec = graph
    lie = GraphSpec(**{**spec.__dict__, **change})
    with pytest.raises(BundleError, match=r"differ from|where the manifest says"):
        Decoder(path, lie, threads=1)


def test_a_graph_that_is_none(tmp_path, graph):
    broken = tmp_path / "target.onnx"
    broken.write_bytes(b"\x08\x07garbage")
    with pytest.raises(BundleError, match="cannot open it"):
        Decoder(broken, graph[1], threads=1)
