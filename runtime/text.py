"""Text to tokens and back, for the tokenizer and chat template of a bundle."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from specedge.runtime.bundle import Bundle
from specedge.runtime.errors import BundleError, PromptError
from specedge.runtime.stream import Reply, TextStream
from specedge.runtime.template import ChatTemplate
from specedge.runtime.tokenizer import contained, open_tokenizer

__all__ = ["ROLES", "Reply", "Text", "TextStream"]

ROLES = ("system", "user", "assistant", "tool")
_MAX_TEXT = 1 << 20
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_NO_TEMPLATE = "this model has no chat template (a base model?): messages are joined as plain text, which it continues"


class Text:
    """A bundle's tokenizer and chat template.

    Whatever a person writes stays text: only the chat template can make control tokens.

    Args:
        tokenizer: Content of tokenizer.json.
        config: Content of tokenizer_config.json.
        template: The chat template; None for base models.
        vocab_size: How many token ids the model has.
        eos: Tokens that end a reply.
        where: Folder, for errors.

    Attributes:
        notes: What a person should know before chatting.
    """

    def __init__(
        self,
        tokenizer: str,
        config: Mapping[str, Any],
        template: str | None,
        *,
        vocab_size: int,
        eos: Collection[int] = (),
        where: str = "bundle",
    ) -> None:
        self._where = where
        opened = open_tokenizer(tokenizer, f"{where}/tokenizer.json", vocab_size, eos)
        self._tokenizer, self._names, self._restore = opened.tokenizer, opened.names, opened.restore
        self._controls = frozenset(opened.controls.values())
        longest_first = sorted(opened.controls, key=len, reverse=True)
        self._control_text = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        names = {name: value for name in _NAMES if (value := _token_text(config.get(name))) is not None}
        self._before = self._prefix(config.get("add_bos_token"), names.get("bos_token"))
        self._template: ChatTemplate | None = None
        self.notes: tuple[str, ...] = (_NO_TEMPLATE,)
        if template is not None:
            self._template, self.notes = ChatTemplate(template, names, f"{where}/chat_template.jinja"), ()

    @classmethod
    def load(cls, bundle: Bundle) -> Text:
        """Reads a bundle's tokenizer.

        Raises:
            BundleError: It is damaged, or asks for something harmful.
        """
        manifest = bundle.manifest
        config: Mapping[str, Any] = {}
        if "tokenizer_config.json" in manifest.files:
            try:
                config = json.loads(bundle.text("tokenizer_config.json"))
            except (ValueError, RecursionError):
                raise BundleError(f"{bundle.folder / 'tokenizer_config.json'}: not JSON; export it again") from None
            if not isinstance(config, dict):
                raise BundleError(f"{bundle.folder / 'tokenizer_config.json'}: not an object; export it again")
        template = bundle.text("chat_template.jinja") if "chat_template.jinja" in manifest.files else None
        return cls(
            bundle.text("tokenizer.json"),
            config,
            template,
            vocab_size=manifest.vocab_size,
            eos=manifest.eos_token_ids,
            where=str(bundle.folder),
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of a text as it stands, after the begin-of-text token where the model has one.

        Raises:
            PromptError: It is too long, or the tokenizer cannot take it.
        """
        return [*self._before, *self._encode(_checked(text))]

    def encode_more(self, text: str) -> list[int]:
        """Token ids of a text that goes on where another ends.

        Raises:
            PromptError: As `encode`.
        """
        return self._encode(_checked(text))

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant begins to speak.

        The ids are those of the rendered template, except that control tokens come from the
        template alone: what a message holds is rendered and encoded as text.

        Args:
            messages: {"role": one of ROLES, "content": text}, oldest first.

        Raises:
            PromptError: No messages, an unknown role, a text that is too long, or messages that the template refuses.
            BundleError: The template or the tokenizer is at fault.
        """
        for message in messages:
            if message["role"] not in ROLES:
                raise PromptError(f"role {message['role']!r} is none of {', '.join(ROLES)}")
            _checked(message["content"])
        if not messages:
            raise PromptError("the conversation is empty: say something")
        if self._template is None:
            return self.encode("\n".join(message["content"] for message in messages))
        return self._encode(self._render(self._template, messages))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, control tokens left out."""
        stream = self.stream()
        return "".join([*map(stream.push, ids), stream.flush()])

    def stream(self, after: Sequence[int] = ()) -> TextStream:
        """Decodes token by token.

        Args:
            after: Tokens before the first, where the text continues theirs.
        """
        return TextStream(self._decode, self._controls, after)

    def _decode(self, ids: list[int]) -> str:
        with contained(f"{self._where}/tokenizer.json: cannot decode"):
            return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _encode(self, text: str) -> list[int]:
        """Ids of a text in which secret names stand for control tokens."""
        with contained(f"{self._where}/tokenizer.json: cannot encode this text"):
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        # Some vocabularies hold control tokens as ordinary pieces, too.
        for token in ids:
            if token in self._controls:
                raise PromptError(
                    f"the text holds {self._tokenizer.id_to_token(token)!r}, which this model's tokenizer "
                    "cannot take as plain text; leave it out"
                )
        return [self._restore.get(token, token) for token in ids]

    def _render(self, template: ChatTemplate, messages: Sequence[Mapping[str, str]]) -> str:
        """The conversation with secret names for the template's control tokens.

        Texts of control tokens in messages are hidden from that exchange, and put back after it.
        """
        secret = secrets.token_hex(16)
        hidden: list[str] = []

        def hide(match: re.Match[str]) -> str:
            hidden.append(match.group())
            return f"\ue002{secret}{len(hidden) - 1}\ue003"

        guarded = [{**message, "content": self._control_text.sub(hide, message["content"])} for message in messages]
        rendered = self._control_text.sub(lambda match: self._names[match.group()], template.render(guarded))
        return re.sub(f"\ue002{secret}([0-9]+)\ue003", lambda match: hidden[int(match.group(1))], rendered)

    def _prefix(self, add_bos: object, bos: str | None) -> list[int]:
        """What stands before every text: by the configuration, else by the tokenizer's post-processor."""
        with contained(f"{self._where}/tokenizer.json: not a tokenizer"):
            if add_bos is False:
                return []
            if add_bos is True and bos is not None and (token := self._tokenizer.token_to_id(bos)) is not None:
                return [token]
            ids = list(self._tokenizer.encode("a", add_special_tokens=True).ids)
            bare = list(self._tokenizer.encode("a", add_special_tokens=False).ids)
        for at in range(len(ids) - len(bare) + 1):
            if ids[at : at + len(bare)] == bare and at <= 4:
                return ids[:at]
        raise BundleError(f"{self._where}/tokenizer.json: its post-processor rewrites texts; export the bundle again")


def _checked(text: str) -> str:
    """Raises for texts that are too long, or that no tokenizer can take."""
    if len(text) > _MAX_TEXT:
        raise PromptError(f"the text has {len(text):,} characters where {_MAX_TEXT:,} are allowed: shorten it")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise PromptError("the text holds half a surrogate pair, which is no character: leave it out") from None
    return text


def _token_text(value: object) -> str | None:
    """A special token in tokenizer_config.json: a text, or an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
