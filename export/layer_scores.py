"""How much a target's laws change when some of its layers are left out, for any choice of layers.

One graph answers for every choice: the target's own, where what a layer adds to the residual is
multiplied by a gate first. A gate of 0 leaves the layer out, so no weight is written or read twice.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specedge.export.memory import release_memory
from specedge.export.texts import Text
from specedge.runtime.bundle import GraphSpec
from specedge.runtime.contracts import Floats
from specedge.runtime.contracts import GraphNames as Names
from specedge.runtime.errors import StorageError, UnsupportedModelError, UsageError
from specedge.runtime.providers import open_session

if TYPE_CHECKING:
    import onnxruntime as ort
    from onnx import ModelProto

__all__ = ["BLOCK", "ROWS", "LayerScorer", "Score"]

BLOCK = 4
ROWS = 512
_GATES = "layer_gates"
_NORM = "SkipSimplifiedLayerNormalization"
_CHUNK = 64
_KINDS = ("key", "value")


@dataclass(frozen=True)
class Score:
    """How well a choice of layers drafts, over all answer tokens.

    Attributes:
        kl: Mean KL(target||draft) in nats.
        agreement: How often the likeliest token is the target's.
    """

    kl: float
    agreement: float


@dataclass(frozen=True)
class _Lesson:
    """One text: the pass that any draft makes over it, and what the target said there.

    Attributes:
        feed: Inputs of the pass, the gates excepted.
        law: The target's probabilities of the answer's tokens, [answers, vocab].
        negative_entropy: Sum of p log p, [answers].
    """

    feed: dict[str, NDArray[Any]]
    law: Floats
    negative_entropy: Floats


class LayerScorer:
    """Scores choices of layers by the answers of some texts.

    A draft is judged as it will work. In the target's cache, each block of rows sees the
    target's keys and values of the rows before it and its own within, as a draft of that length does;
    with a cache of its own, a draft sees nothing but its own.

    Args:
        path: The target's speculative graph, its weights beside it. A file is written there for a moment.
        spec: Its entry in the manifest.
        texts: What the target wrote. Only so many are used as give `rows` answer tokens.
        block: Rows drafted one after the other; None: the draft has a cache of its own.
        rows: Most answer tokens.
        threads: Threads to compute with; None takes all.

    Attributes:
        evaluations: How many choices were scored.

    Raises:
        UsageError: The texts hold no answer.
        UnsupportedModelError: The graph is not built of layers as this exporter writes them.
    """

    def __init__(
        self,
        path: Path,
        spec: GraphSpec,
        texts: Sequence[Text],
        *,
        block: int | None = BLOCK,
        rows: int = ROWS,
        threads: int | None = None,
    ) -> None:
        self.layers = spec.layers
        self.evaluations = 0
        self._spec = spec
        self._block = block
        cut = list(_shortened(texts, spec.capacity // 2, rows))
        if not cut:
            raise UsageError(
                f"a draft's layers are chosen on texts of {spec.capacity // 2} tokens, half the capacity, and no "
                "prompt to calibrate on leaves room for an answer in that; raise --capacity"
            )
        self._session = _gated_session(path, spec, threads)
        self._lessons = [self._lesson(text) for text in cut]

    def __call__(self, kept: Sequence[int]) -> Score:
        """Scores a draft that keeps these layers."""
        self.evaluations += 1
        gates = _gates(self._spec, kept)
        divergences, same = [], []
        for lesson in self._lessons:
            logits = self._session.run([Names.LOGITS], {**lesson.feed, _GATES: gates})[0][0]
            divergences.append(_divergences(lesson, logits))
            same.append(lesson.law.argmax(axis=-1) == logits.argmax(axis=-1))
        return Score(float(np.concatenate(divergences).mean()), float(np.concatenate(same).mean()))

    def close(self) -> None:
        """Frees the session."""
        self._lessons.clear()
        del self._session
        release_memory()

    def _lesson(self, text: Text) -> _Lesson:
        """Runs the target over a text, and lays out the pass that a draft makes over it."""
        tokens, first = np.array(text.tokens, np.int64), max(len(text.prompt) - 1, 0)
        count, answers = len(tokens), np.arange(first, len(tokens) - 1)
        start = first if self._block else 0  # in the target's cache, a draft runs no prompt
        rows = np.arange(start, count - 1)
        capacity = count + len(rows)
        past = self._empty_cache(capacity)
        presents = [name for layer in range(self.layers) for name in _presents(layer)]
        feed = self._feed(tokens, np.arange(count), np.zeros((count, capacity)), count - 1, answers)
        everything = _gates(self._spec, range(self.layers))
        logits, *cache = self._session.run([Names.LOGITS, *presents], {**feed, **past, _GATES: everything})
        begins = start + (rows - start) // self._block * self._block if self._block else np.zeros_like(rows)
        bias = np.where(_visible(begins, rows, count, start), 0, -np.inf)
        feed = self._feed(tokens[rows], rows, bias, count + len(rows) - 1, answers - start)
        law = _softmax(logits[0])
        entropy = np.einsum("rv,rv->r", law, np.log(np.maximum(law, np.finfo(np.float32).tiny)))
        return _Lesson({**feed, **dict(zip(past, cache, strict=True))}, law, entropy)

    def _empty_cache(self, capacity: int) -> dict[str, NDArray[Any]]:
        shape = (1, self._spec.kv_heads, capacity, self._spec.head_dim)
        zeros = np.zeros(shape, self._spec.cache_dtype)
        return {Names.past(layer, kind): zeros for layer in range(self.layers) for kind in _KINDS}

    def _feed(
        self, tokens: NDArray[Any], positions: NDArray[Any], bias: NDArray[Any], last: int, wanted: NDArray[Any]
    ) -> dict[str, NDArray[Any]]:
        return {
            Names.INPUT_IDS: tokens[None],
            Names.POSITION_IDS: positions[None],
            Names.ATTENTION_BIAS: bias[None, None].astype(self._spec.cache_dtype),
            Names.LAST_INDEX: np.array([last], np.int32),
            Names.TOTAL: np.array([bias.shape[1]], np.int32),
            Names.LOGIT_ROWS: wanted,
        }


def _visible(begins: NDArray[Any], rows: NDArray[Any], count: int, start: int) -> NDArray[Any]:
    """Which columns of the cache a draft's rows see, [rows, count + rows].

    Args:
        begins: Where each row's block begins: before it stand the target's keys and values.
        rows: Their positions in the text, from `start` on.
        count: Rows that the target ran; the draft's own stand behind them.
        start: The draft's first row.
    """
    columns = np.arange(count + len(rows))
    own = columns - count + start
    of_target = columns < begins[:, None]
    return np.where(columns < count, of_target, (own >= begins[:, None]) & (own <= rows[:, None]))


def _shortened(texts: Sequence[Text], capacity: int, rows: int) -> Iterator[Text]:
    """Texts of at most `capacity` tokens, until there are enough answer tokens.

    A draft's rows stand behind the target's in one cache, and no cache may be longer than the rotary tables.
    """
    for text in texts:
        room = min(capacity - len(text.prompt), rows)
        answer = text.answer[:room] if room > 0 else ()
        if rows <= 0 or not answer or len(text.prompt) + len(answer) < 2:
            continue
        rows -= len(answer)
        yield Text(text.prompt, answer)


def _gated_session(path: Path, spec: GraphSpec, threads: int | None) -> ort.InferenceSession:
    """The graph with a gate for each layer; it has to lie beside its weights to be opened."""
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    _add_gates(model, spec, path)
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".onnx") as file:
            file.write(model.SerializeToString())
            file.flush()
            return open_session(Path(file.name), threads=threads)
    except OSError as error:
        raise StorageError(f"{path.parent}: no file can be written there ({error.strerror})") from error


def _add_gates(model: ModelProto, spec: GraphSpec, path: Path) -> None:
    """Multiplies what attention and feed-forward of layer l add to the residual by gate l, in place."""
    from onnx import helper

    graph = model.graph
    sums = [node for node in graph.node if node.op_type == _NORM]
    if len(sums) != 2 * spec.layers:
        raise UnsupportedModelError(
            f"{path}: {len(sums)} sums where {spec.layers} layers have two each; so none can be left out"
        )
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(spec.cache_dtype))
    graph.input.append(helper.make_tensor_value_info(_GATES, kind, [spec.layers]))
    nodes = []
    for layer in range(spec.layers):
        index = helper.make_tensor(f"{_GATES}.{layer}.index", 7, [], [layer])  # 7: int64
        graph.initializer.append(index)
        nodes.append(helper.make_node("Gather", [_GATES, index.name], [f"{_GATES}.{layer}"]))
    for place, node in enumerate(sums):
        gated = f"{_GATES}.{place // 2}.{place % 2}"
        nodes.append(helper.make_node("Mul", [node.input[0], f"{_GATES}.{place // 2}"], [gated]))
        node.input[0] = gated
    graph.node.extend(nodes)
    _sort(graph.node)


def _sort(nodes: Any) -> None:
    """Puts each gate behind what it multiplies: the nodes of a graph stand in the order they run."""
    ordered = list(nodes)
    late = {output: node for node in ordered if node.output[0].startswith(_GATES) for output in node.output}
    placed: set[str] = set()
    result = []

    def place(node: Any) -> None:
        for name in node.input:
            if name in late and name not in placed:
                place(late[name])
        if node.output[0] not in placed:
            placed.update(node.output)
            result.append(node)

    for node in ordered:
        if node.output[0] not in late:
            place(node)
    copies = [type(node).FromString(node.SerializeToString()) for node in result]
    del nodes[:]
    nodes.extend(copies)


def _gates(spec: GraphSpec, kept: Sequence[int]) -> NDArray[Any]:
    gates = np.zeros(spec.layers, spec.cache_dtype)
    gates[list(kept)] = 1
    return gates


def _presents(layer: int) -> list[str]:
    return [Names.present(layer, kind) for kind in _KINDS]


def _divergences(lesson: _Lesson, logits: Floats) -> Floats:
    """KL(p||q) of each row, [rows]: sum p log p - sum p logits + logsumexp(logits), some rows at a time."""
    result = np.empty(len(logits), np.float32)
    for start in range(0, len(logits), _CHUNK):
        rows = slice(start, start + _CHUNK)
        shifted = logits[rows] - logits[rows].max(axis=-1, keepdims=True)
        expected = np.einsum("rv,rv->r", lesson.law[rows], shifted)
        result[rows] = lesson.negative_entropy[rows] - expected + np.log(np.exp(shifted).sum(axis=-1))
    return result


def _softmax(logits: Floats) -> Floats:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    law: Floats = weights / weights.sum(axis=-1, keepdims=True)
    return law
