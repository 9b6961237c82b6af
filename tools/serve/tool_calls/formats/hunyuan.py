"""Tool calls of Hunyuan: a JSON list between tags.

`<tool_calls>[{"name": ..., "arguments": {...}}, ...]</tool_calls>`
"""

from __future__ import annotations

from typing import ClassVar

from edgellm.tools.serve.tool_calls.grammar import CallForm
from edgellm.tools.serve.tool_calls.parser import Call
from edgellm.tools.serve.tool_calls.tagged import TaggedParser, json_calls

_OPEN, _CLOSE = "<tool_calls>", "</tool_calls>"


class HunyuanParser(TaggedParser):
    """See `ToolParser`."""

    openings, closing = (_OPEN,), _CLOSE
    shown: ClassVar[tuple[str, ...]] = (_OPEN, _CLOSE)
    form: ClassVar = CallForm.json_list(_OPEN, _CLOSE)

    @staticmethod
    def recognises(template: str) -> bool:
        """Whether the template explains the tags."""
        return _OPEN in template and "tools" in template

    def _calls(self, text: str) -> tuple[list[Call], str]:
        return json_calls(text, self._tools)
