"""The seams of the runtime: what drafters, verifiers, samplers and targets exchange.

Protocols stand only where implementations vary: a target is a graph or a fake,
a drafter is a model, an n-gram table or heads, a sampler computes in numpy at
run time and in exact fractions in the tests. Everything else is a plain class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "EMPTY_DRAFT",
    "Context",
    "Director",
    "Draft",
    "Drafter",
    "Floats",
    "GraphNames",
    "Law",
    "Round",
    "Rows",
    "Sampler",
    "SamplingDrafter",
    "Target",
    "Verdict",
    "Verifier",
]

Floats = NDArray[np.float32]
Law = NDArray[Any]
"""Probabilities over the vocabulary, [vocab]: float64 at run time, Fractions in the exactness tests."""


class GraphNames:
    """Tensor names of the speculative graph, `onnx/target.onnx`, and of the cache in every graph.

    S rows are run, R of them go through the vocabulary product, C is the capacity.
    """

    INPUT_IDS = "input_ids"  # int64 [1, S]
    POSITION_IDS = "position_ids"  # int64 [1, S]
    ATTENTION_BIAS = "attention_bias"  # cache dtype [1, 1, S, C], 0 where a row may look, -inf elsewhere
    LAST_INDEX = "seqlens_k"  # int32 [1], rows in the cache after the pass, less one; flavour gqa only
    TOTAL = "total_sequence_length"  # int32 [1], always C; flavour gqa only
    WRITE_INDEX = "write_index"  # int64 [1], rows in the cache before the pass; flavours onnx24 and plain only
    LOGIT_ROWS = "logit_rows"  # int64 [R], which of the S rows go through the vocabulary product
    LOGITS = "logits"  # float32 [1, R, vocab]
    HIDDEN = "hidden"  # float32 [1, S, hidden_size], after the final norm
    INNER = "inner"  # float32 [1, S, taps * hidden_size], inputs of some layers, where heads read them

    TOP_IDS = "top_ids"  # int64 [1, R, K], the likeliest tokens, where the graph finds them
    TOP_LOGPROBS = "top_logprobs"  # float32 [1, R, K], log-probabilities of these

    # The graph that moves rows of a cache on its device: N is 2 * layers * kv_heads.
    POOL = "pool"  # cache dtype [1, N, C, head_dim]
    MOVED = "moved"  # the same, bound to the same memory
    SOURCE = "source"  # int64 [n], rows to move
    PLACE = "place"  # int64 [1], where to, one behind the other

    ATTENTION_MASK = "attention_mask"  # int64 [B, past + S], standard graph only

    # Heads: K of them, M guesses each.
    TOKEN = "token"  # int64 [1], the newest committed token
    GUESSES = "guesses"  # int64 [K, M], token ids, the likeliest first
    CHANCES = "chances"  # float32 [K, M], their probabilities by the heads' own laws
    HEAD_LOGITS = "head_logits"  # float32 [K, N], of the N tokens that are ever guessed
    GUESSED = "guessed_tokens"  # int64 [N], their ids

    @staticmethod
    def past(layer: int, kind: str) -> str:
        """Name of a cache input; `kind` is "key" or "value". [1, kv_heads, C, head_dim]."""
        return f"past_key_values.{layer}.{kind}"

    @staticmethod
    def present(layer: int, kind: str) -> str:
        """Name of a cache output, bound to the same memory as its input."""
        return f"present.{layer}.{kind}"


@dataclass(frozen=True)
class Draft:
    """A token tree, parents first; siblings stand in the order they were drawn.

    A chain has parents == (-1, 0, 1, ...).

    Attributes:
        tokens: The proposed token of each node.
        parents: Index of each node's parent node; -1 is the newest committed token.
        probs: [nodes, vocab], the law each node was sampled from, given its earlier
            siblings. A deterministic node in a mixed tree has a one-hot row. None
            means that all nodes are deterministic.
        by: The method that proposed it; "": nobody said.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    probs: Law | None = None
    by: str = ""

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"a draft has {len(self.tokens)} tokens but {len(self.parents)} parents")
        if any(not -1 <= parent < node for node, parent in enumerate(self.parents)):
            raise ValueError("a draft's parents must stand before their children")
        if self.probs is not None and len(self.probs) != len(self.tokens):
            raise ValueError(f"a draft has {len(self.tokens)} tokens but {len(self.probs)} rows of probabilities")

    @classmethod
    def chain(cls, tokens: Sequence[int], probs: Law | None = None) -> Draft:
        """A draft without branches: each token follows the one before it."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)), probs)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    def children(self, node: int) -> list[int]:
        """Children of a node (-1: of the newest committed token), in the order they were drawn."""
        return [child for child, parent in enumerate(self.parents) if parent == node]


EMPTY_DRAFT = Draft((), ())


@dataclass(frozen=True)
class Rows:
    """The last rows of a pass: row 0 is the newest committed token, draft node i is row i + 1.

    The arrays are views of buffers that the next pass overwrites.

    Attributes:
        logits: [rows, vocab].
        hidden: [rows, hidden_size], after the final norm (what Medusa heads read).
        inner: [rows, taps * hidden_size], inputs of some layers, where the graph gives them.
    """

    logits: Floats
    hidden: Floats | None = None
    inner: Floats | None = None


@dataclass(frozen=True)
class Verdict:
    """What a verifier decided about one draft.

    Attributes:
        path: Accepted nodes, root to leaf.
        token: One token of the target's own: a correction where a node was rejected, else a bonus.
        evaluated: How many nodes were tested.
    """

    path: tuple[int, ...]
    token: int
    evaluated: int


class Sampler(Protocol):
    """Turns logits into laws and laws into tokens.

    Draws are stateless: a draw depends on the seed, the position of the token it
    decides (how many tokens stand before it) and the stream, and on nothing else.
    So a seed gives the same text however a reply is cut, resumed or drafted.
    """

    def law(self, logits: Floats, prefix: Sequence[int]) -> Law:
        """Probabilities of the token after `prefix`: penalties, temperature, top-k, top-p, min-p."""
        ...

    def token(self, logits: Floats, prefix: Sequence[int]) -> int:
        """The token plain decoding puts after `prefix`: `draw(law(logits, prefix), len(prefix))`, faster."""
        ...

    def draw(self, law: Law, position: int, stream: int = 0) -> int:
        """Draws a token.

        Stream 0 decides what plain decoding shows, stream 1 drafts that come with their law,
        stream 2 what rejection draws (so that no draft is correlated with it).
        """
        ...

    def accept(self, probability: Any, position: int, trial: int = 0) -> bool:
        """True with the given probability; `trial` numbers the tests made at one position."""
        ...


@dataclass(frozen=True)
class Context:
    """What a drafter or verifier may look at.

    Attributes:
        tokens: All committed tokens, prompt first.
        rows: Rows of the last pass, kept rows first; None before the first.
        sampler: The reply's sampler; a sampled draft uses its stream 1.
        least: A node less likely to stand than this is not worth drafting; drafters that cannot tell ignore it.
    """

    tokens: Sequence[int]
    rows: Rows | None
    sampler: Sampler
    least: float = 0.0


class Target(Protocol):
    """A model with a cache. Draft models have the same shape."""

    @property
    def length(self) -> int:
        """Committed rows in the cache."""
        ...

    @property
    def capacity(self) -> int:
        """Most rows the cache can hold."""
        ...

    def padded(self, rows: int) -> int:
        """How many rows a pass of so many really runs."""
        ...

    def forward(self, pending: Sequence[int], draft: Draft = EMPTY_DRAFT) -> Rows:
        """Runs the tokens the cache lacks, then the draft's nodes, each seeing its own path.

        Args:
            pending: Committed tokens that are not in the cache yet, at least one. Many
                of them (a prompt) are run in chunks.
            draft: Nodes that follow the last pending token.

        Returns:
            1 + nodes rows; row 0 belongs to the last pending token. Pending rows are
            committed at once; draft rows wait for `commit`.
        """
        ...

    def commit(self, path: Sequence[int]) -> None:
        """Keeps these draft nodes of the last pass, in order; the others are gone."""
        ...

    def rewind(self, length: int) -> None:
        """Forgets all rows from `length` on. An offset moves; nothing is copied."""
        ...


class Drafter(Protocol):
    """Proposes tokens that the target will verify.

    A drafter may raise, or return garbage: the loop then goes on without it.
    """

    name: str

    def propose(self, context: Context, budget: int) -> Draft:
        """Proposes at most `budget` nodes to follow `context.tokens`."""
        ...

    def observe(self, context: Context, verdict: Verdict) -> None:
        """Told of each round's outcome; `context` already holds the committed tokens."""
        ...

    def rewind(self, length: int) -> None:
        """Forgets whatever it knows of tokens from `length` on."""
        ...


