"""Measures a bundle on this device, and finds for every method the draft length at which it is fastest.

1. Every method answers a few prompts with long drafts: what drafts take, how many tokens stand at each depth.
2. Passes of the target by width, v(n).
3. From both follows the speed at every length: (1 + E(n)) / (draft(n) + v(1 + n) + host), where E(n)
   is the sum over depths of the products of these shares. Where the shares are one and the same,
   E(n) = alpha (1 - alpha^n) / (1 - alpha), as in Leviathan, Kalman and Matias (arXiv 2211.17192).
   For heads, a tree of n nodes is expected to bring what their calibration says: since a node is
   never right more often than its parent, the n nodes that are right most often are the best of all
   trees of n nodes, which the dynamic programme of Sequoia (arXiv 2402.12374) would find as well;
   what is left to choose is n.
4. Each method decodes at the length that was found, side by side with plain decoding, to see how far the
   prediction was right. What is predicted is the speed-up: in milliseconds it is scaled by what plain
   decoding took in that very run over what its passes had taken before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from specedge.runtime.draft_temperature import best_temperatures
from specedge.runtime.drafters.broken import BrokenDrafter
from specedge.runtime.drafters.registry import COPIES, LOOKUP, MEDUSA, MERGED, is_draft
from specedge.runtime.engine import Engine
from specedge.runtime.errors import UsageError
from specedge.runtime.gains import ChainGain, Gain, TreeGain
from specedge.runtime.graph import Decoder
from specedge.runtime.options import AUTO, PLAIN
from specedge.runtime.pass_times import pass_times
from specedge.runtime.policy import LONGEST
from specedge.runtime.survey import Survey, survey
from specedge.runtime.tuning import Choice, Tuning, new_tuning

__all__ = ["Report", "as_json", "best_length", "tune"]

_WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, LONGEST + 1)
_PAST = 160
_LONG = 8
_TOKENS = 64
_MATCHES = (0, 1, 2, 3)

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Report:
    """What a tuning found.

    Attributes:
        tuning: For the bundle.
        warnings: What its user should know.
    """

    tuning: Tuning
    warnings: tuple[str, ...]


def tune(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    threads: int,
    note: str,
    progress: Progress = lambda *_: None,
) -> Report:
    """Tunes a bundle.

    Args:
        engine: The bundle, opened without a tuning.
        prompts: Token ids of the prompts to answer.
        threads: Threads that it computes with.
        note: What is measured with what, for people.
        progress: Told of the phase, and how much of it is done.

    Raises:
        UsageError: The bundle cannot be tuned.
    """
    if not isinstance(engine.target, Decoder):
        raise UsageError(f"{engine.folder}: a graph without a tree mask cannot be tuned; export it with SpecEdge")
    methods = [method for method in engine.methods if method not in (PLAIN, AUTO)]
    broken = {method: drafter.error for method in methods if (drafter := _broken(engine, method)) is not None}
    methods = [method for method in methods if method not in broken]
    if engine.capacity < _PAST + max(_WIDTHS) + 1:
        raise UsageError(f"{engine.folder}: a context of {engine.capacity} tokens is too small to be tuned")
    surveys = {}
    for number, method in enumerate(methods):
        progress("drafts", number, len(methods))
        surveys[method] = survey(engine, method, _LONG, prompts, tokens=_TOKENS)
    # Not before: memory that was just taken up is slower for a minute or two (seen: by a fifth).
    progress("passes", 0, 1)
    passes = pass_times([engine.target], _WIDTHS, _PAST)[0]
    host_ms = median(each.host_ms for one in surveys.values() for _, each in one.rounds)
    drafts = {method: _draft_times(one) for method, one in surveys.items()}
    planned = {
        method: best_length(_gain(engine, method, one), drafts[method], passes, host_ms, one.drafted)
        for method, one in surveys.items()
    }
    checked = _check(engine, planned, prompts, progress)
    choices = _choices(planned, checked, passes[1] + host_ms)
    tuning = new_tuning(
        engine.bundle,
        threads=threads,
        passes=passes,
        drafts=drafts,
        gains={method: _gains(one, method) for method, one in surveys.items()},
        matches=surveys[LOOKUP].matches(),
        choices=choices,
        method=min(choices, key=lambda method: choices[method].measured_ms),
        temperatures=_temperatures(engine, methods, prompts, progress),
        prompts=len(prompts),
        note=note,
    )
    unused = tuple(f"{method}: not measured, and not used here: {error}" for method, error in broken.items())
    return Report(tuning, (*unused, *_warnings(choices, drafts, passes)))


def _broken(engine: Engine, method: str) -> BrokenDrafter | None:
    """A drafter that cannot draft here at all: its weights or its device are not fit for it."""
    drafter = engine.drafting.drafter(method)
    return drafter if isinstance(drafter, BrokenDrafter) else None


def _choices(
    planned: Mapping[str, tuple[int, float, float]], checked: Mapping[str, Survey], plain_ms: float
) -> dict[str, Choice]:
    """What was planned against what was measured.

    A machine changes its pace within minutes: what plain decoding takes by now, over what its passes had
    taken, says how much.
    """
    pace = checked[PLAIN].ms_per_token / plain_ms
    choices = {PLAIN: Choice(0, plain_ms, checked[PLAIN].ms_per_token, 1.0)}
    for method, (length, tau, rate) in planned.items():
        measured = checked[method].ms_per_token
        choices[method] = Choice(length, pace / rate if rate else measured, measured, tau)
    return choices


def _temperatures(
    engine: Engine, methods: Sequence[str], prompts: Sequence[Sequence[int]], progress: Progress
) -> dict[str, dict[str, float]]:
    """Best temperatures of the drafts of every method that can draw."""
    progress("temperatures", 0, 1)
    draw = [method for method in methods if is_draft(method) or method == MEDUSA]
    found = {method: best_temperatures(engine, method, prompts) for method in draw}
    progress("temperatures", 1, 1)
    return {method: best for method, best in found.items() if best}


def _draft_times(one: Survey) -> tuple[float, float]:
    """Milliseconds of a draft, and of each of its tokens, from drafts of different lengths.

    A draft model takes its time for each token; heads and lookup take theirs at once.
    """
    times = one.draft_times()
    if not times:
        return 0.0, 0.0
    if any(is_draft(each.draft.by) for _, each in one.rounds):
        return 0.0, median(ms / tokens for tokens, ms in times)
    return median(ms for _, ms in times), 0.0


def _gain(engine: Engine, method: str, one: Survey) -> Gain:
    """What drafts of a method bring by their length."""
    if engine.trees and method in (MEDUSA, MERGED):
        gain = TreeGain(engine.drafting.calibration(MEDUSA).values)
        for _, each in one.rounds:
            gain.record(each)
        return gain
    shares = one.shares()
    return ChainGain(shares or [0.0], engine.drafting.longest(method))


def _gains(one: Survey, method: str) -> Mapping[int, tuple[float, ...]]:
    """Shares by depth; for what copies, by how many tokens lookup had found."""
    least = COPIES.get(method, max(_MATCHES) + 1)
    classes = {0: range(least), **{matched: (matched,) for matched in _MATCHES if matched >= least}}
    found = {matched: one.shares(founds if method in COPIES else None) for matched, founds in classes.items()}
    return {matched: shares for matched, shares in found.items() if shares}


def best_length(
    gain: Gain, draft: tuple[float, float], passes: Mapping[int, float], host_ms: float, drafted: float = 1.0
) -> tuple[int, float, float]:
    """The length at which a method is fastest, tokens a pass there, and tokens a millisecond.

    Args:
        gain: What drafts bring by their length.
        draft: Milliseconds of a draft, and of each of its tokens.
        passes: Milliseconds of a pass by its width.
        host_ms: What a round takes beside.
        drafted: Share of rounds that have a draft; the others, where lookup found nothing, are plain ones.
    """
    best = (0, 1.0, 0.0)
    for n, expected in enumerate(gain.expected(LONGEST)):
        if n:
            ms = drafted * (draft[0] + draft[1] * n + _between(passes, 1 + n)) + (1 - drafted) * passes[1] + host_ms
            tokens = 1 + drafted * expected
            if tokens / ms > best[2]:
                best = (n, tokens, tokens / ms)
    return best


def _between(passes: Mapping[int, float], width: int) -> float:
    """A pass of a width between two that were timed."""
    low = max(each for each in passes if each <= width)
    high = min(each for each in passes if each >= width)
    share = (width - low) / (high - low) if high > low else 0.0
    return passes[low] + share * (passes[high] - passes[low])


def _check(
    engine: Engine,
    planned: Mapping[str, tuple[int, float, float]],
    prompts: Sequence[Sequence[int]],
    progress: Progress,
) -> dict[str, Survey]:
    """Every method at its length, and plain decoding, prompt by prompt in turns."""
    found = {PLAIN: Survey(), **{method: Survey() for method in planned}}
    for number, ids in enumerate(prompts):
        progress("check", number, len(prompts))
        names = list(found)
        turn = number % len(names)
        for method in (*names[turn:], *names[:turn]):
            length = planned[method][0] if method in planned else 0
            survey(engine, method, length, [ids], tokens=_TOKENS, into=found[method])
    progress("check", len(prompts), len(prompts))
    return found


def _warnings(
    choices: Mapping[str, Choice], drafts: Mapping[str, tuple[float, float]], passes: Mapping[int, float]
) -> tuple[str, ...]:
    found = []
    for method, choice in choices.items():
        cost = drafts.get(method, (0.0, 0.0))[1] / passes[1]
        if cost >= 1:
            found.append(
                f"{method}: a drafted token takes {cost:.2f} of a pass of the target: even drafts that all stand "
                "gain nothing here; leave this draft out of the bundle"
            )
        elif method != PLAIN and choice.measured_ms > choices[PLAIN].measured_ms:
            found.append(
                f"{method}: slower than plain decoding on this device ({choice.measured_ms:.1f} against "
                f"{choices[PLAIN].measured_ms:.1f} ms a token); method auto will hardly use it"
            )
    return tuple(found)


def as_json(report: Report) -> dict[str, Any]:
    """A report for a file."""
    return {**asdict(report.tuning), "warnings": list(report.warnings)}
