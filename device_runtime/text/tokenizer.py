"""Text to token ids and back: tokenizers, the model's own chat template, UTF-8-safe streaming."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from edgellm.core.errors import (
    BrokenArtifactError,
    RequestError,
)
from edgellm.core.resources import utf8_path
from edgellm.core.strict_json import parse
from edgellm.device_runtime.request_faults import described
from edgellm.device_runtime.text.plain_text import CUT, PlainText, without_marks
from edgellm.device_runtime.text.reasoning_marks import marks_of, think_tags
from edgellm.device_runtime.text.template_variables import variables
from edgellm.device_runtime.text.token_bound import TokenBound
from edgellm.device_runtime.text.token_bytes import TokenBytes

_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")  # a token of byte fallback
_TAIL = 4  # tokens: the maximum of one character
_PROBE = "is this text written?"


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = parse(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        fault = f"{path} cannot be read: {error}"
        raise BrokenArtifactError(fault, hint="build the engine again") from None
    if not isinstance(config, dict):
        raise BrokenArtifactError(f"{path} holds no JSON object", hint="build the engine again")
    return config


class ChatTokenizer:
    """The tokenizer files of an engine."""

    def __init__(self, folder: Path) -> None:
        """Load tokenizer.json, tokenizer_config.json and chat_template.jinja.

        Raises:
            BrokenArtifactError: tokenizer.json is missing or damaged.
        """
        path = folder / "tokenizer.json"
        try:
            with utf8_path(path) as name:
                self._tokenizer = Tokenizer.from_file(name)
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception
            raise BrokenArtifactError(
                f"{path} cannot be read: {error}", hint="build the engine again"
            ) from None
        self._tokenizer.no_truncation()  # both are of the run that wrote the file
        self._tokenizer.no_padding()
        config = _read_config(folder / "tokenizer_config.json")
        self._special = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in config.items()
            if name.endswith("_token") and isinstance(value, (str, dict))
        }
        template = folder / "chat_template.jinja"
        self._template_text = template.read_text("utf-8") if template.exists() else None
        self._environment: ImmutableSandboxedEnvironment | None = None
        self._compiled: tuple[str, Template] | None = None  # the template's text, and itself
        self._wants_items: tuple[str | None, bool] | None = None  # the template's text, and it
        self._variables: tuple[str, frozenset[str]] | None = None  # the template's text, and names
        added = self._tokenizer.get_added_tokens_decoder().items()
        self._special_ids = {token.content: index for index, token in added if token.special}
        self._plain = PlainText(self._tokenizer)
        self._bytes: TokenBytes | None = None
        self._bound: TokenBound | None = None

    @property
    def chat_template(self) -> str | None:
        """The template's source, if the model has one."""
        return self._template_text

    def as_text(self, content: str, *, is_answer: bool = False) -> str:
        """`content` with marks, so that `encode` does not parse special tokens in it.

        Content without such words is returned unchanged. Chat templates keep the marks. With
        `is_answer` the tags of the model's own reasoning stay special, because templates search for
        them to leave the reasoning out.
        """
        tags = think_tags(self._template_text or "") if is_answer else None
        if tags is None:
            return self._plain.marked(content)
        begin, _, rest = content.partition(tags[1])
        if rest or content.endswith(tags[1]):
            begin += tags[1]
        elif not content.lstrip().startswith(tags[0]):
            return self._plain.marked(content)
        return self._plain.marked(begin, tags) + self._plain.marked(rest)

    @staticmethod
    def shown(text: str) -> str:
        """A text without the marks of `as_text`."""
        return without_marks(text)

    def vocabulary(self) -> dict[str, int]:
        """Ids of all tokens, including added ones."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def added_ids(self, texts: Iterable[str]) -> dict[str, int]:
        """Ids of the texts that are single tokens, special or not."""
        added = self._tokenizer.get_added_tokens_decoder().items()
        ids = {token.content: token_id for token_id, token in added}
        return {text: ids[text] for text in texts if text in ids}

    def token_name(self, token_id: int) -> str:
        """A token's text in the vocabulary."""
        return self._tokenizer.id_to_token(token_id) or ""

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template."""
        return self._template_text is not None

    def num_tokens_at_least(self, text: str) -> int:
        """A lower bound of the number of tokens, without tokenizing."""
        if self._bound is None:
            self._bound = TokenBound(self._tokenizer)
        return self._bound.num_tokens(text)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids; a rendered chat template already contains its special tokens."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise RequestError("half a surrogate pair (\\ud800 to \\udfff) is not text") from None
        if CUT in text:
            return self._plain.encode(text, add_special_tokens=add_special_tokens)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_truncated(self, text: str, limit: int) -> list[int]:
        """The first token ids of a text, at most `limit` with the tokenizer's special tokens."""
        found = self._tokenizer.encode(text, add_special_tokens=False)
        found.truncate(max(limit - self._tokenizer.num_special_tokens_to_add(is_pair=False), 0))
        return self._tokenizer.post_process(found, None, add_special_tokens=True).ids

    def encode_pair(
        self, first: str, second: str, limit: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Token ids of a pair of texts, and for each id 0 or 1, its text.

        Args:
            first: is never cut.
            second: cut at its end if there are more ids than `limit`.
            limit: None: no limit.
        """
        one, other = (
            self._tokenizer.encode(text, add_special_tokens=False) for text in (first, second)
        )
        if limit is not None:
            special = self._tokenizer.num_special_tokens_to_add(is_pair=True)
            other.truncate(max(limit - special - len(one.ids), 0))
        found = self._tokenizer.post_process(one, other, add_special_tokens=True)
        return found.ids, found.type_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text, without special tokens; bytes that are not UTF-8 become U+FFFD."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """One token alone, also a special one; incomplete characters become U+FFFD."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int, *, begins: bool = False) -> bytes:
        """Bytes that a token adds to a text, or with `begins` as its first token."""
        return self._bytes_of_tokens().of(token_id, begins=begins)

    def is_fallback_byte(self, token_id: int) -> bool:
        """Whether a token is one byte, by byte fallback."""
        return self._bytes_of_tokens().is_fallback(token_id)

    def hidden_ids(self, shown: Iterable[str] = ()) -> frozenset[int]:
        """Ids of tokens that are not part of output text: special ones, except those `shown`."""
        visible = {*shown, *marks_of(self._template_text or "")}
        return frozenset(at for content, at in self._special_ids.items() if content not in visible)

    def render(self, messages: list[dict[str, Any]], **flags: Any) -> str:
        """The chat template applied to messages.

        Args:
            messages: objects with `role` and `content`.
            flags: variables of the template, e.g. add_generation_prompt, enable_thinking.

        Raises:
            RequestError: the model has no template, or the template rejects the messages.
        """
        if self._template_text is None:
            raise RequestError(
                "the model has no chat template",
                hint='set "apply_chat_template": false, or add the chat_template.jinja of the '
                "model to its folder and export it again",
            )
        if self._environment is None:
            self._environment = _environment()
        try:
            if self._compiled is None or self._compiled[0] != self._template_text:
                template = self._environment.from_string(self._template_text)
                self._compiled = self._template_text, template
            return self._compiled[1].render({**self._special, **flags, "messages": messages})
        except (TemplateError, TypeError) as error:
            raise RequestError(f"the chat template refuses the messages: {error}") from None
        except RecursionError:  # of nested messages: reported by the caller
            raise
        except Exception as error:  # of any class, since a template is a program
            raise RequestError(
                f"the chat template fails on the messages: {described(error)}"
            ) from error

    def template_variables(self) -> frozenset[str]:
        """Variables that the template uses; raises `RequestError` for an invalid template."""
        text = self._template_text or ""
        if self._variables is None or self._variables[0] != text:
            try:
                self._variables = text, variables(_environment(), text)
            except TemplateError as error:
                raise RequestError(f"the chat template refuses the messages: {error}") from None
        return self._variables[1]

    def wants_items(self) -> bool:
        """Whether the template only writes texts that are items of a list.

        Idefics3's drops a content that is a string, without an error.
        """
        if self._wants_items is None or self._wants_items[0] != self._template_text:
            items = [{"type": "text", "text": _PROBE}]
            wants = not self._writes(_PROBE) and self._writes(items)
            self._wants_items = self._template_text, wants
        return self._wants_items[1]

    def _writes(self, content: object) -> bool:
        probe = [{"role": "user", "content": content}]
        try:
            return _PROBE in self.render(probe, add_generation_prompt=True)
        except RequestError:
            return False

    def stream(self, shown: Iterable[str] = (), after: Sequence[int] = ()) -> TextStream:
        """A decoder for one output.

        Args:
            shown: special tokens to include in the text, as well as the marks of reasoning; all
                others are left out.
            after: token ids of a text that the output continues; empty: it begins a text.
        """
        hidden = self.hidden_ids(shown)
        return TextStream(self._tokenizer, hidden, self._tail(after, hidden))

    def _bytes_of_tokens(self) -> TokenBytes:
        if self._bytes is None:
            self._bytes = TokenBytes(self._tokenizer)
        return self._bytes

    def _tail(self, token_ids: Sequence[int], hidden: frozenset[int]) -> list[int]:
        """The last visible tokens, from the beginning of a character."""
        found: list[int] = []
        for token_id in reversed(token_ids):
            if token_id in hidden or self._tokenizer.id_to_token(token_id) is None:
                continue
            found.insert(0, token_id)
            continues = self.token_bytes(token_id)[:1]
            if len(found) >= _TAIL and not b"\x80" <= continues < b"\xc0":
                break
            if len(found) == 2 * _TAIL:  # of no text at all
                break
        return found


class TextStream:
    """Tokens in, whole characters out; concatenated they equal the decoded sequence.

    A run of byte tokens waits for its end: unless all of it is UTF-8, each byte becomes U+FFFD.
    """

    def __init__(
        self, tokenizer: Tokenizer, hidden: frozenset[int], before: Sequence[int] = ()
    ) -> None:
        """Start a text, or continue one.

        Args:
            tokenizer: of the model.
            hidden: tokens without text.
            before: the last visible tokens of the text so far: decoders drop the space before the
                first token of a text.
        """
        self._tokenizer, self._hidden = tokenizer, hidden
        self._decode = partial(tokenizer.decode, skip_special_tokens=False)
        # The tokens of the latest text that was returned, by which decoders space the next ones,
        # and the tokens whose text was not returned yet.
        self._window = list(before)
        self._num_given, self._given = len(self._window), self._decode(self._window)
        self.is_empty = not self._window  # no visible token has come

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""
        if token_id in self._hidden:
            return ""
        self._window.append(token_id)
        self.is_empty = False
        if _BYTE.fullmatch(self._tokenizer.id_to_token(token_id) or ""):
            return ""
        text = self._decode(self._window)
        piece = text[len(self._given) :] if text.startswith(self._given) else self._new(text)
        if not piece or text.endswith("\ufffd"):  # of a character that is not complete
            return ""
        self._window = self._window[self._num_given :]
        self._num_given, self._given = len(self._window), self._decode(self._window)
        return piece

    def finish(self) -> str:
        """The rest of an incomplete character, as U+FFFD."""
        return self._new(self._decode(self._window))

    def _new(self, text: str) -> str:
        """The part of `text` that was not returned; it may complete a prompt's last character."""
        given = self._given
        while not text.startswith(given) and given.endswith("\ufffd"):
            given = given[:-1]
        return text[len(given) :]


class StopMatcher:
    """Holds text back while it may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; return the text to show, and the stop string that was completed, if any."""
        if not self._stops:
            return text, None
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, stop = min(found)
            shown, self._held = self._held[:at], ""
            return shown, stop
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, None

    def finish(self) -> str:
        """The text still held back, if no stop string ended the output."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, stop: str) -> int:
        """Length of the longest suffix of the held text that is a prefix of `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((size for size in range(longest, 0, -1) if self._held.endswith(stop[:size])), 0)


class _GenerationTag(Extension):
    """`{% generation %}` marks assistant text for training; at inference it is a no-op."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the body unchanged."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """The Jinja environment of transformers, sandboxed since templates are downloaded."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any, indent: int | None = None, *, ensure_ascii: bool = False, **options: Any
) -> str:
    """Plain JSON; jinja2's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
