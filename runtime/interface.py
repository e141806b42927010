"""Whether a graph has the inputs and outputs that its manifest entry says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specedge.runtime.bundle import GraphSpec
from specedge.runtime.contracts import GraphNames
from specedge.runtime.errors import BundleError

if TYPE_CHECKING:
    import onnxruntime as ort

__all__ = ["check_interface"]

Values = dict[str, tuple[str, list[int | None]]]


def check_interface(session: ort.InferenceSession, spec: GraphSpec, path: Path, *, masked: bool = True) -> None:
    """Compares names, ranks, types and fixed dimensions of a speculative graph.

    Args:
        session: Of the graph.
        spec: Its entry in the manifest.
        path: Its file, for the message.
        masked: Whether it takes a mask.

    Raises:
        BundleError: They differ.
    """
    for wanted, given in ((_inputs(spec, masked), session.get_inputs()), (_outputs(spec), session.get_outputs())):
        found = {item.name: (item.type, item.shape) for item in given}
        if set(found) != set(wanted):
            names = ", ".join(sorted(set(found) ^ set(wanted))[:4])
            raise BundleError(f"{path}: inputs or outputs differ from {spec.file}'s manifest entry ({names})")
        for name, (kind, shape) in wanted.items():
            if found[name][0] != kind or not _fits(found[name][1], shape):
                raise BundleError(f"{path}: {name!r} is {found[name]} where the manifest says {(kind, shape)}")


def _inputs(spec: GraphSpec, masked: bool) -> Values:
    rows = spec.capacity if spec.fixed else None
    inputs: Values = {
        GraphNames.INPUT_IDS: ("tensor(int64)", [1, None]),
        GraphNames.POSITION_IDS: ("tensor(int64)", [1, None]),
        GraphNames.LOGIT_ROWS: ("tensor(int64)", [None]),
    }
    if masked:
        inputs[GraphNames.ATTENTION_BIAS] = (_floats(spec), [1, 1, None, rows])
    if spec.flavour == "gqa":
        inputs[GraphNames.LAST_INDEX] = ("tensor(int32)", [1])
        inputs[GraphNames.TOTAL] = ("tensor(int32)", [1])
    else:
        inputs[GraphNames.WRITE_INDEX] = ("tensor(int64)", [1])
    return inputs | _cache(spec, GraphNames.past)


def _outputs(spec: GraphSpec) -> Values:
    outputs: Values = {
        GraphNames.LOGITS: ("tensor(float)", [1, None, spec.vocab_size]),
        GraphNames.HIDDEN: ("tensor(float)", [1, None, spec.hidden_size]),
    }
    if spec.taps:
        outputs[GraphNames.INNER] = ("tensor(float)", [1, None, len(spec.taps) * spec.hidden_size])
    if spec.top:
        outputs[GraphNames.TOP_IDS] = ("tensor(int64)", [1, None, spec.top])
        outputs[GraphNames.TOP_LOGPROBS] = ("tensor(float)", [1, None, spec.top])
    return outputs | _cache(spec, GraphNames.present)


def _cache(spec: GraphSpec, name: Any) -> Values:
    shape = [1, spec.kv_heads, spec.capacity if spec.fixed else None, spec.head_dim]
    return {name(layer, kind): (_floats(spec), shape) for layer in range(spec.layers) for kind in ("key", "value")}


def _floats(spec: GraphSpec) -> str:
    return "tensor(float)" if spec.cache_dtype == "float32" else f"tensor({spec.cache_dtype})"


def _fits(found: Sequence[Any], wanted: Sequence[int | None]) -> bool:
    return len(found) == len(wanted) and all(
        want is None or have == want for have, want in zip(found, wanted, strict=True)
    )
