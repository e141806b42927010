"""Compares drafts of one model: every number format with every compensation, against the same target.

All drafts are measured teacher-forced on the target's own greedy answers (export/agreement.py) and
timed a pass at a time beside the target (export/trials.py). The few that promise most are put into
a bundle and timed as they decode.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from specedge.export.agreement import TargetLogits
from specedge.export.checkpoint import Checkpoint
from specedge.export.compare_options import CompareOptions
from specedge.export.compensate import TextCalibration
from specedge.export.graphs import check_recipes
from specedge.export.memory import count_parameters
from specedge.export.options import ExportOptions, Progress
from specedge.export.pipeline import export
from specedge.export.prepare import PreparedCalibration, prepare_calibration
from specedge.export.recipes import write_recipe
from specedge.export.sources import resolve
from specedge.export.trials import Clock, Trial, opened, run_trial
from specedge.export.writer import check_space
from specedge.export.writing import answer_prompts
from specedge.models import find_family, read_dimensions
from specedge.quant.recipe import Recipe
from specedge.runtime.bundle import Bundle, FileEntry, GraphSpec, hash_file, open_bundle, write_manifest
from specedge.runtime.errors import UnsupportedModelError, UsageError
from specedge.runtime.graph import Decoder, cache_shape
from specedge.runtime.pass_times import PAST
from specedge.runtime.prompts import Prompt
from specedge.runtime.text import Text as Tokenizer

__all__ = ["CompareOptions", "Timer", "compare"]

_log = logging.getLogger("specedge.export")

_BASELINE = "int4"
_ROWS = 2048
_SPARE_ROWS = 16  # for the widest pass that is timed


class Timer(Protocol):
    """Times methods of a bundle as they decode: `specedge.runtime.bench.run`, which only a command may reach."""

    def __call__(
        self,
        bundle: Path,
        prompts: Sequence[Prompt],
        *,
        methods: Sequence[str],
        baselines: Sequence[Path],
        max_tokens: int,
        draft_lengths: Mapping[str, int],
        threads: int | None,
        progress: Callable[[int, int, str], None],
    ) -> Mapping[str, Any]: ...


def compare(
    model: str,
    prompts: Sequence[Prompt],
    options: CompareOptions,
    *,
    timer: Timer,
    progress: Progress,
    save: Callable[[Mapping[str, Any]], None],
) -> dict[str, Any]:
    """Compares drafts of a model.

    Args:
        model: As `export` takes it.
        prompts: To choose from; calibration may use none of them.
        options: What to compare.
        timer: Times methods of a bundle.
        progress: Told how far each phase is.
        save: Given the result so far, after every draft.

    Returns:
        The result, as `compare_report` describes it.

    Raises:
        UsageError: Prompts that calibration uses too, or none that fits the context.
        SpecEdgeError: As `export`, of the target. A draft that cannot be made is part of the result.
    """
    chosen = options.choose(prompts)
    checkpoint = resolve(model, revision=options.revision, offline=options.offline, progress=progress)
    capacity = _checked(checkpoint, options)
    with (
        TemporaryDirectory(prefix="specedge-compare-") as name,
        prepare_calibration(
            checkpoint,
            capacity=capacity,
            prompts=options.calibration_prompts,
            folder=options.calibration,
            threads=options.threads,
            progress=progress,
        ) as calibration,
    ):
        folder = Path(name)
        _check_room(checkpoint, folder, options)
        plain = _exported(model, folder / _BASELINE, _BASELINE, capacity, options, progress)
        bundle = _exported(model, folder / "bundle", options.precision, capacity, options, progress)
        calibration.use(bundle.folder, bundle.manifest.target)
        asked = _fitting(bundle, chosen, options.max_tokens)
        _check_apart(asked, calibration)
        result = _header(bundle, chosen, asked, options)
        write = partial(_write, checkpoint, calibration, capacity)
        best = _measured(bundle, plain, [ids for _, ids in asked], write, options, result, progress, save)
        if best:
            result["timed"] = _timed(bundle, plain, best, [prompt for prompt, _ in asked], options, timer, progress)
        result["complete"] = True
        save(result)
        return result


def _measured(
    bundle: Bundle,
    plain: Bundle,
    asked: Sequence[Sequence[int]],
    write: Callable[[Recipe, Path], GraphSpec],
    options: CompareOptions,
    result: dict[str, Any],
    progress: Progress,
    save: Callable[[Mapping[str, Any]], None],
) -> list[Trial]:
    """Measures target, baseline and every draft into the result; returns the drafts to time."""
    with opened(*_graph(bundle), _cache_rows(bundle, asked, options), options.threads) as target:
        logits, clock = _measured_target(bundle, target, asked, options, progress)
        with opened(*_graph(plain), target.capacity, options.threads) as other:
            plain_ms, plain_cost = clock.cost(other)
        result["tokens"], result["target_nll"] = logits.tokens, round(logits.nll, 5)
        result["past"] = clock.past
        result["verify_ms"] = {str(length): round(ms, 3) for length, ms in clock.verify.items()}
        result["baseline"] = {"recipe": _BASELINE, "ms": round(plain_ms, 3), "cost": round(plain_cost, 4)}
        return _run_trials(write, bundle, logits, clock, options, result, progress, save)


def _run_trials(
    write: Callable[[Recipe, Path], GraphSpec],
    bundle: Bundle,
    logits: TargetLogits,
    clock: Clock,
    options: CompareOptions,
    result: dict[str, Any],
    progress: Progress,
    save: Callable[[Mapping[str, Any]], None],
) -> list[Trial]:
    """Adds a row for each recipe; returns those to time, the others are deleted from the disk."""
    total = len(logits.texts) * len(options.recipes)
    best: list[Trial] = []
    for number, recipe in enumerate(options.recipes):
        trial = run_trial(
            recipe.name,
            partial(write, recipe),
            bundle.folder / "drafts" / f"self-{recipe.name}",
            logits,
            clock,
            emulated=recipe.form.emulated,
            progress=_told(progress, "measure drafts", number * len(logits.texts), total),
        )
        result["rows"].append(_row(recipe, trial))
        _log.info("%s", _said(recipe, trial))
        save(result)
        ranked = sorted([*best, trial], key=lambda each: -each.promise)
        best = [each for each in ranked[: options.time_best] if each.promise]
        for left in ranked:
            if left not in best:
                left.delete()
    progress("measure drafts", total, total)
    return best


def _write(
    checkpoint: Checkpoint, calibration: TextCalibration, capacity: int, recipe: Recipe, folder: Path
) -> GraphSpec:
    """Writes a draft as `specedge export` writes it."""
    return write_recipe(checkpoint, folder, recipe, calibration, stem="draft", capacity=capacity, draft=True)


def _told(progress: Progress, phase: str, before: int = 0, of: int | None = None) -> Callable[[int, int], None]:
    """Counts within a phase, `before` of whose steps are done."""
    return lambda done, total: progress(phase, before + done, total if of is None else of)


def _measured_target(
    bundle: Bundle, target: Decoder, asked: Sequence[Sequence[int]], options: CompareOptions, progress: Progress
) -> tuple[TargetLogits, Clock]:
    """Answers, their logits, and times."""
    told, ends = _told(progress, "answer prompts"), bundle.manifest.eos_token_ids
    texts = answer_prompts(target, asked, length=options.max_tokens, ends=ends, progress=told)
    logits = TargetLogits.record(target, texts, bundle.folder.parent, _told(progress, "measure target"))
    return logits, Clock.of(target, min(PAST, target.capacity - 16), options.threads)


def _timed(
    bundle: Bundle,
    plain: Bundle,
    best: Sequence[Trial],
    prompts: Sequence[Prompt],
    options: CompareOptions,
    timer: Timer,
    progress: Progress,
) -> dict[str, Any]:
    """Times the best drafts as they decode, on one prompt of each category, beside plain decoding of both bundles."""
    drafts, files = {}, dict(bundle.manifest.files)
    for trial in best:
        assert trial.spec is not None
        spec = replace(trial.spec, file=f"drafts/{trial.folder.name}/{trial.spec.file}")
        drafts[trial.folder.name] = replace(spec, shares_cache=cache_shape(spec) == cache_shape(bundle.manifest.target))
        for path in sorted(trial.folder.iterdir()):
            name = path.relative_to(bundle.folder).as_posix()
            files[name] = FileEntry(path.stat().st_size, hash_file(path))
    write_manifest(bundle.folder, replace(bundle.manifest, drafts=drafts, files=files))
    names = {trial.recipe: f"draft:{trial.folder.name}" for trial in best}
    lengths = {trial.recipe: int((trial.numbers or {})["estimate"]["draft_length"]) for trial in best}
    few = [
        next(prompt for prompt in prompts if prompt.category == category)
        for category in {p.category: 0 for p in prompts}
    ]
    found = timer(
        bundle.folder,
        few,
        methods=list(names.values()),
        baselines=[plain.folder],
        max_tokens=options.max_tokens,
        draft_lengths={names[recipe]: length for recipe, length in lengths.items()},
        threads=options.threads,
        progress=lambda done, total, _: progress("time the best", done, total),
    )
    methods = found["methods"]
    other = methods[f"none@{plain.folder.name}"]["ms_per_token"]["median"]
    return {
        "prompts": len(few),
        "plain_ms": methods["none"]["ms_per_token"]["median"],
        "baseline_ms": other,
        "notes": list(found["notes"]),
        "drafts": {
            recipe: {**_decoding(methods[name], other), "draft_length": lengths[recipe]}
            for recipe, name in names.items()
        },
    }


def _decoding(block: Mapping[str, Any], baseline_ms: float | None) -> dict[str, Any]:
    """What of a method's numbers belongs into the result."""
    ms = block["ms_per_token"]["median"]
    return {
        "speedup": block["speedup"]["median"],
        "speedup_baseline": round(baseline_ms / ms, 4) if baseline_ms and ms else None,
        "ms_per_token": ms,
        "tau": block["tau"],
        "alpha": block["alpha"],
        "equal": block["equal"],
    }


