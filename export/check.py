"""The check that is always made: a bundle's graphs agree with themselves and with each other.

Every way of running the same tokens must give the same logits: one pass, pieces, a
token tree against the chain of each node's own path, rows moved by `commit`, and the
standard graph. A wrong mask, position or cache row cannot pass all of them. Whether the
weights are the checkpoint's is for torch_check.py to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specedge.export.memory import release_memory
from specedge.export.tolerances import DRAFT_MAX_KL, Bound, tolerance_of
from specedge.runtime.bundle import GraphSpec
from specedge.runtime.contracts import Draft, Floats, Target
from specedge.runtime.errors import ParityError

__all__ = ["agreement", "check_draft", "check_growing", "check_prompts", "check_target", "compare"]

Tokens = Sequence[int]

_TEXTS = (
    "The capital of France is Paris, and the capital of Italy is Rome. The river that runs through",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) +",
    "Question: A train leaves at 9:40 and arrives at 11:05. How long is the journey?\nAnswer: The journey",
)
_SHORTEST, _LONGEST = 12, 28
_NODES = 12
_ROWS = 64


class _Graph(Target, Protocol):
    """A target that can be closed."""

    def close(self) -> None: ...


def check_prompts(tokenizer: str, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Token ids of three short texts, none longer than 28 tokens.

    Args:
        tokenizer: Text of tokenizer.json.
        vocab_size: Ids the graph knows; where a text gives few usable ones, fixed random ids follow.
    """
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_str(tokenizer)
    random = np.random.default_rng(0)
    prompts = []
    for text in _TEXTS:
        ids = [token for token in encoder.encode(text).ids if token < vocab_size][:_LONGEST]
        filler = random.integers(vocab_size, size=max(_SHORTEST - len(ids), 0))
        prompts.append((*ids, *(int(token) for token in filler)))
    return tuple(prompts)


def check_target(
    folder: Path, spec: GraphSpec, standard: str, prompts: Sequence[Tokens]
) -> tuple[dict[str, Any], list[Floats]]:
    """Checks the speculative graph against itself and the standard graph against it.

    Args:
        folder: The bundle being made.
        spec: The speculative graph.
        standard: Path of the standard graph inside the bundle.
        prompts: From `check_prompts`.

    Returns:
        The report, and the target's logits of each prompt, [tokens, vocab].

    Raises:
        ParityError: Two ways of running the same tokens disagree.
    """
    from specedge.runtime.graph import Decoder
    from specedge.runtime.memory import DeviceMemory

    bound = tolerance_of(spec.precision, compiled=spec.fixed).graph
    report: dict[str, Any] = _header(bound)
    # A graph for a device is run as there, with tensors that are carried over and rows that a graph moves.
    memory = DeviceMemory("cpu") if spec.compact else None
    with _opened(Decoder(folder / spec.file, spec, capacity=spec.rows_for(_ROWS), memory=memory)) as graph:
        logits = [_chain(graph, prompt) for prompt in prompts]
        report["pieces"] = _check_pieces(graph, prompts, logits, bound)
        report["tree"] = _check_tree(graph, prompts[0], spec.vocab_size, bound)
    if spec.chains:
        with _opened(Decoder(folder / spec.file, spec, capacity=spec.rows_for(_ROWS), masked=False)) as twin:
            report["chains"] = _check_pieces(twin, prompts, logits, bound)
    report["standard"] = _check_standard(folder / standard, spec, prompts, logits, bound)
    return report, logits


def check_growing(folder: Path, spec: GraphSpec, prompts: Sequence[Tokens]) -> tuple[dict[str, Any], list[Floats]]:
    """Checks a bundle that has only the standard graph: one pass against pieces.

    Returns and raises as `check_target`.
    """
    from specedge.runtime.growing import GrowingDecoder

    bound = tolerance_of(spec.precision, compiled=spec.fixed).graph
    with _opened(GrowingDecoder(folder / spec.file, spec)) as graph:
        logits = [_chain(graph, prompt) for prompt in prompts]
        worst = _check_pieces(graph, prompts, logits, bound)
    return {**_header(bound), "pieces": worst}, logits


def check_draft(
    folder: Path, name: str, spec: GraphSpec, prompts: Sequence[Tokens], logits: Sequence[Floats]
) -> dict[str, Any]:
    """Compares a draft's laws with the target's, token for token on the same prompts, over the tokens both know.

    A draft that is the target itself in fewer bits must not differ by more than rounding explains;
    layers of it, or another model, may say what they like.

    Raises:
        ParityError: The draft computes NaN, or guesses no better than chance.
    """
    from specedge.runtime.graph import Decoder

    common = min(spec.vocab_size, logits[0].shape[1])
    with _opened(Decoder(folder / spec.file, spec, capacity=spec.rows_for(_ROWS))) as graph:
        known = [[token if token < common else 0 for token in prompt] for prompt in prompts]
        drafted = [_chain(graph, prompt)[:, :common] for prompt in known]
    report = agreement([rows[:, :common] for rows in logits], drafted, f"draft {name}")
    if name.startswith("self-") and report["kl"] > DRAFT_MAX_KL:
        raise ParityError(
            f"draft {name}: KL(target||draft) is {report['kl']:.3g} where {DRAFT_MAX_KL} is the most that rounding "
            "explains; export without it (--draft none) and report this model"
        )
    return {"status": "passed", **report}


