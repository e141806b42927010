"""SpecEdge: exact speculative decoding for language models on edge devices.

What is exported is imported when it is first asked for, so that `import specedge` stays instant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specedge.runtime.engine import Engine
    from specedge.runtime.events import Finish, Notice, Token
    from specedge.runtime.options import Options
    from specedge.runtime.scheduler import Scheduler

__all__ = ["Engine", "Finish", "Notice", "Options", "Scheduler", "Token", "__version__"]

__version__ = "0.1.0"

_HOMES = {
    "Engine": "specedge.runtime.engine",
    "Finish": "specedge.runtime.events",
    "Notice": "specedge.runtime.events",
    "Options": "specedge.runtime.options",
    "Scheduler": "specedge.runtime.scheduler",
    "Token": "specedge.runtime.events",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specedge' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
