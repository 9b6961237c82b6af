r"""Tool calls of GLM-4.5 and later: names, keys and values between tags.

`<tool_call>name\n<arg_key>key</arg_key>\n<arg_value>value</arg_value>\n</tool_call>`: values are
JSON, except for strings, which are verbatim.
"""

from __future__ import annotations

import re
from typing import ClassVar

from edgellm.tools.serve.tool_calls.grammar import CallForm
from edgellm.tools.serve.tool_calls.parameter_rules import ParameterForm
from edgellm.tools.serve.tool_calls.parser import Call
from edgellm.tools.serve.tool_calls.tagged import TaggedParser, json_calls
from edgellm.tools.serve.tool_calls.typed_values import value_of

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_TAGS = (_OPEN, _CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


class Glm45Parser(TaggedParser):
    """See `ToolParser`; it reads JSON between the tags, too."""

    openings, closing = (_OPEN,), _CLOSE
    shown: ClassVar[tuple[str, ...]] = _TAGS
    form: ClassVar = CallForm(
        before=f'{_OPEN}{{"name": "NAME", "arguments": ',
        after=f"}}{_CLOSE}",
        between="\n",
        marks=_TAGS,
        tag=_OPEN,
        parameters=ParameterForm(
            before=f"{_OPEN}NAME\n",
            opening="<arg_key>KEY</arg_key>\n<arg_value>",
            closing="</arg_value>",
            between="\n",
            after=_CLOSE,
        ),
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
        name, pairs, end = name.strip(), mark + pairs, 0
        schema, arguments = self._tools[name] or {}, {}
        properties = schema.get("properties") or {}
        while (pair := _PAIR.match(pairs, end)) is not None:
            key, end = pair[1].strip(), pair.end()
            arguments[key] = value_of(pair[2], properties.get(key), schema)
        if pairs[end:].strip():
            raise ValueError("no pairs of keys and values")
        return [Call.to(self._tools, name, arguments)], ""
