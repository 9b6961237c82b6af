"""Tool calls of Command R7B and Command A: a JSON list of actions between tags.

`<|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}]<|END_ACTION|>`; the
tags are special tokens.
"""

from __future__ import annotations

from typing import ClassVar

from edgellm.tools.serve.tool_calls.grammar import CallForm
from edgellm.tools.serve.tool_calls.parser import Call
from edgellm.tools.serve.tool_calls.tagged import TaggedParser, json_calls

_OPEN, _CLOSE = "<|START_ACTION|>", "<|END_ACTION|>"


class CommandParser(TaggedParser):
    """See `ToolParser`."""

    openings, closing = (_OPEN,), _CLOSE
    shown: ClassVar[tuple[str, ...]] = (_OPEN, _CLOSE)
    form: ClassVar = CallForm(
        before='{"tool_call_id": "0", "tool_name": "NAME", "parameters": ',
        after="}",
        between=", ",
        opening=f"{_OPEN}[",
        closing=f"]{_CLOSE}",
        marks=shown,
        tag=_OPEN,
    )

    @staticmethod
    def recognises(template: str) -> bool:
        """Whether the template explains the marks."""
        return _OPEN in template and "tools" in template

    def _calls(self, text: str) -> tuple[list[Call], str]:
        return json_calls(text, self._tools, "tool_name", "parameters")
