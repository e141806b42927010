"""From logits to a token: penalties, temperature, top-k, top-p, min-p and a seeded draw.

A draw is a race. Every token i of the law p gets an exponential time E_i that depends on the
seed, the position and the token alone; the token with the least E_i / p_i wins, which happens
with probability p_i (the Gumbel-max trick, written with exponentials). Two laws that race with
the same times mostly pick the same token: with probability at least (1 - TV) / (1 + TV), where
TV is their total variation distance (Daliri, Musco and Suresh, arXiv 2408.07978). A drafter that
races its own law on stream 0 therefore guesses well what the target will draw, and the target's
draw does not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specedge.runtime.contracts import Floats
from specedge.runtime.errors import NumericError, UsageError
from specedge.runtime.options import Options
from specedge.runtime.penalties import Penalties

__all__ = ["NumpySampler"]

Doubles = NDArray[np.float64]
Ids = NDArray[np.int64]

_RACE, _TEST = 0, 1  # what a random number is for: the last word of its counter
_UNIT = 2.0**-52
_HEIGHT = 32  # rows of the table that a vocabulary is folded to in search of its k-th largest
_BUCKETS = 4096
_LIGHTEST = 37.0  # exp(-37) is 1e-16: lighter tokens share the last bucket
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))


class NumpySampler:
    """The sampler of one reply. Not to be shared between threads.

    Args:
        options: Temperature, filters and penalties.
        prompt_length: Presence and frequency penalties count tokens from here on.
        seed: 0 to 2^64 - 1.
    """

    def __init__(self, options: Options, prompt_length: int, seed: int) -> None:
        self._options = options
        self._penalties = Penalties(options, prompt_length)
        self._philox = np.random.Philox(key=np.array([seed, 0], np.uint64))
        self._state: Any = self._philox.state
        self._all = np.arange(0)

    def law(self, logits: Floats, prefix: Sequence[int]) -> Doubles:
        """Probabilities of the token after `prefix`, [vocab], float64, summing to 1.

        The order is Hugging Face `generate`'s: penalties, temperature, top-k, top-p, min-p.
        At temperature 0 all probability is on the likeliest token.

        Raises:
            NumericError: The logits hold NaN or +inf, or nothing but -inf.
            UsageError: The penalties leave no token.
        """
        law = np.zeros(len(logits))
        if self._options.greedy:
            law[self.greedy_token(logits, prefix)] = 1.0
        else:
            ids, probabilities = self._support(logits, prefix)
            law[ids] = probabilities
        return law

    def token(self, logits: Floats, prefix: Sequence[int]) -> int:
        """The visible token after `prefix`: `draw(law(logits, prefix), len(prefix))`, without the dense law."""
        if self._options.greedy:
            return self.greedy_token(logits, prefix)
        ids, probabilities = self._support(logits, prefix)
        return self._race(ids, probabilities, len(prefix), 0)

    def greedy_token(self, logits: Floats, prefix: Sequence[int]) -> int:
        """The likeliest token after the penalties, whatever the temperature; the lowest id of a tie."""
        return _top(self._penalised(logits, prefix), len(prefix))

    def draw(self, law: Doubles, position: int, stream: int = 0) -> int:
        """Draws from a law, [vocab]; never a token of probability 0."""
        ids = np.flatnonzero(law)
        if not len(ids):
            raise ValueError(f"the law of position {position} has no probability")
        return self._race(ids, law[ids], position, stream)

    def accept(self, probability: Any, position: int, trial: int = 0) -> bool:
        """True with the given probability, independently of every draw and of other trials."""
        raw = self._raw(_TEST, position, trial)
        return bool(((raw >> 12) + 0.5) * _UNIT < probability)

    def _penalised(self, logits: Floats, prefix: Sequence[int]) -> NDArray[Any]:
        if not self._penalties.active:
            return logits
        _top(logits, len(prefix))  # so that a broken model is not blamed on the penalties
        penalised = self._penalties.apply(logits, prefix)
        if not np.isfinite(penalised.max()):
            raise UsageError(
                f"the penalties leave no token at position {len(prefix)}: "
                "raise no_repeat_ngram or bring repetition_penalty nearer to 1"
            )
        return penalised

    def _support(self, logits: Floats, prefix: Sequence[int]) -> tuple[Ids, Doubles]:
        """Tokens that can follow, ascending, and their probabilities; some may be 0."""
        options = self._options
        scores = self._penalised(logits, prefix)
        top = scores[_top(scores, len(prefix))]
        if 0 < options.top_k < len(scores):
            # Tokens that tie with the k-th all stay, as in Hugging Face.
            ids = np.flatnonzero(scores >= _kth_largest(scores, options.top_k))
            scores = scores[ids]
        else:
            ids = self._every(len(scores))
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the top to -inf
            exponents = scores.astype(np.float64)
            exponents -= float(top)
            exponents /= options.temperature
        weights: Doubles = np.exp(exponents)
        if options.top_p < 1.0:
            kept = _nucleus(exponents, weights, options.top_p)
            ids, weights = ids[kept], weights[kept]
        if options.min_p > 0.0:
            kept = np.flatnonzero(weights >= options.min_p)  # the likeliest weighs 1
            ids, weights = ids[kept], weights[kept]
        weights /= weights.sum()
        return ids, weights

    def _every(self, vocabulary: int) -> Ids:
        if len(self._all) != vocabulary:
            self._all = np.arange(vocabulary)
        return self._all

    def _race(self, ids: Ids, probabilities: Doubles, position: int, stream: int) -> int:
        times = _exponentials(ids, self._raw(_RACE, position, stream))
        np.divide(probabilities, times, out=times)
        return int(ids[np.argmax(times)])

    def _raw(self, purpose: int, position: int, number: int) -> int:
        """64 random bits of the Philox counter (0, position, number, purpose)."""
        # Setting the counter takes a fifth of the time of a new generator.
        self._state["state"]["counter"][:] = (0, position, number, purpose)
        self._state["buffer_pos"] = 4
        self._philox.state = self._state
        return int(self._philox.random_raw())


def _top(logits: NDArray[Any], position: int) -> int:
    """Index of the largest logit. numpy's argmax stops at a NaN, so one look checks them all."""
    top = int(logits.argmax())
    if not np.isfinite(logits[top]):
        raise NumericError(
            f"the model gave logits that are not finite at position {position}: "
            "export it in another precision (fp32 is the safest)"
        )
    return top


