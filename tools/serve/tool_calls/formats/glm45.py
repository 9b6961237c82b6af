r"""Tool calls of GLM-4.5 and later: names, keys and values between tags.

`<tool_call>name\n<arg_key>key</arg_key>\n<arg_value>value</arg_value>\n</tool_call>`: values are
JSON, except for strings, which are verbatim.
"""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar

from edgellm.tools.serve.tool_calls.grammar import CallForm
from edgellm.tools.serve.tool_calls.parser import Call
from edgellm.tools.serve.tool_calls.tagged import TaggedParser, json_calls

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


class Glm45Parser(TaggedParser):
    """See `ToolParser`; calls that must be made have JSON between the tags."""

    openings, closing = (_OPEN,), _CLOSE
    shown: ClassVar[tuple[str, ...]] = (
        _OPEN, _CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    )  # fmt: skip
    form: ClassVar = CallForm(
        before=f'{_OPEN}{{"name": "NAME", "arguments": ',
        after=f"}}{_CLOSE}",
        between="\n",
        marks=(_OPEN, _CLOSE),
        tag=_OPEN,
    )

    @staticmethod
    def recognises(template: str) -> bool:
        """Whether the template explains the tags of keys."""
        return all(part in template for part in (_OPEN, "<arg_key>", "tools"))

    def _calls(self, text: str) -> tuple[list[Call], str]:
        text = text.strip()
        if text.startswith("{"):
            return json_calls(text, self._tools)
        name, mark, pairs = text.partition("<arg_key>")
        name, pairs, arguments, end = name.strip(), mark + pairs, {}, 0
        schema = (self._tools[name] or {}).get("properties", {})
        while (pair := _PAIR.match(pairs, end)) is not None:
            end = pair.end()
            arguments[pair[1].strip()] = _value(pair[2], schema.get(pair[1].strip(), {}))
        if pairs[end:].strip():
            raise ValueError("no pairs of keys and values")
        return [Call.to(self._tools, name, arguments)], ""


def _value(text: str, schema: Any) -> Any:
    """A value by its schema; without one it is JSON if it parses."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
