"""The check that is always made: a bundle's graphs agree with themselves and with each other.

Every way of running the same tokens must give the same logits: one pass, pieces, a
token tree against the chain of each node's own path, rows moved by `commit`, and the
standard graph. A wrong mask, position or cache row cannot pass all of them. Whether the
weights are the checkpoint's is for torch_check.py to say.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from specedge.export.tolerances import DRAFT_MAX_KL, TOLERANCES
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

    tolerance = TOLERANCES[spec.precision].graph
    report: dict[str, Any] = {"tolerance": tolerance}
    with _opened(Decoder(folder / spec.file, spec, capacity=min(spec.capacity, _ROWS))) as graph:
        logits = [_chain(graph, prompt) for prompt in prompts]
        report["pieces"] = _check_pieces(graph, prompts, logits, tolerance)
        report["tree"] = _check_tree(graph, prompts[0], spec.vocab_size, tolerance)
    report["standard"] = _check_standard(folder / standard, spec, prompts, logits, tolerance)
    return {"status": "passed", **report}, logits


def check_growing(folder: Path, spec: GraphSpec, prompts: Sequence[Tokens]) -> tuple[dict[str, Any], list[Floats]]:
    """Checks a bundle that has only the standard graph: one pass against pieces.

    Returns and raises as `check_target`.
    """
    from specedge.runtime.growing import GrowingDecoder

    tolerance = TOLERANCES[spec.precision].graph
    with _opened(GrowingDecoder(folder / spec.file, spec)) as graph:
        logits = [_chain(graph, prompt) for prompt in prompts]
        worst = _check_pieces(graph, prompts, logits, tolerance)
    return {"status": "passed", "tolerance": tolerance, "pieces": worst}, logits


def check_draft(
    folder: Path, name: str, spec: GraphSpec, prompts: Sequence[Tokens], logits: Sequence[Floats]
) -> dict[str, Any]:
    """Compares a draft's laws with the target's, token for token on the same prompts.

    Raises:
        ParityError: The draft computes NaN, or guesses no better than chance.
    """
    from specedge.runtime.graph import Decoder

    with _opened(Decoder(folder / spec.file, spec, capacity=min(spec.capacity, _ROWS))) as graph:
        drafted = [_chain(graph, prompt) for prompt in prompts]
    report = agreement(logits, drafted, f"draft {name}")
    if report["kl"] > DRAFT_MAX_KL:
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
        log_p, log_q = _log_softmax(p), _log_softmax(q)
        divergences.append((np.exp(log_p) * (log_p - log_q)).sum(axis=-1))
        same.append(p.argmax(axis=-1) == q.argmax(axis=-1))
    return {
        "kl": round(float(np.concatenate(divergences).mean()), 6),
        "agreement": round(float(np.concatenate(same).mean()), 4),
    }


def compare(what: str, rows: Floats, reference: Floats, tolerance: float) -> float:
    """Largest absolute difference of two arrays of logits, [rows, vocab].

    Raises:
        ParityError: It exceeds the tolerance, a likeliest token differs by more than a tie, or a number is not finite.
    """
    if not (np.isfinite(rows).all() and np.isfinite(reference).all()):
        raise ParityError(f"{what}: NaN or infinity in the logits; export in another precision")
    worst = float(np.abs(rows - reference).max())
    ours, theirs = rows.argmax(axis=-1), reference.argmax(axis=-1)
    row = np.arange(len(rows))
    gap = float((reference[row, theirs] - reference[row, ours]).max())
    if worst > tolerance or gap > tolerance:
        raise ParityError(
            f"{what}: logits differ by {worst:.3g} where {tolerance:g} is allowed, the likeliest token by {gap:.3g}; "
            "nothing was kept; please report this model"
        )
    return float(f"{worst:.3g}")


def _chain(graph: _Graph, tokens: Tokens) -> Floats:
    """Logits of every token in one pass, [tokens, vocab]."""
    graph.rewind(0)
    return graph.forward(tokens[:1], Draft.chain(tokens[1:])).logits.copy()


def _last(graph: _Graph, tokens: Tokens) -> Floats:
    """Logits after the last of tokens that are committed behind what the cache holds, [1, vocab]."""
    return graph.forward(tokens).logits[:1].copy()


def _check_pieces(graph: _Graph, prompts: Sequence[Tokens], logits: Sequence[Floats], tolerance: float) -> float:
    return max(
        compare("running a prompt in pieces", _pieces(graph, prompt), rows, tolerance)
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


def _check_tree(graph: _Graph, prompt: Tokens, vocab_size: int, tolerance: float) -> float:
    """Every node of a random tree against the chain of its own path, and a commit against a fresh run."""
    random = np.random.default_rng(1)
    tree = Draft(
        tuple(int(token) for token in random.integers(vocab_size, size=_NODES)),
        tuple(int(random.integers(-1, node)) for node in range(_NODES)),
    )
    graph.rewind(0)
    rows = graph.forward(prompt, tree).logits.copy()
    worst = 0.0
    deepest: list[int] = []
    for node in range(_NODES):
        path = _path(tree, node)
        deepest = max(deepest, path, key=len)
        graph.rewind(0)
        chain = graph.forward(prompt, Draft.chain([tree.tokens[step] for step in path])).logits
        worst = max(worst, compare("a token tree", rows[node + 1][None], chain[len(path)][None], tolerance))
    graph.rewind(0)
    graph.forward(prompt, tree)
    graph.commit(deepest)
    after = _last(graph, prompt[:1])
    graph.rewind(0)
    fresh = _last(graph, [*prompt, *(tree.tokens[step] for step in deepest), prompt[0]])
    return max(worst, compare("committing a path of a tree", after, fresh, tolerance))


def _path(tree: Draft, node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = tree.parents[node]
    return path


def _check_standard(
    path: Path, spec: GraphSpec, prompts: Sequence[Tokens], logits: Sequence[Floats], tolerance: float
) -> float:
    from specedge.runtime.growing import GrowingDecoder

    with _opened(GrowingDecoder(path, spec)) as graph:
        return max(
            compare("the standard graph", rows, reference, tolerance)
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
        gc.collect()


def _log_softmax(logits: Floats) -> Floats:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result
