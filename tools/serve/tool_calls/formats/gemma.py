r"""Tool calls of Gemma 2 and 3: Python calls in a code block.

A block of code in the language tool_code, with `name(key="value")` or `print(name(...))`, or a
list `[name(...), ...]` as the whole output. Their templates support no tools: `placed` describes
them in the first user message, and puts results into blocks of tool_output.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from edgellm.tools.serve.tool_calls.grammar import CallForm
from edgellm.tools.serve.tool_calls.json_fallback import loose_calls
from edgellm.tools.serve.tool_calls.parser import Call, Item, NoCall, Tools
from edgellm.tools.serve.tool_calls.pythonic import python_calls
from edgellm.tools.serve.tool_calls.tagged import TaggedParser

_OPEN, _CLOSE = "```tool_code", "```"
_EXPLAINED = (
    "These functions can be called:\n{}\n"
    "To call one, answer with its call in a block, and with nothing else:\n"
    '```tool_code\nname(argument="value")\n```\n'
    "The result comes in a block of tool_output. Where no function helps, answer in words.\n\n"
)


class GemmaParser(TaggedParser):
    """See `ToolParser`; calls that must be made are JSON, which `JsonFallbackParser` reads."""

    openings, closing = (_OPEN,), _CLOSE
    shown: ClassVar[tuple[str, ...]] = ()
    form: ClassVar = CallForm(before='{"name": "NAME", "parameters": ', after="}", between="\n")

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._is_bare: bool | None = None  # whether the output starts as a list; None: unknown

    @staticmethod
    def recognises(template: str) -> bool:
        """Whether the template has Gemma's turns, and no marks of calls."""
        return "<start_of_turn>" in template and "<start_function_call>" not in template

    def push(self, text: str) -> list[Item]:
        """See `CallReader.push`."""
        if self._is_bare is None and (begun := (self._held + text).lstrip()):
            self._is_bare = begun.startswith("[")
        if self._is_bare is not False:
            self._held += text
            return []
        return super().push(text)

    def finish(self, *, is_cut: bool = False) -> list[Item]:
        """See `CallReader.finish`."""
        if not self._is_bare:
            return super().finish(is_cut=is_cut)
        held, self._held = self._held, ""
        try:
            return [*python_calls(held, self._tools)] or [held]
        except NoCall:
            return [] if is_cut and self._is_call_begun(held) else [held]

    def _is_call_begun(self, text: str) -> bool:
        begun = text.strip()[1:].lstrip()
        heads = [f"{name}(" for name in self._tools]
        return bool(begun) and any(begun.startswith(h) or h.startswith(begun) for h in heads)

    def _calls(self, text: str) -> tuple[list[Call], str]:
        return loose_calls(text, self._tools) or python_calls(text, self._tools), ""


def placed(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Messages with the tools in the first user message, calls and results in blocks."""
    found: list[dict[str, Any]] = []
    for message in map(_turn, messages):
        if found and found[-1]["role"] == message["role"] == "user":  # turns must alternate
            found[-1] = _after(found[-1], message["content"])
        else:
            found.append(message)
    at = next((at for at, message in enumerate(found) if message["role"] == "user"), None)
    if tools and at is not None:
        functions = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
        explained = {"role": "user", "content": _EXPLAINED.format(functions)}
        found[at] = _after(explained, found[at]["content"])
    return found


def _after(message: dict[str, Any], content: Any) -> dict[str, Any]:
    """A message with appended content, a text or a list of parts."""
    if isinstance(message["content"], str) and isinstance(content, str):
        return {**message, "content": message["content"] + content}
    return {**message, "content": [*_parts(message["content"]), *_parts(content)]}


def _parts(content: Any) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _turn(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        begun = {"role": "user", "content": "```tool_output\n"}
        return _after(_after(begun, message["content"] or ""), "\n```\n")
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = "\n".join(_written(call["function"]) for call in calls)
    begun = {"role": message["role"], "content": message["content"] or ""}
    return _after(begun, f"{_OPEN}\n{written}\n```")


def _written(function: dict[str, Any]) -> str:
    """A call in Python syntax, or as JSON if a name is not valid in Python."""
    name, arguments = function["name"], function["arguments"]
    if isinstance(arguments, dict) and all(map(str.isidentifier, [name, *arguments])):
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
    return json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)
