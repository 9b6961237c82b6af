r"""Tool calls of OLMo 3: Python calls between tags.

`<function_calls>\nname(key='value')\n</function_calls>`, one call a line.
"""

from __future__ import annotations

from typing import ClassVar

from edgellm.tools.serve.tool_calls.grammar import CallForm
from edgellm.tools.serve.tool_calls.pythonic import TaggedPythonParser

_OPEN, _CLOSE = "<function_calls>", "</function_calls>"


class Olmo3Parser(TaggedPythonParser):
    """See `ToolParser`; calls that must be made have JSON between the tags."""

    openings, closing = (_OPEN,), _CLOSE
    shown: ClassVar[tuple[str, ...]] = (_OPEN, _CLOSE)
    form: ClassVar = CallForm.json_list(_OPEN, _CLOSE)

    @staticmethod
    def recognises(template: str) -> bool:
        """Whether the template has the tags."""
        return _OPEN in template and "functions" in template
