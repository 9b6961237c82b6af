r"""Tool calls of Qwen3-Coder, Qwen3.5 and later, and Nemotron 3: a tag for each parameter.

`<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>`:
values are verbatim, and their type is that of the schema. The outer tags may be missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Set
from typing import Any, ClassVar

from edgellm.tools.serve.tool_calls.grammar import CallForm
from edgellm.tools.serve.tool_calls.parameter_rules import ParameterForm
from edgellm.tools.serve.tool_calls.parser import (
    Call,
    CallPart,
    Item,
    NoCall,
    Tools,
    longest_begun,
)
from edgellm.tools.serve.tool_calls.tagged import TaggedParser, json_calls
from edgellm.tools.serve.tool_calls.typed_values import types_of, value_of

_OPEN, _CLOSE, _FUNCTION = "<tool_call>", "</tool_call>", "<function="
_NAME = re.compile(r"\s*<function=([^<>\n]+)>")
_KEY = re.compile(r"\s*<parameter=([^<>\n]+)>\n?")
# A value ends with the first tag that another tag follows, so that it may have tags of its own.
_FOLLOWED_END = re.compile(r"\n?</parameter>(?=\s*(?:<parameter=|</function>|</tool_call>))")
_LAST_END = re.compile(r"\n?(?:</parameter>\s*)?(?:</function>|$)")
_NEXT_KEY = re.compile(r"\n?<parameter=([^<>\n]+)>")
_TAG = re.compile(r"\n?</?parameter")
_TAGS = ("\n</parameter", "\n<parameter", "</parameter", "<parameter")
_CALL_END = re.compile(r"(?:</parameter>|<function=[^<>\n]+>)\s*</function>")
_BLOCK_END = re.compile(_CALL_END.pattern + r"\s*</tool_call>")
_FUNCTION_END = re.compile(r"\s*</function>")
_OVERLAP = 256  # characters before new text in which an end may begin


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

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._searched = 0  # characters of the block without its end
        self._growing: _GrowingCall | None = None

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

    def push(self, text: str) -> list[Item]:
        """See `CallReader.push`; the first call of a block grows while it is written."""
        found = super().push(text)
        if self._begin() is None:
            return found
        if self._growing is None:
            self._growing = _GrowingCall(self._tools)
        part = self._growing.read(self._held)
        return [*found, part] if part is not None else found

    def _block(self, block: str, inside: int) -> list[Item]:
        """See `TaggedParser`; the next block begins anew."""
        self._searched, self._growing = 0, None
        return super()._block(block, inside)

    def _end(self, inside: int) -> int:
        """See `TaggedParser`; tags inside a value are text."""
        is_bare = not inside
        if is_bare or _NAME.match(self._held, inside):
            begin = max(inside, self._searched - _OVERLAP)
            match = (_CALL_END if is_bare else _BLOCK_END).search(self._held, begin)
            self._searched = len(self._held)
            if match is None:
                return -1
            return self._after_closing(match.end()) if is_bare else match.end()
        if _FUNCTION.startswith(self._held[inside : inside + len(_FUNCTION) + 8].strip()):
            return -1
        return super()._end(inside)

    def _after_closing(self, end: int) -> int:
        """The end of a function without an opening tag, which may have a closing one."""
        rest = self._held[end:].lstrip()
        if rest.startswith(_CLOSE):
            return len(self._held) - len(rest) + len(_CLOSE)
        return -1 if _CLOSE.startswith(rest) else end

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
            arguments: dict[str, Any] = {}
            while (key := _KEY.match(text, at)) is not None:
                value, at = _last_value(text, key.end(), _unread(schema, arguments.keys(), key[1]))
                arguments.setdefault(key[1], value_of(value, _schema_of(schema, key[1]), schema))
            end = _FUNCTION_END.match(text, at)
            if end is None and not arguments:
                raise ValueError("the call has just begun")
            at = end.end() if end is not None else at
            calls.append(Call.to(self._tools, name, arguments))
        return calls, text[at:]


class _GrowingCall:
    """Reads the first call of a block while it is written."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._name = ""
        self._schema: Mapping[str, Any] = {}
        self._known: set[str] = set()  # keys of complete values
        self._at = self._sent = 0
        self._key: str | None = None  # of the value that is being written
        self._begin = 0  # of that value
        self._json = ""  # of all arguments up to `_at`
        self._is_over = False

    def read(self, block: str) -> CallPart | None:
        """Return what is new and certain in a block, which grows from call to call."""
        if not self._name and not self._is_over:
            self._read_name(block)
        while not self._is_over and self._name and self._read_step(block):
            pass
        new, self._sent = self._json[self._sent :], len(self._json)
        return CallPart(self._name, new) if new else None

    def _read_name(self, block: str) -> None:
        inside = len(_OPEN) if block.startswith(_OPEN) else 0
        if (match := _NAME.match(block, inside)) is not None:
            self._is_over = match[1].strip() not in self._tools
            self._name, self._at = match[1].strip(), match.end()
            self._schema = {} if self._is_over else self._tools[self._name] or {}

    def _read_step(self, block: str) -> bool:
        """Read a tag, a value or a part of it; return whether more may follow."""
        if self._key is None:
            return self._read_key(block)
        if self._key in self._known or not self._is_text(self._key):
            return self._read_value(block)
        tag = _TAG.search(block, self._at)
        end = tag.start() if tag is not None else self._certain(block)
        self._json += _escaped(block[self._at : end])
        self._at = max(self._at, end)
        return tag is not None and self._read_value(block)

    def _read_key(self, block: str) -> bool:
        key = _KEY.match(block, self._at)
        if key is None or key.end() == len(block):  # a line break may follow
            if self._json and _FUNCTION_END.match(block, self._at) is not None:
                self._json, self._is_over = self._json + "}", True
            return False
        self._key, self._at, self._begin = key[1], key.end(), key.end()
        if key[1] not in self._known:
            head = json.dumps(key[1], ensure_ascii=False)
            self._json += (", " if self._json else "{") + head + ": "
            self._json += '"' if self._is_text(key[1]) else ""
        return True

    def _read_value(self, block: str) -> bool:
        """Read the end of a value; return whether it is there."""
        assert self._key is not None
        unread = _unread(self._schema, self._known, self._key)
        if (found := _value(block, self._begin, unread)) is None:
            return False
        text, after = found
        if self._key not in self._known:
            if self._is_text(self._key):
                self._json += _escaped(text[self._at - self._begin :]) + '"'
            else:
                value = value_of(text, _schema_of(self._schema, self._key), self._schema)
                self._json += json.dumps(value, ensure_ascii=False)
        self._known.add(self._key)
        self._key, self._at = None, after
        return True

    def _is_text(self, key: str) -> bool:
        """Whether any text is a string by the argument's schema."""
        return {*types_of(_schema_of(self._schema, key), self._schema)} <= {"string"}

    def _certain(self, block: str) -> int:
        """The end of the text that belongs to the value whatever follows."""
        end = len(block) - longest_begun(block[-len(_TAGS[0]) :], _TAGS)
        return end - (end == len(block) and block.endswith("\n"))


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _unread(schema: Mapping[str, Any], known: Set[str], key: str) -> Set[str]:
    """Return the names of the arguments that are still missing after one."""
    return (schema.get("properties") or {}).keys() - known - {key}


