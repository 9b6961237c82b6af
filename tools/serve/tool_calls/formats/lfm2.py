r"""Tool calls of LFM2 and LFM2.5: a list of Python calls between tags.

`<|tool_call_start|>[name(key='value'), ...]<|tool_call_end|>`, or a list of JSON.
"""

from __future__ import annotations

from typing import ClassVar

from edgellm.tools.serve.tool_calls.grammar import CallForm
from edgellm.tools.serve.tool_calls.pythonic import TaggedPythonParser

_OPEN, _CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"


class Lfm2Parser(TaggedPythonParser):
    """See `ToolParser`; calls that must be made have JSON between the tags."""

    openings, closing = (_OPEN,), _CLOSE
    shown: ClassVar[tuple[str, ...]] = (_OPEN, _CLOSE)
    form: ClassVar = CallForm.json_list(_OPEN, _CLOSE)

    @staticmethod
    def recognises(template: str) -> bool:
        """Whether the template has the tags, or LFM2's list of tools."""
        has_list = "<|tool_list_start|>" in template or "List of tools: " in template
        return _OPEN in template or (has_list and "<|im_start|>" in template)