def _header(
    bundle: Bundle, chosen: Sequence[Prompt], asked: Sequence[tuple[Prompt, Sequence[int]]], options: CompareOptions
) -> dict[str, Any]:
    manifest = bundle.manifest
    return {
        "model": manifest.name,
        "precision": manifest.target.precision,
        "device": manifest.device,
        "threads": options.threads,
        "prompts": len(asked),
        "skipped": len(chosen) - len(asked),
        "max_tokens": options.max_tokens,
        "exporter": manifest.exporter,
        "complete": False,
        "rows": [],
    }


def _row(recipe: Recipe, trial: Trial) -> dict[str, Any]:
    form, _, methods = recipe.name.partition("+")
    row = {"recipe": recipe.name, "format": form, "methods": methods or "none"}
    return {**row, "error": trial.error} if trial.numbers is None else {**row, **trial.numbers}


def _said(recipe: Recipe, trial: Trial) -> str:
    """One line about a draft."""
    if trial.numbers is None:
        return f"{recipe.name}: {trial.error}"
    seconds = sum(trial.numbers["seconds"].values())
    return f"{recipe.name}: α {trial.numbers['alpha']:.3f}, KL {trial.numbers['kl']:.4f} ({seconds:.0f} s)"


def _graph(bundle: Bundle) -> tuple[Path, GraphSpec]:
    return bundle.path(bundle.manifest.target.file), bundle.manifest.target


