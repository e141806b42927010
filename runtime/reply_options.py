"""The options of one reply as click takes them, under the names of `Options`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from specedge.runtime.options import ACCEPT_MODES, POLICIES, Options

__all__ = ["reply_options"]

_Command = TypeVar("_Command", bound=Callable[..., Any])
_DEFAULTS = Options()


def reply_options(command: _Command) -> _Command:
    """The options of one reply, under the names of `Options`."""
    for option in reversed(
        [
            click.option(
                "--method",
                help="auto (chooses among the others, round by round), none, draft, draft:NAME, medusa, "
                "medusa:2x3 (a dense tree), medusa+ngram or ngram.  [default: auto]",
            ),
            click.option(
                "--policy",
                type=click.Choice(POLICIES),
                help="How long drafts are.  [default: speed with method auto, else fixed]",
            ),
            click.option(
                "--accept",
                type=click.Choice(ACCEPT_MODES),
                default=_DEFAULTS.accept,
                show_default=True,
                help="exact and rejection are lossless; typical takes what the target finds likely enough: "
                "faster when sampling, NOT lossless.",
            ),
            click.option("--typical-epsilon", type=float, default=_DEFAULTS.typical_epsilon, show_default=True),
            click.option("--typical-delta", type=float, default=_DEFAULTS.typical_delta, show_default=True),
            click.option("--draft-length", type=int, help="Most tokens a draft.  [default: 4 fixed, up to 16 else]"),
            click.option(
                "--draft-temperature",
                type=float,
                help="Of drafts under rejection.  [default: as tuned, or the reply's]",
            ),
            click.option("--temperature", type=float, default=_DEFAULTS.temperature, help="0 is greedy.  [default: 0]"),
            click.option("--top-k", type=int, default=_DEFAULTS.top_k, help="0 keeps all.  [default: 0]"),
            click.option("--top-p", type=float, default=_DEFAULTS.top_p, show_default=True),
            click.option("--min-p", type=float, default=_DEFAULTS.min_p, show_default=True),
            click.option("--repetition-penalty", type=float, default=_DEFAULTS.repetition_penalty, show_default=True),
            click.option("--presence-penalty", type=float, default=_DEFAULTS.presence_penalty, show_default=True),
            click.option("--frequency-penalty", type=float, default=_DEFAULTS.frequency_penalty, show_default=True),
            click.option("--no-repeat-ngram", type=int, default=_DEFAULTS.no_repeat_ngram, show_default=True),
            click.option("--seed", type=int, help="Same seed, same text.  [default: a fresh one]"),
            click.option("--max-tokens", type=int, default=_DEFAULTS.max_tokens, show_default=True),
            click.option("--deadline-ms", type=float, help="The reply ends then, with what there is."),
            click.option("--max-step-ms", type=float, help="Most time between tokens, as far as passes allow."),
            click.option("--measure-baseline", is_flag=True, help="Decode plainly in one round of twelve, to compare."),
            click.option("--stop", multiple=True, help="Text that ends the reply; may be repeated."),
        ]
    ):
        command = option(command)
    return command
