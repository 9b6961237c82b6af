"""Chat template: formats messages as a prompt, for files, Python, the server and the chat."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgellm.core.errors import RequestError
from edgellm.device_runtime.engine import continuation
from edgellm.device_runtime.engine.reasoning_history import with_reasoning
from edgellm.device_runtime.engine.template_flags import GIVEN, THINKING, require_known
from edgellm.device_runtime.text.tokenizer import ChatTokenizer

Message = Mapping[str, Any]
_DEFAULTS = {"add_generation_prompt": True, "enable_thinking": False}


@dataclass(frozen=True, slots=True)
class Formatter:
    """Formats chat messages.

    Text that spells special tokens in messages and template variables stays text. Only the chat
    template makes special tokens, unless they are allowed.
    """

    tokenizer: ChatTokenizer
    allow_special_tokens: bool = False
    film_text: str = ""  # the placeholder of a video in messages; "": the template writes it

    def format(self, messages: Sequence[Message], flags: Mapping[str, Any] | None = None) -> str:
        """Apply the chat template; `ChatTokenizer.encode` interprets the marks in the result.

        Args:
            messages: objects with `role` and `content`, a text or a list of items of type "text"
                (with `text`), "image", "video" or "audio".
            flags: variables of the template. Defaults: add_generation_prompt True, enable_thinking
                False. A last message of the assistant is continued, unless add_generation_prompt
                or continue_final_message are given.

        Raises:
            RequestError: the model has no template, or the template rejects the messages or does
                not use a variable.
        """
        flags = {
            name: value
            for name, value in (flags or {}).items()
            if value is not None or name not in (*GIVEN, *THINKING)
        }
        try:
            require_known(flags, self.tokenizer)
            template = self.tokenizer.chat_template or ""
            turns = [
                with_reasoning(_turn(message, at), template) for at, message in enumerate(messages)
            ]
            variables = {**_DEFAULTS, **flags}
            if is_continued := continuation.continues(messages, flags):
                variables["add_generation_prompt"] = False
            variables.pop("continue_final_message", None)
            if variables["enable_thinking"]:
                variables.setdefault("thinking", True)  # the name in Granite's templates
            if not self.allow_special_tokens:
                turns = [self._turn_as_text(turn) for turn in turns]
                variables = self._as_text(variables)
            last = turns[-1:]
            if is_continued:
                turns = [*turns[:-1], continuation.marked(turns[-1])]
            if self.tokenizer.wants_items():
                turns = [{**turn, "content": _items(turn["content"])} for turn in turns]
            if self.film_text:
                turns = [_with_films(turn, self.film_text) for turn in turns]
            text = self.tokenizer.render(turns, **variables)
            return self._continued(turns, last[0], text, variables) if is_continued else text
        except RecursionError:
            raise RequestError("the messages are nested too deeply") from None

    def _continued(
        self, turns: list[dict[str, Any]], last: Message, text: str, variables: dict[str, Any]
    ) -> str:
        """`text`, which ends with the mark, as a prompt that continues the message `last`.

        Templates of models that transcribe write no message of the assistant: there its text
        follows what begins an answer.
        """
        if last.get("role") == "assistant" and not continuation.is_marked(text):
            begun = self.tokenizer.render(
                turns[:-1], **{**variables, "add_generation_prompt": True}
            )
            if begun != text and begun.startswith(text):
                return begun + continuation.said(last)
        return continuation.cut(text, last)

    def _turn_as_text(self, turn: dict[str, Any]) -> dict[str, Any]:
        """A message without special tokens, except the tags of the model's own reasoning."""
        found = self._as_text(turn)
        if turn.get("role") == "assistant":
            found["content"] = self._as_text(turn["content"], is_answer=True)
        return found

    def _as_text(self, value: Any, *, is_answer: bool = False) -> Any:
        """JSON whose strings, at any depth, contain no special tokens."""
        if isinstance(value, str):
            return self.tokenizer.as_text(value, is_answer=is_answer)
        if isinstance(value, (list, tuple)):
            return [self._as_text(item, is_answer=is_answer) for item in value]
        if isinstance(value, Mapping):
            return {
                self._as_text(key): self._as_text(item, is_answer=is_answer)
                for key, item in value.items()
            }
        return value


def without_template(messages: Sequence[Message], marks: Mapping[str, str]) -> str:
    """Concatenated texts of messages; `marks` are placeholders by type of item."""
    texts: list[str] = []
    for at, message in enumerate(messages):
        content = _turn(message, at)["content"]
        items = [{"text": content}] if isinstance(content, str) else content
        texts += [item["text"] if "text" in item else marks[item["type"]] for item in items]
    return "".join(texts)


def _turn(message: Message, at: int) -> dict[str, Any]:
    """A message in the form of chat templates: text only is a string, arguments are objects."""
    found = {**message, "content": _content(message.get("content"))}
    if found.get("role") == "developer":  # OpenAI's newer name
        found["role"] = "system"
    if calls := found.get("tool_calls"):
        found["tool_calls"] = [_call(call, at) for call in calls]
    return found


def _content(content: Any) -> str | list[dict[str, str]]:
    if content is None or isinstance(content, str):
        return content or ""
    if all(item["type"] == "text" for item in content):
        return "".join(item["text"] for item in content)
    return [
        {"type": "text", "text": item["text"]} if item["type"] == "text" else {"type": item["type"]}
        for item in content
    ]


def _items(content: str | list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _with_films(turn: dict[str, Any], text: str) -> dict[str, Any]:
    if isinstance(turn["content"], str):
        return turn
    items = [
        {"type": "text", "text": text} if item["type"] == "video" else item
        for item in turn["content"]
    ]
    return {**turn, "content": items}


def _call(call: Any, at: int) -> Any:
    """A tool call whose arguments, a string in OpenAI's interface, are an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        raise RequestError(f"messages[{at}].tool_calls: arguments must be JSON") from None
    return {**call, "function": {**function, "arguments": arguments}}
