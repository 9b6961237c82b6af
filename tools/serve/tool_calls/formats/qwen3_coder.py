r"""Tool calls of Qwen3-Coder, Qwen3.5 and later, and Nemotron 3: a tag for each parameter.

`<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>`:
values are verbatim, and their type is that of the schema. The outer tags may be missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import Any, ClassVar

from edgellm.tools.serve.tool_calls.grammar import CallForm
from edgellm.tools.serve.tool_calls.parameter_rules import ParameterForm
from edgellm.tools.serve.tool_calls.parser import Call, Item, NoCall
from edgellm.tools.serve.tool_calls.tagged import TaggedParser, json_calls
from edgellm.tools.serve.tool_calls.typed_values import value_of

_OPEN, _CLOSE, _FUNCTION = "<tool_call>", "</tool_call>", "<function="
_NAME = re.compile(r"\s*<function=([^<>\n]+)>")
_KEY = re.compile(r"\s*<parameter=([^<>\n]+)>\n?")
# A value ends with the first tag that another tag follows, so that it may have tags of its own.
_VALUE_END = re.compile(r"\n?</parameter>(?=\s*(?:<parameter=|</function>|</tool_call>|$))")
_CALL_END = re.compile(r"(?:</parameter>|<function=[^<>\n]+>)\s*</function>")
_BLOCK_END = re.compile(_CALL_END.pattern + r"\s*</tool_call>")
_NEXT_KEY = re.compile(r"\n?<parameter=([^<>\n]+)>")
_LAST_END = re.compile(r"\n?(?:</parameter>\s*)?(?:</function>|$)")
_FUNCTION_END = re.compile(r"\s*</function>")


class Qwen3CoderParser(TaggedParser):
    """See `ToolParser`; it reads JSON between the outer tags, too."""

    openings, closing = (_OPEN, _FUNCTION), _CLOSE
    shown: ClassVar[tuple[str, ...]] = (_OPEN, _CLOSE)
    form: ClassVar = CallForm(
        before=f'{_OPEN}\n{{"name": "NAME", "arguments": ',
        after=f"}}\n{_CLOSE}",
        between="\n",
        marks=(_OPEN, _CLOSE),
        tag=_OPEN,
        parameters=ParameterForm(
            before=f"{_OPEN}\n<function=NAME>\n",
            opening="<parameter=KEY>\n",
            closing="\n</parameter>",
            between="\n",
            after=f"</function>\n{_CLOSE}",
        ),
    )

    @staticmethod
    def recognises(template: str) -> bool:
        """Whether the template explains the tags of parameters."""
        return all(part in template for part in (_FUNCTION, "<parameter=", "tools"))

    def _begin(self) -> tuple[int, int] | None:
        """See `TaggedParser`; a function without outer tags is its own content."""
        found = super()._begin()
        if found is None or self._held.startswith(_OPEN, found[0]):
            return found
        return found[0], found[0]

    def _end(self, inside: int) -> int:
        """See `TaggedParser`; tags inside a value are text."""
        text = self._held[inside:]
        is_bare = not inside
        if is_bare or text.lstrip().startswith(_FUNCTION):
            match = (_CALL_END if is_bare else _BLOCK_END).search(text)
            return inside + match.end() if match is not None else -1
        if _FUNCTION.startswith(text.strip()):
            return -1
        return super()._end(inside)

    def _whole(self, text: str) -> list[Item]:
        """See `TaggedParser`: the calls of a cut block whose functions end."""
        ends = [match.end() for match in _CALL_END.finditer(text)]
        try:
            return [*self._calls(text[: ends[-1]])[0]] if ends else super()._whole(text)
        except NoCall:
            return []

    def _calls(self, text: str) -> tuple[list[Call], str]:
        if text.lstrip().startswith("{"):
            return json_calls(text, self._tools)
        calls, at = [], 0
        while (match := _NAME.match(text, at)) is not None:
            name, at = match[1].strip(), match.end()
            schema = self._tools[name] or {}
            arguments = {}
            while (key := _KEY.match(text, at)) is not None:
                unread = (schema.get("properties") or {}).keys() - arguments.keys() - {key[1]}
                value, at = _value(text, key.end(), unread)
                arguments[key[1]] = value_of(value, _schema_of(schema, key[1]), schema)
            end = _FUNCTION_END.match(text, at)
            if end is None and not arguments:
                raise ValueError("the call has just begun")
            at = end.end() if end is not None else at
            calls.append(Call.to(self._tools, name, arguments))
        return calls, text[at:]


def _value(text: str, begin: int, unread: Set[str]) -> tuple[str, int]:
    """Return the value that begins at an offset, and the offset after it.

    Where its closing tag is missing, it ends at the next of the unread parameters.
    """
    match = _VALUE_END.search(text, begin) or _LAST_END.search(text, begin)
    end, after = match.span() if match is not None else (len(text), len(text))
    value = text[begin:end]
    if value.count("<parameter=") > value.count("</parameter>"):
        for key in _NEXT_KEY.finditer(value):
            if key[1] in unread:
                return value[: key.start()], begin + key.start()
    return value, after


def _schema_of(schema: Mapping[str, Any], key: str) -> Any:
    """Return the schema of an argument, or of those that the schema does not name."""
    return (schema.get("properties") or {}).get(key, schema.get("additionalProperties"))
