"""The public API: an engine opens a bundle, generations stream replies, a chat keeps turns."""

from __future__ import annotations

import operator
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any

from specedge.runtime.bundle import DEVICES, Bundle, Manifest, open_bundle
from specedge.runtime.chat import Chat
from specedge.runtime.contracts import Target
from specedge.runtime.drafters.registry import is_draft, is_method, method_names
from specedge.runtime.drafting import Drafting
from specedge.runtime.errors import PromptError, UsageError
from specedge.runtime.events import Finish
from specedge.runtime.generation import Generation
from specedge.runtime.opening import Opener
from specedge.runtime.options import AUTO, PLAIN, Options, override
from specedge.runtime.providers import default_threads
from specedge.runtime.session import Session
from specedge.runtime.text import Text
from specedge.runtime.tuning import Tuning, read_tuning

__all__ = ["Chat", "Engine", "Generation"]


class Engine:
    """A model ready to run. One reply at a time: starting another ends the one before, from any thread.

    Args:
        bundle: Folder that `specedge export` wrote.
        threads: Threads to compute with; None takes all processors of the process.
        capacity: Rows of cache to allocate, at most what the bundle was exported for; None takes that.
        verify: Compare every file with its SHA-256 first.
        tuned: Use what `specedge tune` measured of this bundle on this device, where it did.
        device: "cpu", "cuda" or "tensorrt": where to run; None: where the bundle was made for.
        captured: Capture rounds once and replay them, on CUDA.
        memory_budget: Most bytes that its models may take, by estimate; None: what is free.

    Raises:
        BundleError: The folder is no bundle, or damaged.
        DeviceError: The bundle is for a device that ONNX Runtime does not have here.
        MemoryBudgetError: The model does not fit into memory.
    """

    def __init__(
        self,
        bundle: str | os.PathLike[str],
        *,
        threads: int | None = None,
        capacity: int | None = None,
        verify: bool = True,
        tuned: bool = True,
        device: str | None = None,
        captured: bool = True,
        memory_budget: int | None = None,
    ) -> None:
        if device is not None and device not in DEVICES:
            raise UsageError(f"device is {device!r}: choose one of {', '.join(DEVICES)}")
        if memory_budget is not None and (isinstance(memory_budget, bool) or not isinstance(memory_budget, int)):
            raise UsageError(f"memory_budget is {memory_budget!r}: give a whole number of bytes, or None")
        if not isinstance(captured, bool):
            raise UsageError(f"captured is {captured!r}: give True or False")
        self.bundle: Bundle = open_bundle(bundle, verify=verify)
        self.text = Text.load(self.bundle)
        self._opener = Opener(
            self.bundle,
            threads=threads,
            capacity=capacity,
            device=device,
            captured=captured,
            memory_budget=memory_budget,
        )
        self._session = Session(self._opener.target)
        count = default_threads() if threads is None else threads
        tuning = read_tuning(self.bundle, count, device) if tuned else None
        self.drafting = Drafting(self._opener, self._session, tuning)
        self._running: Generation | None = None
        self._closed = False

    @property
    def folder(self) -> Path:
        return self.bundle.folder

    @property
    def manifest(self) -> Manifest:
        return self.bundle.manifest

    @property
    def target(self) -> Target:
        """The model that verifies, with its cache."""
        return self._session.target

    @property
    def capacity(self) -> int:
        """Most tokens that prompt and reply may have together."""
        return self._session.target.capacity

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods of this bundle: none, draft:NAME for each draft model, medusa, medusa+ngram, ngram, and auto."""
        return (*method_names(self.manifest), AUTO)

    @property
    def default_method(self) -> str:
        """The one that chooses among all others, "auto"."""
        return AUTO

    @property
    def trees(self) -> bool:
        """Whether drafts may be trees: rows of one are plain decoding's on this target."""
        return self._opener.trees

    @property
    def tuning(self) -> Tuning | None:
        """What was measured of this bundle on this device."""
        return self.drafting.tuning

    def generate(
        self,
        prompt: str | Sequence[int],
        options: Options | None = None,
        *,
        asked: float | None = None,
        **overrides: Any,
    ) -> Generation:
        """Starts a reply.

        Args:
            prompt: Text, encoded as it stands (no chat template), or token ids.
            options: Options of the reply.
            asked: When it was asked for, in `time.perf_counter` seconds: deadlines count from then. None: now.
            **overrides: Single options by name, on top of `options`.

        Returns:
            An iterator of events, closable at any point.

        Raises:
            PromptError: The prompt is empty, longer than the context, or outside the vocabulary.
            UsageError: An option is out of range, or the bundle lacks the method.
        """
        if isinstance(prompt, str):
            return self.start(self.text.encode(prompt), options or Options(), overrides, continues=True, asked=asked)
        return self.start(_token_ids(prompt), options or Options(), overrides, asked=asked)

    def start(
        self,
        ids: Sequence[int],
        options: Options,
        overrides: dict[str, Any],
        on_finish: Callable[[Finish], None] | None = None,
        *,
        continues: bool = False,
        asked: float | None = None,
    ) -> Generation:
        """`generate` for token ids; `on_finish` is called when the reply has ended."""
        started = perf_counter() if asked is None else asked
        chosen = override(options, overrides)
        method = self.resolve_method(chosen.method)
        self._check_open()
        self._check_prompt(ids)
        self._unwant_running()
        with self._session.lock:
            self._check_open()
            self._end_running()
            seed = secrets.randbits(63) if chosen.seed is None else chosen.seed
            chosen = replace(chosen, method=method, seed=seed)
            self._running = Generation(
                self._session,
                self.drafting,
                self.text,
                ids,
                chosen,
                eos=self.manifest.eos_token_ids,
                started=started,
                continues=continues,
                on_finish=on_finish,
            )
            return self._running

    def suspend(self, generation: Generation) -> None:
        """Lets another reply run before this one goes on; between its rounds only."""
        with self._session.lock:
            generation.suspend()
            self._running = None

    def resume(self, generation: Generation) -> None:
        """Ends the running reply and goes on with a suspended one.

        Raises:
            UsageError: The engine is closed.
        """
        self._unwant_running()
        with self._session.lock:
            self._check_open()
            self._end_running()
            generation.resume()
            self._running = generation

    def chat(self, system: str | None = None, options: Options | None = None) -> Chat:
        """Starts a conversation; its turns reuse the cache.

        Args:
            system: System message; None leaves it to the model's template.
            options: Options of every reply, unless one is given its own.
        """
        return Chat(self, system, options or Options())

    def resolve_method(self, method: str | None) -> str:
        """The full name of a method: None is the default, "draft" the first draft model.

        Raises:
            UsageError: The bundle does not hold it.
        """
        if method is None:
            return self.default_method
        if method == "draft" and self._first_draft:
            return self._first_draft
        if method != AUTO and not is_method(method, self.manifest):
            raise UsageError(f"method {method!r} is not in {self.folder}; choose one of {', '.join(self.methods)}")
        return method

    def reset(self) -> None:
        """Ends the running reply and forgets all cached tokens."""
        self._unwant_running()
        with self._session.lock:
            self._end_running()
            self._session.rewind(0)

    def close(self) -> None:
        """Ends the running reply and frees the models. A closed engine may be closed again."""
        self._unwant_running()
        with self._session.lock:
            if self._closed:
                return
            self._end_running()
            self._closed = True
        self.drafting.close()
        if hasattr(self._session.target, "close"):
            self._session.target.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def model(self, method: str) -> Target | None:
        """The graph that a method adds, as `methods` names it; the target for "none".

        None where it has none, or has not been used yet.
        """
        return self.target if method == PLAIN else getattr(self.drafting.opened(method), "model", None)

    @property
    def _first_draft(self) -> str | None:
        return next(filter(is_draft, self.methods), None)

    def _check_prompt(self, ids: Sequence[int]) -> None:
        vocab = self.manifest.vocab_size
        if not ids:
            raise PromptError("the prompt is empty: give it some text")
        if len(ids) >= self.capacity:
            raise PromptError(
                f"the prompt has {len(ids):,} tokens (a chat's earlier turns included) and the context holds "
                f"{self.capacity:,}: shorten it, start the chat anew (/reset), or export with a larger --capacity"
            )
        if min(ids) < 0 or max(ids) >= vocab:
            raise PromptError(f"the prompt has a token id outside the vocabulary of {vocab:,}")

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this engine is closed: open another")

    def _unwant_running(self) -> None:
        """Tells the running reply to end after its round, in whichever thread it runs."""
        if (running := self._running) is not None:
            running.unwant()

    def _end_running(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None


def _token_ids(prompt: Sequence[int]) -> list[int]:
    try:
        if isinstance(prompt, (bytes, bytearray)):
            raise TypeError
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise PromptError(f"the prompt is {type(prompt).__name__}: give a text, or a sequence of token ids") from None
