"""A chat template turns messages into the text that a model was trained to see. It is untrusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

from specedge.runtime.errors import BundleError, PromptError

__all__ = ["MAX_TEMPLATE", "ChatTemplate"]

MAX_TEMPLATE = 64 << 10
"""Most characters of a template; the largest in use have some 20,000."""


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: The Jinja text.
        names: Texts of special tokens that templates may name: bos_token, eos_token and so on.
        where: What to call it in errors, e.g. the path of its file.

    Raises:
        BundleError: It is too large, or cannot be compiled.
    """

    def __init__(self, source: str, names: Mapping[str, str], where: str) -> None:
        from specedge.runtime.sandbox import Sandbox

        if len(source) > MAX_TEMPLATE:
            raise BundleError(f"{where}: {len(source):,} characters where {MAX_TEMPLATE:,} are allowed")
        self._names = dict(names)
        self._where = where
        self._lock = Lock()  # the sandbox has one clock
        self._sandbox = Sandbox()
        try:
            self._template = self._sandbox.from_string(source)
        except (Exception, RecursionError) as error:  # noqa: BLE001  a template's fault can surface as any exception
            raise BundleError(f"{where}: cannot be compiled: {_reason(error)}") from None

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt for the assistant's next turn.

        Raises:
            PromptError: The template refuses these messages.
            BundleError: The template is at fault: too long, too slow, or out of its bounds.
        """
        from jinja2.exceptions import SecurityError, TemplateError

        from specedge.runtime.sandbox import LIMIT, TemplateAbortedError

        pieces: list[str] = []
        length = 0
        try:
            with self._lock:
                self._sandbox.restart()
                for piece in self._template.generate(
                    messages=list(messages), tools=None, documents=None, add_generation_prompt=True, **self._names
                ):
                    length += len(piece)
                    if length > LIMIT:
                        raise TemplateAbortedError(f"it writes more than {LIMIT:,} characters")
                    pieces.append(piece)
        except (SecurityError, TemplateAbortedError) as error:
            raise BundleError(f"{self._where}: stopped: {_reason(error)}") from None
        except TemplateError as error:
            raise PromptError(f"the model's chat template says: {_reason(error)}") from None
        except Exception as error:  # noqa: BLE001  a template's fault can surface as any exception
            raise BundleError(f"{self._where}: fails: {_reason(error)}") from None
        return "".join(pieces)


def _reason(error: BaseException) -> str:
    """An error of untrusted code in one short printable line."""
    text = " ".join((str(error) or type(error).__name__).split())
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= 200 else text[:197] + "..."
