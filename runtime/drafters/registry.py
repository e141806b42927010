"""Methods by name. A new drafter is one file and one row here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from specedge.runtime.bundle import GraphSpec, Manifest
from specedge.runtime.contracts import Drafter, Target
from specedge.runtime.drafters.broken import BrokenDrafter
from specedge.runtime.drafters.model import ModelDrafter
from specedge.runtime.drafters.ngram import NgramDrafter
from specedge.runtime.drafters.none import NoDrafter
from specedge.runtime.drafters.self_draft import SelfDrafter
from specedge.runtime.errors import NumericError
from specedge.runtime.graph import Decoder
from specedge.runtime.growing import GrowingDecoder
from specedge.runtime.soundness import check_weights

__all__ = ["METHODS", "Method", "OpenModel", "method_names", "open_drafter"]

OpenModel = Callable[[GraphSpec], Target]
"""Opens one of the bundle's graphs."""


@dataclass(frozen=True)
class Method:
    """One kind of drafter.

    Attributes:
        parts: Names of what the bundle holds for it, the default first; () where it holds nothing.
            "" stands for a drafter that needs nothing of the bundle.
        open: Makes the drafter for one of these names.
    """

    parts: Callable[[Manifest], tuple[str, ...]]
    open: Callable[[str, Manifest, OpenModel], Drafter]


METHODS: Mapping[str, Method] = {
    "none": Method(lambda manifest: ("",), lambda part, manifest, open_model: NoDrafter()),
    "draft": Method(
        lambda manifest: tuple(manifest.drafts),
        lambda part, manifest, open_model: _draft_model(f"draft:{part}", open_model(manifest.drafts[part])),
    ),
    "ngram": Method(lambda manifest: ("",), lambda part, manifest, open_model: NgramDrafter()),
}


def _draft_model(name: str, model: Target) -> Drafter:
    """A drafter over a draft model; one that drafts nothing and says why where the weights hold NaN or infinity."""
    if isinstance(model, (Decoder, GrowingDecoder)):
        try:
            check_weights(model.path)
        except NumericError as error:
            model.close()
            return BrokenDrafter(name, error)
    if isinstance(model, Decoder) and model.spec.shares_cache:
        return SelfDrafter(name, model)
    return ModelDrafter(name, model)


def method_names(manifest: Manifest) -> tuple[str, ...]:
    """Every method a bundle holds, as `--method` takes them."""
    return tuple(
        f"{kind}:{part}" if part else kind for kind, method in METHODS.items() for part in method.parts(manifest)
    )


def open_drafter(method: str, manifest: Manifest, open_model: OpenModel) -> Drafter:
    """Makes the drafter of one of `method_names`."""
    kind, _, part = method.partition(":")
    return METHODS[kind].open(part, manifest, open_model)