@runtime_checkable
class SamplingDrafter(Drafter, Protocol):
    """A drafter that can draw from a law of its own.

    Attributes:
        sample: Set before each reply: whether the verifier weighs that law (rejection) or
            compares tokens, for which the likeliest guess is better.
    """

    sample: bool


class Verifier(Protocol):
    """Decides which nodes of a draft stand."""

    name: str
    lossless: bool

    def judge(self, draft: Draft, logits: Floats, context: Context) -> Verdict:
        """Tests a draft against the target's rows.

        Args:
            draft: What was proposed after `context.tokens`.
            logits: [1 + nodes, vocab]; row 0 follows the newest committed token, row i + 1 node i.
            context: The state the draft was made in.
        """
        ...


class Director(Protocol):
    """Says, round by round, who drafts and how much. It asks drafters; the loop asks it."""

    def propose(self, context: Context, most: int) -> Draft:
        """Proposes at most `most` nodes to follow `context.tokens`; never raises."""
        ...

    def observe(self, context: Context, verdict: Verdict) -> None:
        """Told of each round's outcome; `context` already holds the committed tokens."""
        ...

    def rewind(self, length: int) -> None:
        """Forgets whatever its drafters know of tokens from `length` on."""
        ...

    def record(self, outcome: Round) -> None:
        """Told of each round once it is committed, with what it took."""
        ...


@dataclass(frozen=True)
class Round:
    """One round of the loop, as told to statistics and policies.

    Attributes:
        tokens: Committed by this round, stop cut applied; its last may be the target's own.
        accepted: How many of them were draft nodes.
        draft: What was proposed.
        evaluated: How many nodes were tested.
        corrected: True where the target's own token replaced a rejected node; False: a bonus.
        draft_ms: Time of `propose`.
        verify_ms: Time of the target's pass.
        host_ms: Everything else: judging, committing, bookkeeping.
        prefill: True for a reply's first round, which runs the prompt.
        finish: Why the reply ended with this round: "stop", "length"; None where it goes on.
    """

    tokens: tuple[int, ...]
    accepted: int
    draft: Draft
    evaluated: int
    corrected: bool
    draft_ms: float
    verify_ms: float
    host_ms: float
    prefill: bool = False
    finish: str | None = None
