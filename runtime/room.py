"""Whether a model fits into memory, told before it is loaded: a clear refusal, where the system would kill.

On boards whose GPU shares the processor's memory the two are one number, and it is this one.
"""

from __future__ import annotations

from pathlib import Path

from specedge.runtime.errors import MemoryBudgetError
from specedge.runtime.machine import look_at_gpu

__all__ = ["Room", "available_memory", "memory_limit"]

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
_CACHED = ("inactive_file ", "total_inactive_file ")
"""Lines of memory.stat: copies of files, as of a bundle that was just hashed, which the system drops at need."""

_UNLIMITED = 1 << 60


class Room:
    """What an engine may still take.

    Args:
        budget: Most bytes of all it opens, which is then the only rule; None: whatever is free when it asks.
    """

    def __init__(self, budget: int | None = None) -> None:
        self._budget = budget
        self._taken = 0

    def take(self, what: str, size: int, device: str = "cpu") -> None:
        """Reserves memory for a model.

        Args:
            what: Its name, for the message.
            size: An estimate, bytes.
            device: Where it will run.

        Raises:
            MemoryBudgetError: It does not fit.
        """
        if self._budget is not None:
            if self._taken + size > self._budget:
                raise MemoryBudgetError(
                    f"{what} takes about {_mega(size)}, with {_mega(self._taken)} taken of a budget of "
                    f"{_mega(self._budget)}; raise the budget, lower the capacity, or export in fewer bits"
                )
        elif (free := _free(device, self._taken)) is not None and size > free:
            raise MemoryBudgetError(
                f"{what} takes about {_mega(size)} and {_mega(free)} are free; close other programs, lower the "
                "capacity, export in fewer bits, or give a memory budget if you know better"
            )
        self._taken += size


def available_memory() -> int | None:
    """Bytes that can be taken without swapping: of the system, or what the process's group is still allowed."""
    found = [size for size in (_of_system(), memory_limit()) if size is not None]
    return min(found, default=None)


def _free(device: str, taken: int) -> int | None:
    """Of a card with memory of its own all that is not ours; else the system's, which an integrated GPU shares."""
    gpu = look_at_gpu() if device != "cpu" else None
    return available_memory() if gpu is None or gpu.integrated else gpu.memory_bytes - taken


def memory_limit() -> int | None:
    """Bytes that the control group of a container still allows; None: it sets no limit."""
    for limit, used in _CGROUPS:
        try:
            most, taken = int(Path(limit).read_text()), int(Path(used).read_text())
        except (OSError, ValueError):  # "max", or another system
            continue
        if most < _UNLIMITED:
            return max(most - taken + _droppable(Path(used).parent), 0)
    return None


def _droppable(group: Path) -> int:
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return max((int(line.split()[1]) for line in lines if line.startswith(_CACHED)), default=0)


def _of_system(source: str = "/proc/meminfo") -> int | None:
    try:
        lines = Path(source).read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _mega(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
