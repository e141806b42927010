"""Recipes: a number format, its options, and what compensates the rounding, as one word.

    FORMAT[:OPTION...][+METHOD[:ARGUMENT]...]        int4:b64:sym+gptq+lowrank:16

The options of a format say how its grid differs from the table's (quant/formats.py):
b32, b64, b128: weights that share a scale; sym, asym, affine: what zero is; head4, head8, head32,
first8, first32, last8, last32: bits of the vocabulary and of the first and last layer (32: plain floats);
bf16: activations and cache in bfloat16 (CUDA).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from specedge.quant.formats import ALIASES, FORMATS, Format, find_format
from specedge.quant.grid import Grid
from specedge.runtime.errors import UsageError

__all__ = ["METHODS", "OPTIONS", "Method", "Recipe", "is_recipe", "parse_methods", "parse_recipe"]

METHODS = ("bias", "scale", "gptq", "lowrank", "distil", "auto", "none")
_SPELLINGS = {"distill": "distil"}
_ALONE = ("auto", "none")
_DEFAULT_RANK = 16
_LARGEST_RANK = 1 << 16

_GROUPS = ("b32", "b64", "b128")
_ZEROS = ("sym", "asym", "affine")
_KEPT = re.compile(r"(head|first|last)(4|8|32)")
_BFLOAT16 = "bf16"
OPTIONS = (*_GROUPS, *_ZEROS, _BFLOAT16, "head4", "head8", "head32", "first8", "first32", "last8", "last32")


@dataclass(frozen=True)
class Method:
    """One way to compensate the rounding.

    Attributes:
        name: One of `METHODS`, "none" excepted.
        argument: The rank of "lowrank"; None for others.
    """

    name: str
    argument: int | None = None

    def __str__(self) -> str:
        return self.name if self.argument is None else f"{self.name}:{self.argument}"


@dataclass(frozen=True)
class Recipe:
    """How a model is stored.

    Attributes:
        name: Format, options and methods as text: "int4:b64:sym+gptq".
        form: Its number format, options applied.
        methods: What compensates the rounding; (): nothing.
    """

    name: str
    form: Format
    methods: tuple[Method, ...] = ()

    @property
    def calibrated(self) -> bool:
        """Whether it needs statistics of the activations."""
        return self.form.static or bool(self.methods)

    def compensated(self, methods: tuple[Method, ...]) -> Recipe:
        """The same with other methods, and a name that says so."""
        return Recipe("+".join([self.name.partition("+")[0], *map(str, methods)]), self.form, methods)

    @property
    def rank(self) -> int:
        """Rank of the low-rank correction; 0: there is none."""
        return next((method.argument or 0 for method in self.methods if method.name == "lowrank"), 0)


def parse_recipe(
    text: str, device: str = "cpu", *, draft: bool = False, default_methods: tuple[Method, ...] = ()
) -> Recipe:
    """Reads a recipe.

    Args:
        text: The recipe.
        device: "cpu" or "cuda".
        draft: It is a draft's.
        default_methods: What compensates where the recipe names no method ("none" is one) and there is a grid.

    Raises:
        UsageError: A part of it is unknown, or makes no sense here.
    """
    stored, plus, methods = text.partition("+")
    name, *options = stored.split(":")
    row = find_format(name, device, draft=draft)
    form = _with_options(row, options, text)
    rounded = form.grid is not None
    chosen = parse_methods(methods) if plus else default_methods if rounded else ()
    if chosen and not rounded:
        raise UsageError(
            f"recipe {text!r}: {name} rounds no weight, so there is nothing to compensate; leave +{methods} out"
        )
    if row is not find_format(name, device):  # a draft's own row: called by its name, it is the same for a target
        stored = ":".join((row.name, *options))
    return Recipe(stored, form).compensated(chosen)


def parse_methods(text: str) -> tuple[Method, ...]:
    """Reads methods with "+" between them: "gptq+lowrank:16"; "none" and a rank of 0 are left out.

    Raises:
        UsageError: A method is unknown, stands twice, or excludes another.
    """
    methods = [_method(part) for part in text.split("+")]
    names = [method.name for method in methods]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UsageError(f"compensation {text!r}: {twice[0]} stands twice; leave one out")
    for name in _ALONE:
        if name in names and len(names) > 1:
            raise UsageError(f"compensation {text!r}: {name} excludes other methods; leave it or them out")
    return tuple(method for method in methods if method.name != "none" and method.argument != 0)


def is_recipe(text: str) -> bool:
    """Whether a text begins as a recipe does, with the name of a number format."""
    return re.split(r"[:+]", text, maxsplit=1)[0] in {
        *ALIASES,
        *(name for rows in FORMATS.values() for name in rows),
    }


def _method(text: str) -> Method:
    name, colon, argument = text.partition(":")
    name = _SPELLINGS.get(name, name)
    if name not in METHODS:
        raise UsageError(f"compensation {text!r} is unknown: choose one of {_choices(METHODS, 'lowrank:RANK')}")
    if name != "lowrank":
        if colon:
            raise UsageError(f"compensation {text!r}: {name} takes no argument; leave :{argument} out")
        return Method(name)
    if not colon:
        return Method(name, _DEFAULT_RANK)
    if not re.fullmatch(r"[0-9]{1,5}", argument) or int(argument) > _LARGEST_RANK:
        raise UsageError(f"compensation {text!r}: the rank is a whole number from 0 to {_LARGEST_RANK}")
    return Method(name, int(argument))


def _choices(names: Sequence[str], *more: str) -> str:
    return ", ".join((*(name for name in names if name != "lowrank"), *more))


def _with_options(form: Format, options: Sequence[str], text: str) -> Format:
    """The format as its options change it; a head that is kept follows the groups that are asked for."""
    if options and form.grid is None:
        raise UsageError(f"recipe {text!r}: {form.name} has no options; leave :{':'.join(options)} out")
    kinds = [_kind(option, text) for option in options]
    for kind in kinds:
        if kinds.count(kind) > 1:
            both = [option for option, found in zip(options, kinds, strict=True) if found == kind]
            raise UsageError(f"recipe {text!r}: {both[0]} and {both[1]} exclude each other; leave one out")
    for option in sorted(options, key=lambda option: bool(_KEPT.fullmatch(option))):
        form = _in_bfloat16(form, text) if option == _BFLOAT16 else _with_option(form, option, text)
    return form


def _kind(option: str, text: str) -> str:
    if option not in OPTIONS:
        raise UsageError(f"recipe {text!r}: option {option!r} is unknown; choose among {', '.join(OPTIONS)}")
    kept = _KEPT.fullmatch(option)
    return kept[1] if kept else "group" if option in _GROUPS else option if option == _BFLOAT16 else "zero"


def _in_bfloat16(form: Format, text: str) -> Format:
    if form.dtype != "float16" or form.explicit:
        raise UsageError(f"recipe {text!r}: bf16 is for --device cuda; leave it out")
    return replace(form, dtype="bfloat16")


def _with_option(form: Format, option: str, text: str) -> Format:
    grid = form.grid
    assert grid is not None
    kept = _KEPT.fullmatch(option)
    if kept:
        others = [(place, other) for place, other in form.kept if place != kept[1]]
        return replace(form, kept=(*others, (kept[1], _kept_grid(grid, int(kept[2])))))
    if not grid.group:
        raise UsageError(
            f"recipe {text!r}: {form.name} has one scale for each output, so {option} means nothing; leave it out"
        )
    if option in _GROUPS:
        size = int(option[1:])
        parts = [(place, other and replace(other, group=size)) for place, other in form.kept]
        return replace(form, grid=replace(grid, group=size), kept=tuple(parts))
    if option == "affine" and grid.bits == 8:
        raise UsageError(f"recipe {text!r}: affine is for 4 bits and fewer; choose sym or asym")
    if option == "affine":
        return replace(form, grid=replace(grid, kind="affine", symmetric=True))
    return replace(form, grid=replace(grid, kind="integer", symmetric=option == "sym"))


def _kept_grid(grid: Grid, bits: int) -> Grid | None:
    """The grid of a part that is kept in more (or fewer) bits than the rest: blocks, or plain floats."""
    if bits == 32:
        return None
    # The embedding has no operator for a real minimum, so that an affine grid's head has zero points.
    symmetric = bits == 8 or (grid.kind != "affine" and grid.symmetric)
    return Grid("integer", bits, grid.group or 32, symmetric=symmetric, scale_dtype="float16")