def _cache_rows(bundle: Bundle, asked: Sequence[Sequence[int]], options: CompareOptions) -> int:
    """Rows of cache that measuring takes."""
    longest = max(map(len, asked)) + options.max_tokens
    return min(max(longest, PAST) + _SPARE_ROWS, bundle.manifest.target.capacity)


def _exported(
    model: str, folder: Path, precision: str | None, capacity: int, options: CompareOptions, progress: Progress
) -> Bundle:
    """A bundle of the model without drafts."""
    wanted = ExportOptions(
        precision,
        drafts=("none",),
        capacity=capacity,
        verify=False,
        revision=options.revision,
        offline=options.offline,
    )
    manifest = export(model, folder, wanted, progress)
    if not manifest.target.tree:
        raise UnsupportedModelError(f"{manifest.name}: its family has no builder, and drafts need one")
    return open_bundle(folder)


def _fitting(bundle: Bundle, prompts: Sequence[Prompt], max_tokens: int) -> list[tuple[Prompt, list[int]]]:
    """The prompts that leave room for a whole answer, with their token ids."""
    tokenizer, room = Tokenizer.load(bundle), bundle.manifest.target.capacity - _SPARE_ROWS - max_tokens
    asked = [(prompt, tokenizer.chat_prompt([{"role": "user", "content": prompt.text}])) for prompt in prompts]
    fitting = [(prompt, ids) for prompt, ids in asked if len(ids) <= room]
    if not fitting:
        raise UsageError(f"no prompt leaves room for {max_tokens} tokens in this context; lower max_tokens")
    return fitting


def _checked(checkpoint: Checkpoint, options: CompareOptions) -> int:
    """Rows of the caches; what the model cannot have is refused before any work."""
    sizes = read_dimensions(find_family(checkpoint.config.get("model_type")), checkpoint.config)
    target = ExportOptions(options.precision, drafts=("none",)).target
    check_recipes(checkpoint, (target, *options.recipes))
    capacity = min(sizes.positions, _ROWS)
    if options.max_tokens + _SPARE_ROWS >= capacity:
        raise UsageError(f"max_tokens is {options.max_tokens} in a context of {capacity}: no prompt leaves room for it")
    return capacity


def _check_apart(asked: Sequence[tuple[Prompt, Sequence[int]]], calibration: PreparedCalibration) -> None:
    """As `CompareOptions.choose`, of a calibration that was made before."""
    known = calibration.known_prompts
    for prompt, ids in asked:
        if tuple(ids) in known:
            raise UsageError(
                f"prompt {prompt.question_id} ({prompt.category}) was calibrated on; "
                "measure on prompts that calibration does not use"
            )


def _check_room(checkpoint: Checkpoint, folder: Path, options: CompareOptions) -> None:
    """Room for two bundles, the target's logits and the drafts, generously."""
    parameters, _ = count_parameters(checkpoint.tensors)
    vocab = int(checkpoint.config.get("vocab_size", 0))
    kept = options.time_best + 1
    check_space(
        folder / "bundle", 9 * parameters + 2 * kept * parameters + 4 * vocab * options.count * options.max_tokens
    )
