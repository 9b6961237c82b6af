r"""Tool calls of LFM2 and LFM2.5: a list of Python calls between tags.

`<|tool_call_start|>[name(key='value'), ...]<|tool_call_end|>`, or a list of JSON. The models
sometimes write the list and its closing tag a second time, which is dropped.
"""

from __future__ import annotations

from typing import ClassVar

from edgellm.tools.serve.tool_calls.grammar import CallForm
from edgellm.tools.serve.tool_calls.parser import Call, Item, Tools
from edgellm.tools.serve.tool_calls.pythonic import TaggedPythonParser

_OPEN, _CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"


class Lfm2Parser(TaggedPythonParser):
    """See `ToolParser`; calls that must be made have JSON between the tags."""

    openings, closing = (_OPEN,), _CLOSE
    shown: ClassVar[tuple[str, ...]] = (_OPEN, _CLOSE)
    form: ClassVar = CallForm.json_list(_OPEN, _CLOSE)

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._echo = ""  # of the block before the text that is held

    @staticmethod
    def recognises(template: str) -> bool:
        """Whether the template has the tags, or LFM2's list of tools."""
        has_list = "<|tool_list_start|>" in template or "List of tools: " in template
        return _OPEN in template or (has_list and "<|im_start|>" in template)

    def _begin(self) -> tuple[int, int] | None:
        """See `TaggedParser`; an echo of the last block is dropped."""
        rest = self._held.lstrip()
        if self._echo and rest.startswith(self._echo):
            self._held, self._echo = rest[len(self._echo) :], ""
        return super()._begin()

    def _text(self, size: int) -> list[Item]:
        """See `TaggedParser`; text that may become an echo is held."""
        rest = self._held.lstrip()
        if self._echo and len(rest) < len(self._echo) and self._echo.startswith(rest):
            return []
        if size:
            self._echo = ""
        return super()._text(size)

    def _block(self, block: str, inside: int) -> list[Item]:
        """See `TaggedParser`; the block may be followed by its echo."""
        found = super()._block(block, inside)
        self._echo = block[inside:] if any(isinstance(item, Call) for item in found) else ""
        return found
