"""Tool calls of Mistral Small 3.1 and Ministral 3: tag, name and arguments.

`[TOOL_CALLS]name[ARGS]{...}`, in some models with `[CALL_ID]id`; the tags are special tokens.
"""

from __future__ import annotations

import json
from typing import ClassVar

from edgellm.tools.serve.tool_calls.grammar import CallForm
from edgellm.tools.serve.tool_calls.parser import Call
from edgellm.tools.serve.tool_calls.tagged import TaggedParser

_MARK, _ARGUMENTS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MinistralParser(TaggedParser):
    """See `ToolParser`."""

    openings = (_MARK,)
    shown: ClassVar[tuple[str, ...]] = (_MARK, _ARGUMENTS, _ID)
    form: ClassVar = CallForm(
        before=f"{_MARK}NAME{_ARGUMENTS}",
        after="",
        between="",
        marks=(_MARK, _ARGUMENTS),
        tag=_MARK,
    )

    @staticmethod
    def recognises(template: str) -> bool:
        """Whether the template has the marks of calls and of arguments."""
        return all(part in template for part in (_MARK, _ARGUMENTS, "tools"))

    def _calls(self, text: str) -> tuple[list[Call], str]:
        name, mark, rest = text.partition(_ARGUMENTS)
        if not mark:
            raise ValueError("no arguments")
        rest = rest.lstrip()
        arguments, end = json.JSONDecoder().raw_decode(rest)
        return [Call.to(self._tools, name.partition(_ID)[0].strip(), arguments)], rest[end:]
