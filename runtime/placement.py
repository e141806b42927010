"""Which execution provider runs which nodes of a session: what was asked for against what was given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnxruntime as ort

__all__ = ["RECORD_KEY", "placement_of", "strays"]

RECORD_KEY = "session.record_ep_graph_assignment_info"
"""The session option without which nothing is recorded."""

_HOST_WORK = frozenset({"Shape", "Slice", "Reshape", "Gather", "Concat", "Add", "Mul", "Cast", "Squeeze", "Unsqueeze"})
"""Operators on shapes and indices, a few bytes, which a GPU's provider itself may leave to the host."""

_MOST_HOST_NODES = 32
"""More of them than a graph has shapes and indices: then layers have landed there."""

_CPU = "CPUExecutionProvider"


def placement_of(session: ort.InferenceSession) -> Mapping[str, Mapping[str, int]] | None:
    """How many nodes of each operator each provider was given.

    Returns:
        By provider, by operator; None where this ONNX Runtime does not tell (1.32 does, 1.23 does not).
    """
    tell = getattr(session, "get_provider_graph_assignment_info", None)
    if tell is None:
        return None
    found: dict[str, Counter[str]] = {}
    for part in tell():
        found.setdefault(part.ep_name, Counter()).update(node.op_type for node in part.get_nodes())
    return found


def strays(placement: Mapping[str, Mapping[str, int]], wanted: str) -> Mapping[str, int]:
    """Operators of real work that landed on the CPU though another provider was wanted, and how many."""
    if wanted == _CPU:
        return {}
    found = placement.get(_CPU, {})
    small = {kind: count for kind, count in found.items() if kind in _HOST_WORK}
    return found if sum(small.values()) > _MOST_HOST_NODES else {k: n for k, n in found.items() if k not in small}