def _last_value(text: str, begin: int, unread: Set[str]) -> tuple[str, int]:
    """Return the value of a complete text that begins at an offset, and the offset after it."""
    if (found := _value(text, begin, unread)) is not None:
        return found
    match = _LAST_END.search(text, begin)
    assert match is not None  # it also matches the end
    return _cut(text, begin, match.span(), unread)


def _value(text: str, begin: int, unread: Set[str]) -> tuple[str, int] | None:
    """Return the value that begins at an offset, and the offset after it; None: it has no end yet.

    Where its closing tag is missing, it ends at the next of the unread arguments.
    """
    match = _FOLLOWED_END.search(text, begin)
    return None if match is None else _cut(text, begin, match.span(), unread)


def _cut(text: str, begin: int, end: tuple[int, int], unread: Set[str]) -> tuple[str, int]:
    value = text[begin : end[0]]
    if value.count("<parameter=") > value.count("</parameter>"):
        for key in _NEXT_KEY.finditer(value):
            if key[1] in unread:
                return value[: key.start()], begin + key.start()
    return value, end[1]


def _schema_of(schema: Mapping[str, Any], key: str) -> Any:
    """Return the schema of an argument, or of those that the schema does not name."""
    return (schema.get("properties") or {}).get(key, schema.get("additionalProperties"))
