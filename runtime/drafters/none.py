"""Plain decoding: proposes nothing."""

from __future__ import annotations

from specedge.runtime.contracts import EMPTY_DRAFT, Context, Draft, Verdict
from specedge.runtime.options import PLAIN

__all__ = ["NoDrafter"]


class NoDrafter:
    """The drafter of method "none"."""

    name = PLAIN

    def propose(self, context: Context, budget: int) -> Draft:
        return EMPTY_DRAFT

    def observe(self, context: Context, verdict: Verdict) -> None:
        pass

    def rewind(self, length: int) -> None:
        pass
