"""A drafter that could not be made: it drafts nothing, and says why."""

from __future__ import annotations

from specedge.runtime.contracts import Context, Draft, Verdict

__all__ = ["BrokenDrafter"]


class BrokenDrafter:
    """Stands where a draft model would that is not fit to run.

    Args:
        name: "draft:NAME".
        error: Why it is not. It is raised when a draft is asked for, and ends drafting there.

    Attributes:
        error: As given.
    """

    final = True
    """Trying again would change nothing."""

    def __init__(self, name: str, error: Exception) -> None:
        self.name = name
        self.error = error

    def propose(self, context: Context, budget: int) -> Draft:
        """See `contracts.Drafter`."""
        raise self.error

    def observe(self, context: Context, verdict: Verdict) -> None:
        """See `contracts.Drafter`; there is nothing to keep."""

    def rewind(self, length: int) -> None:
        """See `contracts.Drafter`; there is nothing to rewind."""
