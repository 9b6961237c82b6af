"""Continuing the last message, as transformers' `continue_final_message` does.

A mark is appended to the message's text, the chat template is applied, and the prompt is cut at
the mark: no end of turn, no new turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgellm.core.errors import RequestError

_END = "\ufdd1"  # a noncharacter, which no text contains
_MARK = _END + " "  # templates that trim messages remove the space
_HINT = "the last message must be of the user or of a tool"


def continues(messages: Sequence[Mapping[str, Any]], flags: Mapping[str, Any]) -> bool:
    """Whether the last message is continued: by default if it is the assistant's.

    Args:
        messages: of a conversation.
        flags: may contain `continue_final_message` and `add_generation_prompt`, as in vLLM; None
            counts as not given.

    Raises:
        RequestError: the two contradict each other, or the message cannot be continued.
    """
    wanted, begins_turn = flags.get("continue_final_message"), flags.get("add_generation_prompt")
    if wanted not in (None, True, False):
        raise RequestError(f"continue_final_message {wanted!r} is not True or False")
    if wanted and begins_turn:
        raise RequestError(
            "continue_final_message and add_generation_prompt contradict each other",
            hint="a continued message begins no new turn: leave one of them out",
        )
    last = messages[-1] if messages else {}
    if wanted is None:
        wanted = begins_turn is None and last.get("role") == "assistant"
    if wanted:
        _require_text(last)
    return bool(wanted)


def goes_on(messages: Sequence[Mapping[str, Any]], flags: Mapping[str, Any]) -> bool:
    """Whether the output continues a text, which is not empty; raises as `continues`."""
    return continues(messages, flags) and bool(said(messages[-1]))


def said(message: Mapping[str, Any]) -> str:
    """Text of a continued message."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(item.get("text") or "" for item in content)


def marked(turn: Mapping[str, Any]) -> dict[str, Any]:
    """A message for templates, with the mark after its text."""
    content = turn["content"]
    if isinstance(content, str):
        return {**turn, "content": content + _MARK}
    *before, last = content
    if last["type"] != "text":  # reasoning alone
        return {**turn, "content": [*content, {"type": "text", "text": _MARK}]}
    return {**turn, "content": [*before, {**last, "text": last["text"] + _MARK}]}


def is_marked(rendered: str) -> bool:
    """Whether formatted messages contain the mark."""
    return _END in rendered


def cut(rendered: str, turn: Mapping[str, Any]) -> str:
    """The formatted messages up to the mark; `turn` is the last message without it.

    Raises:
        RequestError: the template changes the text or drops it.
    """
    found, mark, after = rendered.rpartition(_END)
    texts = turn["content"] if isinstance(turn["content"], list) else [{"text": turn["content"]}]
    if not mark or (texts[-1].get("text") or "").strip() not in found:
        raise RequestError(
            "the last message cannot be continued: the chat template changes it or drops it",
            hint=_HINT,
        )
    return found if after.startswith(_MARK[len(_END) :]) else found.rstrip()


def _require_text(message: Mapping[str, Any]) -> None:
    """Raise `RequestError` if the last message does not end with text."""
    content = message.get("content")
    fault = None
    if message.get("tool_calls"):
        fault = "it calls tools"
    elif content and not isinstance(content, str) and content[-1]["type"] != "text":
        fault = f"it ends with an item of type {content[-1]['type']!r}"
    elif (text := said(message)) and not text.strip():
        fault = "it holds white space alone"
    if fault is not None:
        raise RequestError(f"the last message cannot be continued: {fault}", hint=_HINT)