def agreement(target: Sequence[Floats], other: Sequence[Floats], name: str) -> dict[str, float]:
    """Mean KL(p||q) in nats and how often the likeliest token is the same.

    Args:
        target: Logits of p, one array [tokens, vocab] a prompt.
        other: Logits of q, in the same shapes.
        name: Whose logits `other` are, for the message.

    Raises:
        ParityError: `other` holds NaN or infinity.
    """
    divergences, same = [], []
    for p, q in zip(target, other, strict=True):
        if not np.isfinite(q).all():
            raise ParityError(f"{name}: computes NaN or infinity; export in another precision")
        divergences.append(_divergence(p, q))
        same.append(p.argmax(axis=-1) == q.argmax(axis=-1))
    return {
        "kl": round(float(np.concatenate(divergences).mean()), 6),
        "agreement": round(float(np.concatenate(same).mean()), 4),
    }


def compare(what: str, rows: Floats, reference: Floats, bound: Bound) -> float:
    """Compares two arrays of logits, [rows, vocab].

    Returns:
        The largest absolute difference; the mean KL(reference||rows) where only that is bounded.

    Raises:
        ParityError: The bound is exceeded, a likeliest token differs by more than a tie, or a number is not finite.
    """
    if not (np.isfinite(rows).all() and np.isfinite(reference).all()):
        raise ParityError(f"{what}: NaN or infinity in the logits; export in another precision")
    kl = float(_divergence(reference, rows).mean())
    worst = float(np.abs(rows - reference).max())
    row, ours, theirs = np.arange(len(rows)), rows.argmax(axis=-1), reference.argmax(axis=-1)
    gap = float((reference[row, theirs] - reference[row, ours]).max())
    if bound.absolute is not None and max(worst, gap) > bound.absolute:
        raise ParityError(
            f"{what}: logits differ by {worst:.3g} where {bound.absolute:g} is allowed, the likeliest by {gap:.3g}; "
            "nothing was kept; please report this model"
        )
    if kl > bound.kl:
        raise ParityError(
            f"{what}: the laws differ by KL {kl:.3g} where {bound.kl:g} is allowed; nothing was kept; "
            "export in a higher precision, or please report this model"
        )
    return float(f"{kl if bound.absolute is None else worst:.3g}")


def _header(bound: Bound) -> dict[str, Any]:
    measure = "kl" if bound.absolute is None else "max_abs"
    return {"status": "passed", "measure": measure, "bound": bound.kl if bound.absolute is None else bound.absolute}


def _chain(graph: _Graph, tokens: Tokens) -> Floats:
    """Logits of every token in one pass, [tokens, vocab]."""
    graph.rewind(0)
    return graph.forward(tokens[:1], Draft.chain(tokens[1:])).logits.copy()


def _check_pieces(graph: _Graph, prompts: Sequence[Tokens], logits: Sequence[Floats], bound: Bound) -> float:
    return max(
        compare("running a prompt in pieces", _pieces(graph, prompt), rows, bound)
        for prompt, rows in zip(prompts, logits, strict=True)
    )


def _pieces(graph: _Graph, tokens: Tokens) -> Floats:
    """Logits of every token when the prompt comes in pieces of 5, 1, 2, 5, 1, 2 … rows."""
    graph.rewind(0)
    rows, start, turn = [], 0, 0
    while start < len(tokens):
        size = (5, 1, 2)[turn % 3]
        piece = tokens[start : start + size]
        rows.append(graph.forward(piece[:1], Draft.chain(piece[1:])).logits.copy())
        graph.commit(range(len(piece) - 1))
        start, turn = start + size, turn + 1
    return np.concatenate(rows)


def _check_tree(graph: _Graph, prompt: Tokens, vocab_size: int, bound: Bound) -> float:
    """Every node of a random tree against the chain of its own path, and a commit against a fresh run."""
    random = np.random.default_rng(1)
    tree = Draft(
        tuple(int(token) for token in random.integers(vocab_size, size=_NODES)),
        tuple(int(random.integers(-1, node)) for node in range(_NODES)),
    )
    paths = [_path(tree, node) for node in range(_NODES)]
    graph.rewind(0)
    rows = graph.forward(prompt, tree).logits[1:].copy()
    chains = []
    for path in paths:
        graph.rewind(0)
        chain = graph.forward(prompt, Draft.chain([tree.tokens[node] for node in path])).logits
        chains.append(chain[len(path)].copy())
    worst = compare("a token tree", rows, np.array(chains), bound)
    deepest = max(paths, key=len)
    graph.rewind(0)
    graph.forward(prompt, tree)
    graph.commit(deepest)
    after = graph.forward(prompt[:1], Draft.chain(prompt[1:8])).logits.copy()
    graph.rewind(0)
    whole = [*prompt, *(tree.tokens[node] for node in deepest), prompt[0]]
    fresh = graph.forward(whole, Draft.chain(prompt[1:8])).logits
    return max(worst, compare("committing a path of a tree", after, fresh, bound))


def _path(tree: Draft, node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = tree.parents[node]
    return path


def _check_standard(
    path: Path, spec: GraphSpec, prompts: Sequence[Tokens], logits: Sequence[Floats], bound: Bound
) -> float:
    from specedge.runtime.growing import GrowingDecoder

    with _opened(GrowingDecoder(path, spec)) as graph:
        return max(
            compare("the standard graph", rows, reference, bound)
            for prompt, reference in zip(prompts, logits, strict=True)
            for rows in (_chain(graph, prompt), _pieces(graph, prompt))
        )


@contextmanager
def _opened(graph: _Graph) -> Iterator[_Graph]:
    """Frees a graph's memory at the end, before the next is opened."""
    try:
        yield graph
    finally:
        graph.close()
        release_memory()


def _divergence(p: Floats, q: Floats) -> NDArray[np.float64]:
    """KL(p||q) of each row, in nats."""
    log_p, log_q = _log_softmax(p), _log_softmax(q)
    rows: NDArray[np.float64] = (np.exp(log_p) * (log_p - log_q)).sum(axis=-1)
    return rows


def _log_softmax(logits: Floats) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result
