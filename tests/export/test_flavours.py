"""Three ways to attend, each on the CPU: the same rows as a numpy reference and as PyTorch, whatever runs with them."""

from __future__ import annotations

import numpy as np
import pytest

from specedge.export.check import compare
from specedge.export.decoder import write_decoder
from specedge.export.emulation import emulated
from specedge.export.tolerances import TOLERANCES
from specedge.runtime.contracts import Draft
from specedge.runtime.contracts import GraphNames as Names
from specedge.runtime.errors import UsageError
from specedge.runtime.graph import Decoder
from specedge.runtime.memory import DeviceMemory
from specedge.tests.export.graphs import Speculative, tree_errors
from specedge.tests.reference import forward, memory_checkpoint, random_tree

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

CAPACITY = 64
# Absolute error of a logit (they reach 24): 16 bits of cache, activations and weights, 11 or 8 of them mantissa.
CLOSE = {"fp32": 1e-4, "fp16": 0.1, "bf16": 0.6}
FORMS = [
    ("cpu", "gqa"),
    ("cpu", "onnx24"),
    ("cpu", "plain"),
    ("cuda", "gqa"),
    ("cuda", "onnx24"),
    ("cuda", "plain"),
    ("tensorrt", "onnx24"),
    ("tensorrt", "plain"),
]
FAMILIES = {
    "llama": {},
    "llama, untied, biases": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "llama, one key head": {"num_key_value_heads": 1},
    "mistral": {"model_type": "mistral", "sliding_window": CAPACITY},
}


def precisions(device):
    return ("fp16", "bf16") if device == "cuda" else ("fp32", "fp16")


CASES = [(*form, precision) for form in FORMS for precision in precisions(form[0])]


def write(checkpoint, folder, device, attention, precision, **options):
    made = {"stem": "target", "capacity": CAPACITY, **options}
    spec = write_decoder(checkpoint, folder, precision=precision, device=device, attention=attention, **made)
    return folder / spec.file, spec


