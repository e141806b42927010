"""Measures every method against plain decoding, side by side in one process, and against other bundles.

Each prompt is answered by all contenders before the next prompt comes, in an order that rotates
from prompt to prompt, so that a machine that grows warm or busy slows all of them alike. Answers
are greedy; token ids are counted, up to and including the end-of-text token. Only decoding is
timed: the first pass, which runs the prompt and gives the first token, stands apart.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import specedge
from specedge.runtime.bench_report import OTHER_BUNDLE, PLAIN, summarise, table, write_result
from specedge.runtime.errors import UsageError
from specedge.runtime.events import Finish
from specedge.runtime.graph import Decoder
from specedge.runtime.options import AUTO, DEFAULT_DRAFT_LENGTH, Options
from specedge.runtime.overhead import loop_cost
from specedge.runtime.pass_times import compare_passes
from specedge.runtime.prompts import Prompt, read_prompts

if TYPE_CHECKING:
    from specedge.runtime.engine import Engine

__all__ = ["PLAIN", "Progress", "Prompt", "read_prompts", "run", "table", "write_result"]

_WARM_UP_TOKENS = 8
_AT_LENGTH = re.compile(r".+@[1-9][0-9]?")

Progress = Callable[[int, int, str], None]
"""Told how many answers are done, of how many, and which contender answers next."""


@dataclass(frozen=True)
class _Contender:
    """A method of a bundle, under the name it has in the result."""

    name: str
    engine: Engine
    options: Options

    def answer(self, ids: Sequence[int]) -> Finish:
        """One whole reply, nothing of it cached from earlier ones."""
        self.engine.reset()
        *_, last = self.engine.generate(ids, self.options)
        if not isinstance(last, Finish):
            raise RuntimeError(f"{self.name} ended without a finish event")
        return last


def run(
    bundle: str | os.PathLike[str],
    prompts: str | os.PathLike[str] | Sequence[Prompt],
    *,
    methods: Sequence[str] | None = None,
    baselines: Sequence[str | os.PathLike[str]] = (),
    limit: int | None = None,
    max_tokens: int = 128,
    draft_length: int = DEFAULT_DRAFT_LENGTH,
    draft_lengths: Mapping[str, int] | None = None,
    threads: int | None = None,
    device: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Compares the methods of a bundle.

    Args:
        bundle: The bundle's folder.
        prompts: Prompts, or a file of them (`read_prompts`), each asked as a chat of one user message.
        methods: Names as `--method` takes them, "medusa@3" for drafts of at most 3; None: all that the bundle
            holds. Plain decoding, "none", always takes part.
        baselines: Folders of other bundles of the same model, whose plain decoding takes part as "none@FOLDER".
        limit: Most prompts of each category that are taken from a file; None: all.
        max_tokens: Of a reply, at most. Prompts that leave no room for them are skipped and counted.
        draft_length, draft_lengths: Most tokens drafted a round, where a method does not choose; of single methods.
        threads, device: Of the engines; None: their default.
        progress: Told of each answer.

    Returns:
        What `specedge bench --out` writes; `bench_report.summarise`, `overhead.loop_cost` and
        `pass_times.compare_passes` define the numbers.

    Raises:
        UsageError: A bad prompt file, an unknown method, a baseline of another model.
        BundleError: A bundle that cannot be opened.
    """
    from specedge.runtime.engine import Engine

    if isinstance(prompts, (str, os.PathLike)):
        prompts = read_prompts(Path(prompts), limit)
    options = Options(max_tokens=max_tokens, draft_length=draft_length)
    load = _load_average()
    with ExitStack() as stack:
        engines = [stack.enter_context(Engine(each, threads=threads, device=device)) for each in (bundle, *baselines)]
        contenders = _contenders(engines, methods, [Path(folder) for folder in baselines], options, draft_lengths or {})
        asked = _fitting(engines, prompts, max_tokens)
        replies = _measure(contenders, [ids for _, ids in asked], progress)
        return {
            **_facts(engines[0], threads, device),
            "prompts": len(asked),
            "skipped": len(prompts) - len(asked),
            "max_tokens": max_tokens,
            "draft_length": draft_length,
            **({"draft_lengths": draft_lengths} if draft_lengths else {}),
            "methods": summarise([prompt.category for prompt, _ in asked], replies),
            "loop": loop_cost(engines[0]),
            "passes": compare_passes(_graphs(contenders)),
            "notes": _notes(replies),
            **_circumstances(load),
        }


