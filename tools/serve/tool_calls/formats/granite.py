"""Tool calls of Granite 3: a JSON list after a tag; Granite 4 uses Hermes' format.

`<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`; the tag is a special token.
"""

from __future__ import annotations

from typing import ClassVar

from edgellm.tools.serve.tool_calls.grammar import CallForm
from edgellm.tools.serve.tool_calls.parser import Call
from edgellm.tools.serve.tool_calls.tagged import TaggedParser, json_calls

_MARK = "<|tool_call|>"


class GraniteParser(TaggedParser):
    """See `ToolParser`."""

    openings = (_MARK,)
    shown: ClassVar[tuple[str, ...]] = (_MARK,)
    form: ClassVar = CallForm(
        before='{"name": "NAME", "arguments": ',
        after="}",
        between=", ",
        opening=f"{_MARK}[",
        closing="]",
        marks=shown,
        tag=_MARK,
    )

    @staticmethod
    def recognises(template: str) -> bool:
        """Whether the template has Granite's roles, and the mark."""
        return all(part in template for part in (_MARK, "<|start_of_role|>", "tools"))

    def _calls(self, text: str) -> tuple[list[Call], str]:
        return json_calls(text, self._tools)
