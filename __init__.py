"""SpecEdge: exact speculative decoding for language models on edge devices.

`Engine` and `Options` are imported when they are first asked for, so that `import specedge` stays instant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specedge.runtime.engine import Engine
    from specedge.runtime.options import Options

__all__ = ["Engine", "Options", "__version__"]

__version__ = "0.1.0"

_HOMES = {"Engine": "specedge.runtime.engine", "Options": "specedge.runtime.options"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specedge' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