def _kth_largest(scores: NDArray[Any], k: int) -> Any:
    """The k-th largest score. The k-th largest of the columns' maxima is no larger, and sifts out nearly all first."""
    columns = len(scores) // _HEIGHT
    if 4 * k < columns:
        maxima = scores[: columns * _HEIGHT].reshape(_HEIGHT, columns).max(axis=0)
        scores = scores[scores >= np.partition(maxima, columns - k)[columns - k]]
    return np.partition(scores, len(scores) - k)[len(scores) - k]


def _nucleus(exponents: Doubles, weights: Doubles, mass: float) -> Ids:
    """Indices, ascending, of the likeliest tokens that hold `mass` of the weights.

    A token stays where the tokens before it hold less than the mass (at a tie the lower index
    comes first). Tokens fall into buckets by weight, and only the bucket that holds the bound is
    sorted: sorting a vocabulary of 49,152 takes 2 ms, this a sixth of it.

    Args:
        exponents: [n], at most 0: the logarithms of `weights`.
        weights: [n].
        mass: Share of the sum of the weights, 0 to 1.
    """
    span = min(-exponents.min(), _LIGHTEST)
    scale = -(_BUCKETS - 1) / span if span > 0 else 0.0
    heights = np.maximum(exponents, -span)
    heights *= scale
    bucket = np.minimum(heights, _BUCKETS - 1, out=heights).astype(np.intp)
    need = mass * weights.sum()
    held = np.cumsum(np.bincount(bucket, weights, minlength=_BUCKETS))
    edge = min(int(np.searchsorted(held, need)), _BUCKETS - 1)  # the first bucket with which enough is held
    if edge:
        need -= held[edge - 1]
    stays = bucket < edge
    band = np.flatnonzero(bucket == edge)
    band = band[np.argsort(-weights[band], kind="stable")]
    values = weights[band]
    stays[band[np.cumsum(values) - values < need]] = True
    return np.flatnonzero(stays)


def _exponentials(ids: Ids, key: int) -> Doubles:
    """An exponential variate per token id: the id-th output of SplitMix64 started at `key`."""
    # In place, because fresh pages of memory would cost more than the arithmetic.
    bits = ids.astype(np.uint64)
    bits += np.uint64(1)
    bits *= _GOLDEN
    bits += np.uint64(key)
    spare = np.empty_like(bits)
    for shift, factor in _ROUNDS:
        np.right_shift(bits, shift, out=spare)
        bits ^= spare
        bits *= factor
    np.right_shift(bits, np.uint64(31), out=spare)
    bits ^= spare
    bits >>= np.uint64(12)
    times = spare.view(np.float64)
    times[:] = bits
    times += 0.5
    times *= _UNIT  # uniform, never 0 and never 1
    np.log(times, out=times)
    return np.negative(times, out=times)