def _contenders(
    engines: Sequence[Engine],
    methods: Sequence[str] | None,
    baselines: Sequence[Path],
    options: Options,
    draft_lengths: Mapping[str, int],
) -> list[_Contender]:
    """Plain decoding first, then the methods, then the other bundles."""
    engine, *others = engines
    if methods is not None and not methods:
        raise UsageError("no method is named; give some with commas between, or leave --methods out")
    names = dict.fromkeys((PLAIN, *(engine.methods if methods is None else methods)))
    contenders = []
    for name in names:
        base, _, given = name.rpartition("@") if _AT_LENGTH.fullmatch(name) else (name, "", "")
        method = engine.resolve_method(base)
        if given and method in (PLAIN, AUTO):
            raise UsageError(f"method {name!r}: {method} has no draft length; leave @{given} out")
        length = int(given) if given else draft_lengths.get(name, None if method == AUTO else options.draft_length)
        contenders.append(_Contender(name, engine, replace(options, method=method, draft_length=length)))
    for folder, other in zip(baselines, others, strict=True):
        name = OTHER_BUNDLE + folder.resolve().name
        if any(contender.name == name for contender in contenders):
            raise UsageError(f"{folder}: two baselines have this folder name; rename one")
        if _vocabulary(other) != _vocabulary(engine):
            raise UsageError(f"{folder}: a bundle of another model (its tokenizer differs); give one of the same model")
        contenders.append(_Contender(name, other, replace(options, method=PLAIN)))
    return contenders


def _graphs(contenders: Sequence[_Contender]) -> dict[str, Decoder]:
    """The speculative graphs that took part, by the contender that runs them; plain decoding's is the target."""
    graphs = {}
    for contender in contenders:
        model = contender.engine.model(contender.options.method or PLAIN)
        if isinstance(model, Decoder):
            graphs[contender.name] = model
    return graphs


def _vocabulary(engine: Engine) -> tuple[int, str]:
    """Two bundles that agree here can be asked the same token ids."""
    manifest = engine.manifest
    return manifest.vocab_size, manifest.files["tokenizer.json"].sha256


def _fitting(engines: Sequence[Engine], prompts: Sequence[Prompt], max_tokens: int) -> list[tuple[Prompt, list[int]]]:
    """The prompts that leave room for a whole reply in every cache, with their token ids."""
    room = min(
        graph.capacity for engine in engines for graph in (engine.manifest.target, *engine.manifest.drafts.values())
    )
    asked = []
    for prompt in prompts:
        ids = engines[0].text.chat_prompt([{"role": "user", "content": prompt.text}])
        if len(ids) + max_tokens <= room:
            asked.append((prompt, list(ids)))
    if not asked:
        raise UsageError(f"no prompt leaves room for {max_tokens} tokens in a context of {room}; lower --max-tokens")
    return asked


def _measure(
    contenders: Sequence[_Contender], asked: Sequence[Sequence[int]], progress: Progress | None
) -> dict[str, list[Finish]]:
    """Every contender's answer to every prompt, in the order of the prompts."""
    for contender in contenders:
        short = min(
            _WARM_UP_TOKENS + (contender.options.draft_length or 0), contender.options.max_tokens or _WARM_UP_TOKENS
        )
        replace(contender, options=replace(contender.options, max_tokens=short)).answer(asked[0])
    replies: dict[str, list[Finish]] = {contender.name: [] for contender in contenders}
    total = len(asked) * len(contenders)
    done = 0
    for turn, ids in enumerate(asked):
        first = turn % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            if progress is not None:
                progress(done, total, contender.name)
            replies[contender.name].append(contender.answer(ids))
            done += 1
    if progress is not None:
        progress(done, total, "")
    return replies


def _facts(engine: Engine, threads: int | None, device: str | None) -> dict[str, Any]:
    from specedge.runtime.providers import default_threads

    manifest = engine.manifest
    return {
        "model": manifest.name,
        "precision": manifest.target.precision,
        "device": device or manifest.device,
        "threads": default_threads() if threads is None else threads,
    }


def _notes(replies: Mapping[str, Sequence[Finish]]) -> list[str]:
    """What went wrong on the way (a drafter that failed and was left out), each once."""
    return list(
        dict.fromkeys(f"{name}: {note}" for name, answers in replies.items() for a in answers for note in a.stats.notes)
    )


def _circumstances(load: float | None) -> dict[str, Any]:
    return {"load_average": {"before": load, "after": _load_average()}, "versions": _versions()}


def _load_average() -> float | None:
    """Processes that wanted a core in the last minute; None where the system does not say."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _versions() -> dict[str, str]:
    import numpy
    import onnxruntime

    return {
        "specedge": specedge.__version__,
        "onnxruntime": onnxruntime.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
