"""What method auto chooses among, and what is known of it beforehand: from a tuning, from a calibration, or a guess."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from specedge.runtime.bundle import Manifest
from specedge.runtime.costs import Costs, shape_of
from specedge.runtime.drafters.registry import COPIES, LOOKUP, MEDUSA, MERGED, is_draft
from specedge.runtime.gains import GUESSED, MEASURED, ChainGain, Gain, TreeGain
from specedge.runtime.opening import Opener
from specedge.runtime.policy import LONGEST, Candidate
from specedge.runtime.tuning import Tuning

__all__ = ["auto_methods", "candidates", "longest", "make_costs"]

_COPIED = {0: 0.2, 1: 0.2, 2: 0.45, 3: 0.6}
"""Guess of how often a copied token is right, by how many tokens before it were found again."""

_LONGER_MATCH = 0.75
_SELF, _OTHER = 0.9, 0.6
_HEADS_COST, _MERGED_COST = 0.06, 0.065
_OVERHEAD = 1.4
_LEAST_COST = 0.05


def auto_methods(methods: Sequence[str], tuning: Tuning | None) -> tuple[str, ...]:
    """The methods of a bundle among which auto chooses.

    Heads with lookup stand for heads alone. Of several draft models the one that a tuning found
    fastest takes part, else the first: each has weights of its own to hold.
    """
    drafts = [method for method in methods if is_draft(method)]
    if tuning is not None:
        drafts.sort(key=lambda method: tuning.speed(method), reverse=True)
    heads = [MERGED] if MERGED in methods else []
    return (*drafts[:1], *heads, LOOKUP)


def make_costs(manifest: Manifest, tuning: Tuning | None, padded: Callable[[int], int]) -> Costs:
    """What rounds take, as far as it is known before the first.

    Args:
        manifest: The bundle's.
        tuning: What was measured on this device.
        padded: How many rows a pass of so many really runs.
    """
    if tuning is not None:
        passes = {padded(width): ms for width, ms in tuning.passes.items()}
        return Costs(passes, tuning.drafts, measured=True, padded=padded)
    drafts = {MEDUSA: (_HEADS_COST, 0.0), MERGED: (_MERGED_COST, 0.0)}
    for name, spec in manifest.drafts.items():
        share = _OVERHEAD * spec.weight_bytes / max(manifest.target.weight_bytes, 1)
        drafts[f"draft:{name}"] = (0.0, max(share, _LEAST_COST))
    return Costs(shape_of(manifest.target.precision), drafts, padded=padded)


def candidates(methods: Sequence[str], opener: Opener, tuning: Tuning | None) -> list[Candidate]:
    """These methods as a policy takes them."""
    return [
        Candidate(
            method,
            _gain_of(method, opener, tuning),
            copies=COPIES.get(method, 0),
            free=method == LOOKUP,
            tells=method in (MEDUSA, MERGED),
        )
        for method in methods
    ]


def _gain_of(method: str, opener: Opener, tuning: Tuning | None) -> Callable[[int], Gain]:
    known: Mapping[int, Sequence[float]] = {} if tuning is None else tuning.gains.get(method, {})
    heads = method in (MEDUSA, MERGED)
    values = opener.calibration(MEDUSA).values if heads else ()  # now: a damaged one is told before a reply begins

    def gain(matched: int) -> Gain:
        if heads and opener.trees:
            return TreeGain(values)
        most = longest(method, opener, matched)
        if known.get(matched):
            return ChainGain(known[matched], most, MEASURED)
        return ChainGain(_guess(method, opener, matched), most, MEASURED if heads and not matched else GUESSED)

    return gain


def longest(method: str, opener: Opener, matched: int = 0) -> int:
    """Longest draft: heads draft one token each, what is copied may be longer."""
    if method in (MEDUSA, MERGED) and not matched:
        return opener.manifest.heads[MEDUSA].heads
    return LONGEST


def _guess(method: str, opener: Opener, matched: int) -> Sequence[float]:
    """Shares of tokens that stand, by depth, as the first depths' conditional ones."""
    if method == LOOKUP or (method == MERGED and matched):
        return [_COPIED.get(matched, _LONGER_MATCH)]
    if method in (MEDUSA, MERGED):
        reached = [row[0] for row in opener.calibration(MEDUSA).top]
        return [min(after / max(before, 1e-9), 1.0) for before, after in zip([1.0, *reached], reached, strict=False)]
    spec = opener.manifest.drafts.get(method.partition(":")[2])
    return [_SELF if spec is not None and spec.shares_cache and not spec.cache_layers else _OTHER]
