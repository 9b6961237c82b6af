"""Tool calls of Phi-4-mini: a JSON list between tags.

`<|tool_call|>[{"name": ..., "arguments": {...}}, ...]<|/tool_call|>`, or a list after the word
`functools`. Its template supports tools only as JSON in the system message, and no calls:
`placed` moves both there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from edgellm.tools.serve.tool_calls.grammar import CallForm
from edgellm.tools.serve.tool_calls.parser import Call
from edgellm.tools.serve.tool_calls.tagged import TaggedParser, json_calls

_OPEN, _CLOSE = "<|tool_call|>", "<|/tool_call|>"


class Phi4Parser(TaggedParser):
    """See `ToolParser`."""

    openings = (_OPEN, "functools[")
    shown: ClassVar[tuple[str, ...]] = (_OPEN, _CLOSE)
    form: ClassVar = CallForm.json_list(_OPEN, _CLOSE)

    @staticmethod
    def recognises(template: str) -> bool:
        """Whether the template has the mark for tools, or asks for the word."""
        return "<|tool|>" in template or ("functools" in template and "tools" in template)

    def _calls(self, text: str) -> tuple[list[Call], str]:
        text = text.strip()
        if text.startswith("{") and text.endswith("]"):  # the word took the bracket
            text = f"[{text}"
        calls, rest = json_calls(text, self._tools)
        return calls, "" if _CLOSE.startswith(rest.strip()) else rest.removeprefix(_CLOSE)


def placed(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Messages with the tools in the system message, and calls and results as its turns."""
    found = [_turn(message) for message in messages]
    if tools:
        if not found or found[0]["role"] not in ("system", "developer"):
            found.insert(0, {"role": "system", "content": ""})
        functions = [tool["function"] for tool in tools]
        found[0] = {**found[0], "tools": json.dumps(functions, ensure_ascii=False)}
    return found


def _turn(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {**message, "role": "tool_response"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    listed = json.dumps([call["function"] for call in calls], ensure_ascii=False)
    content = f"{message['content'] or ''}{_OPEN}{listed}{_CLOSE}"
    return {"role": message["role"], "content": content}
