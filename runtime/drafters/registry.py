"""Methods by name. A new drafter is one file and one row here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from specedge.runtime.bundle import Manifest
from specedge.runtime.contracts import Drafter, Target
from specedge.runtime.drafters.broken import BrokenDrafter
from specedge.runtime.drafters.medusa import MedusaDrafter
from specedge.runtime.drafters.merged import MergedDrafter
from specedge.runtime.drafters.model import ModelDrafter
from specedge.runtime.drafters.ngram import NgramDrafter
from specedge.runtime.drafters.none import NoDrafter
from specedge.runtime.drafters.self_draft import SelfDrafter
from specedge.runtime.drafters.tree import dense_tree, is_shape
from specedge.runtime.errors import DeviceError, MemoryBudgetError, NumericError, UsageError
from specedge.runtime.graph import Decoder
from specedge.runtime.growing import GrowingDecoder
from specedge.runtime.heads import HeadsGraph
from specedge.runtime.opening import Opener
from specedge.runtime.options import PLAIN
from specedge.runtime.soundness import check_weights

__all__ = [
    "COPIES",
    "LOOKUP",
    "MEDUSA",
    "MERGED",
    "METHODS",
    "Method",
    "is_draft",
    "is_method",
    "method_names",
    "open_drafter",
]

MEDUSA, MERGED, LOOKUP = "medusa", "medusa+ngram", "ngram"
COPIES: Mapping[str, int] = {LOOKUP: 1, MERGED: 2}
"""Methods that copy what stood in the text before, and how many tokens they have to find again for it."""

_DRAFT = "draft"


@dataclass(frozen=True)
class Method:
    """One kind of drafter.

    Attributes:
        parts: Names of what the bundle holds for it, the default first; () where it holds nothing.
            "" stands for a drafter that needs nothing of the bundle.
        open: Makes the drafter for one of these names, or a variant.
        varies: Whether a text names a variant, which is not listed: "medusa:2x3".
    """

    parts: Callable[[Manifest], tuple[str, ...]]
    open: Callable[[str, Opener], Drafter]
    varies: Callable[[str], bool] = lambda text: False


METHODS: Mapping[str, Method] = {
    PLAIN: Method(lambda manifest: ("",), lambda part, opener: NoDrafter()),
    _DRAFT: Method(
        lambda manifest: tuple(manifest.drafts),
        lambda part, opener: _draft_model(f"{_DRAFT}:{part}", opener.draft(part)),
    ),
    MEDUSA: Method(
        lambda manifest: ("",) if MEDUSA in manifest.heads else (), lambda part, opener: _heads(part, opener), is_shape
    ),
    MERGED: Method(lambda manifest: ("",) if MEDUSA in manifest.heads else (), lambda part, opener: _merged(opener)),
    LOOKUP: Method(lambda manifest: ("",), lambda part, opener: NgramDrafter(min_ngram=COPIES[LOOKUP])),
}


def _draft_model(name: str, model: Target) -> Drafter:
    """A drafter over a draft model; one that drafts nothing and says why where the weights hold NaN or infinity."""
    if isinstance(model, (Decoder, GrowingDecoder)) and (error := _unsound(model)) is not None:
        return BrokenDrafter(name, error)
    if isinstance(model, Decoder) and model.spec.shares_cache:
        return SelfDrafter(name, model)
    return ModelDrafter(name, model)


def _heads(part: str, opener: Opener) -> Drafter:
    """A drafter over heads: a tree of the likeliest nodes of each row, or a dense one of the shape that `part` gives.

    Where a tree would not give plain decoding's tokens it is a chain.

    Raises:
        UsageError: There a shape asks for a tree.
    """
    name = f"{MEDUSA}:{part}" if part else MEDUSA
    spec = opener.manifest.heads[MEDUSA]
    if part and not opener.trees and set(part.split("x")) != {"1"}:
        raise UsageError(
            f"method {name!r}: a tree would not be exact on a target that rounds its activations "
            f"({opener.manifest.target.precision}); use medusa, which drafts a chain there"
        )
    tree = dense_tree(part, spec.heads, spec.guesses) if part else None
    heads = opener.heads(MEDUSA)
    error = _unsound(heads)
    return MedusaDrafter(name, heads, tree, chain=not opener.trees) if error is None else BrokenDrafter(name, error)


def _merged(opener: Opener) -> Drafter:
    """A drafter over heads and prompt lookup; single tokens that stood in the text before are no reason to copy."""
    heads = _heads("", opener)
    if not isinstance(heads, MedusaDrafter):
        return heads
    return MergedDrafter(MERGED, heads, NgramDrafter(min_ngram=COPIES[MERGED]), trees=opener.trees)


def _unsound(graph: Decoder | GrowingDecoder | HeadsGraph) -> NumericError | None:
    """What is wrong with a graph's weights; it is closed then."""
    try:
        check_weights(graph.path)
    except NumericError as error:
        graph.close()
        return error
    return None


def method_names(manifest: Manifest) -> tuple[str, ...]:
    """Every method a bundle holds, as `--method` takes them."""
    return tuple(
        f"{kind}:{part}" if part else kind for kind, method in METHODS.items() for part in method.parts(manifest)
    )


def is_draft(method: str) -> bool:
    """Whether a method is a draft model's."""
    return method.startswith(f"{_DRAFT}:")


def is_method(method: str, manifest: Manifest) -> bool:
    """Whether a bundle has this method: one of `method_names`, or a variant of one."""
    kind, _, part = method.partition(":")
    return method in method_names(manifest) or (
        kind in METHODS and bool(METHODS[kind].parts(manifest)) and METHODS[kind].varies(part)
    )


def open_drafter(method: str, opener: Opener) -> Drafter:
    """Makes the drafter of one of `method_names`, or of a variant.

    One whose model does not fit into memory, or whose device is not there, drafts nothing and says why.
    """
    kind, _, part = method.partition(":")
    try:
        return METHODS[kind].open(part, opener)
    except (DeviceError, MemoryBudgetError) as error:
        return BrokenDrafter(method, error)