@pytest.mark.parametrize(("device", "attention", "precision"), CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_random_trees_on_every_past_and_padding(tmp_path, rng, device, attention, precision, family):
    checkpoint = memory_checkpoint(**FAMILIES[family])
    path, spec = write(checkpoint, tmp_path, device, attention, precision)
    assert (spec.flavour, spec.tree) == (attention, True)
    for past, pad in ((0, 0), (0, 3), (11, 0), (11, 3)):
        errors = tree_errors(Speculative(path, spec), checkpoint, rng, past, pad)
        assert max(errors) < CLOSE[precision]


@pytest.mark.parametrize(("device", "attention", "precision"), CASES)
@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_pytorch_on_a_chain_and_a_tree(tmp_path, rng, device, attention, precision, name):
    torch = pytest.importorskip("torch")
    from specedge.tests.export.test_decoder_torch import transformers_model

    model, checkpoint = transformers_model(name)
    graph = Speculative(*write(checkpoint, tmp_path, device, attention, precision, capacity=96))
    ids, nodes = rng.integers(0, 160, 30), rng.integers(0, 160, 9)
    before, _ = graph.run(ids, pad=2)
    tree, depth = random_tree(rng, 9)
    logits, _ = graph.run(nodes, depth, tree, pad=2)

    def theirs(tokens):
        with torch.no_grad():
            return model(torch.from_numpy(np.array(tokens))[None]).logits[0].numpy()

    paths = [[*ids, *nodes[np.flatnonzero(tree[node])]] for node in range(9)]  # each node's own, as a sequence
    for ours, wanted in ((before, theirs(ids)), (logits, np.array([theirs(path)[-1] for path in paths]))):
        compare("against PyTorch", ours, wanted, TOLERANCES[precision].pytorch)


def test_the_twin_without_a_mask_runs_chains(tmp_path, rng):
    checkpoint = memory_checkpoint()
    path, spec = write(checkpoint, tmp_path, "cuda", "gqa", "fp16")
    ids = rng.integers(0, 160, 20)
    masked, twin = Speculative(path, spec), Speculative(path.with_name(spec.chains), spec)
    assert Names.ATTENTION_BIAS not in {item.name for item in twin.session.get_inputs()}
    for start, end in ((0, 9), (9, 10), (10, 20)):
        ours, theirs = twin.run(ids[start:end], pad=1), masked.run(ids[start:end], pad=1)
        assert np.abs(ours[0] - theirs[0]).max() < CLOSE["fp16"]
    decoder = Decoder(path, spec, masked=False)
    decoder.forward([1, 2], Draft.chain([3, 4]))
    with pytest.raises(ValueError, match="no tree mask: it verifies chains only"):
        decoder.forward([1, 2], Draft((3, 4), (-1, -1)))


def test_the_graph_finds_the_likeliest_tokens(tmp_path, rng):
    path, spec = write(memory_checkpoint(), tmp_path, "cuda", "gqa", "fp16")
    graph = Speculative(path, spec)
    logits, _ = graph.run(rng.integers(0, 160, 7))
    laws = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    ids, values = graph.outputs[Names.TOP_IDS][0], graph.outputs[Names.TOP_LOGPROBS][0]
    assert ids.shape == values.shape == (7, spec.top)
    assert (ids[:, 0] == logits.argmax(-1)).all()
    assert np.abs(values + np.sort(-laws, -1)[:, : spec.top]).max() < 1e-5
    assert np.abs(np.take_along_axis(laws, ids, -1) - values).max() < 1e-5


def test_a_fixed_cache_is_a_number_in_the_graph(tmp_path):
    path, spec = write(memory_checkpoint(), tmp_path, "tensorrt", "onnx24", "fp16")
    shapes = {item.name: item.shape for item in Speculative(path, spec).session.get_inputs()}
    assert shapes[Names.past(0, "key")] == [1, 2, CAPACITY, 16]
    assert shapes[Names.ATTENTION_BIAS] == [1, 1, "rows", CAPACITY]
    with pytest.raises(UsageError, match="compiled for 64 rows"):
        Decoder(path, spec, capacity=32)


DECODERS = [
    ("cpu", "onnx24", "fp32"),
    ("cpu", "plain", "fp32"),
    ("cuda", "gqa", "fp16"),
    ("cuda", "onnx24", "fp16"),
    ("tensorrt", "plain", "fp16"),
    ("cuda", "gqa", "bf16"),
    ("cuda", "plain", "bf16"),
]


@pytest.mark.parametrize(("device", "attention", "precision"), DECODERS)
@pytest.mark.parametrize("apart", [False, True])
def test_the_decoder_runs_every_flavour(tmp_path, device, attention, precision, apart):
    """With its tensors in the host's memory, and in memory that has to be copied to and from."""
    checkpoint = memory_checkpoint(seed=3)
    _, written = write(checkpoint, tmp_path, device, attention, precision)
    with emulated(tmp_path, written) as spec:
        decoder = Decoder(tmp_path / spec.file, spec, threads=1, memory=DeviceMemory("cpu") if apart else None)
    assert [each.name for each in tmp_path.glob(".*")] == []
    random = np.random.default_rng(4)
    committed = random.integers(0, 160, 9).tolist()
    decoder.forward(committed)
    for nodes in (1, 4, 6, 11):
        pending = random.integers(0, 160, 2).tolist()
        draft = Draft(
            tuple(int(token) for token in random.integers(0, 160, nodes)),
            tuple(int(random.integers(-1, node)) for node in range(nodes)),
        )
        rows = decoder.forward(pending, draft)
        committed += pending
        leaf, best = [], []
        for node in range(nodes):
            leaf, at = [], node
            while at >= 0:
                leaf.insert(0, at)
                at = draft.parents[at]
            expected, hidden = forward(checkpoint, np.array([*committed, *(draft.tokens[each] for each in leaf)]))
            assert np.abs(rows.logits[node + 1] - expected[-1]).max() < CLOSE[precision]
            assert np.abs(rows.hidden[node + 1] - hidden[-1]).max() < CLOSE[precision]
            best = max(best, leaf, key=len)
        if apart and not spec.compact:
            decoder.commit(())
            continue
        decoder.commit(best)
        committed += [draft.tokens[node] for node in best]
    rows = decoder.forward([7, 8], Draft.chain([9]))
    expected, _ = forward(checkpoint, np.array([*committed, 7, 8, 9]))
    assert np.abs(rows.logits - expected[-2:]).max() < CLOSE[precision]


@pytest.mark.parametrize("attention", ["gqa", "plain"])
def test_rows_are_moved_on_the_device(tmp_path, attention):
    spec_path = write(memory_checkpoint(), tmp_path, "cuda", attention, "fp16")
    decoder = Decoder(*spec_path, threads=1, memory=DeviceMemory("cpu"))
    decoder.forward([1, 2, 3], Draft((4, 5, 6, 7, 8), (-1, -1, 1, 1, 3)))
    before = decoder.pool.copy()
    decoder.commit((1, 3, 4))
    after = decoder.pool
    assert (after[:, :, :, 3:6] == before[:, :, :, [4, 6, 7]]).all()
    untouched = [*range(3), *range(6, CAPACITY)]
    assert (after[:, :, :, untouched] == before[:, :, :, untouched]).all()


def test_only_what_is_looked_at_leaves_the_device(tmp_path):
    path, spec = write(memory_checkpoint(vocab_size=400), tmp_path, "cuda", "gqa", "fp16")
    apart, local = (Decoder(path, spec, threads=1, memory=memory) for memory in (DeviceMemory("cpu"), None))
    apart.looked_at = 5
    for turn in range(3):
        draft = Draft.chain([turn + 30, turn + 40])
        ours, theirs = (each.forward([turn + 1, turn + 2], draft).logits for each in (apart, local))
        assert (np.isfinite(ours).sum(-1) == spec.top).all()  # nothing of the pass before is left
        assert (ours.argmax(-1) == theirs.argmax(-1)).all()
        best = np.argsort(-theirs, -1)[:, :5]
        shift = np.take_along_axis(theirs, best, -1) - np.take_along_axis(ours, best, -1)
        assert np.abs(shift - shift[:, :1]).max() < 1e-4  # log-probabilities: the same law
        for each in (apart, local):
            each.commit((0,))
    apart.looked_at = None
    assert np.isfinite(apart.forward([1]).logits).all()


@pytest.mark.parametrize(("device", "attention"), [("cuda", "gqa"), ("cuda", "onnx24")])
def test_a_tree_leaves_no_mask_on_the_device(tmp_path, device, attention):
    """The same width, used for a chain after a tree, must see everything again."""
    checkpoint = memory_checkpoint(seed=4)
    decoder = Decoder(*write(checkpoint, tmp_path, device, attention, "fp16"), threads=1, memory=DeviceMemory("cpu"))
    ids = np.random.default_rng(5).integers(0, 160, 30).tolist()
    decoder.forward(ids[:9])
    decoder.forward(ids[9:10], Draft((1, 2, 3), (-1, -1, -1)))
    decoder.commit(())
    rows = decoder.forward(ids[10:11], Draft.chain(ids[11:14]))
    expected, _ = forward(checkpoint, np.array(ids[:14]))
    assert np.abs(rows.logits - expected[10:14]).max() < CLOSE["fp16"]
