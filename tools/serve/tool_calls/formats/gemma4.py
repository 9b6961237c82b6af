r"""Tool calls of Gemma 4: a notation of its own between tags.

`<|tool_call>call:name{key:<|"|>text<|"|>,number:3,list:[true],object:{key:null}}<tool_call|>`:
strings stand between marks and have no escapes; keys are bare or strings.
"""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar

from edgellm.tools.serve.tool_calls.grammar import CallForm
from edgellm.tools.serve.tool_calls.parser import Call
from edgellm.tools.serve.tool_calls.tagged import TaggedParser, json_calls

_OPEN, _CLOSE, _MARK = "<|tool_call>", "<tool_call|>", '<|"|>'
_NAME = re.compile(r"call:([^{\s]+)\s*(?=\{)")
_BARE = re.compile(r"[^,:{}\[\]]*")
_NUMBER = re.compile(
    r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
)  # also `1.` and `.5`, unlike JSON
_SPACE = re.compile(r"\s*")
_MAX_DEPTH = 64


class Gemma4Parser(TaggedParser):
    """See `ToolParser`; calls that must be made have JSON between the tags."""

    openings, closing = (_OPEN,), _CLOSE
    shown: ClassVar[tuple[str, ...]] = (_OPEN, _CLOSE, _MARK)
    form: ClassVar = CallForm(
        before=f'{_OPEN}{{"name": "NAME", "arguments": ',
        after=f"}}{_CLOSE}",
        between="",
        marks=(_OPEN, _CLOSE),
        tag=_OPEN,
    )

    @staticmethod
    def recognises(template: str) -> bool:
        """Whether the template has the tags and the marks of strings."""
        return _OPEN in template and _MARK in template

    def _end(self, inside: int) -> int:
        """See `TaggedParser`; a tag inside a string is text."""
        at = inside
        while (end := self._held.find(_CLOSE, at)) >= 0:
            if self._held.count(_MARK, inside, end) % 2 == 0:
                return end + len(_CLOSE)
            at = end + 1
        return -1

    def _calls(self, text: str) -> tuple[list[Call], str]:
        text = text.strip()
        if text.startswith("{"):
            return json_calls(text, self._tools)
        match = _NAME.match(text)
        if match is None:
            raise ValueError("no name of a function")
        arguments, end = _value(text, match.end(), 0)
        if end < len(text):
            raise ValueError("text after the arguments")
        return [Call.to(self._tools, match[1], arguments)], ""


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """Return the value that begins at an offset, and the offset after it."""
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    at = _after_space(text, at)
    if text.startswith(_MARK, at):
        return _string(text, at)
    if text.startswith(("{", "["), at):
        return _members(text, at, depth)
    match = _BARE.match(text, at)
    assert match is not None  # it also matches nothing
    bare = match[0].strip()
    try:
        return json.loads(bare), match.end()
    except ValueError:
        return float(bare) if _NUMBER.fullmatch(bare) else bare, match.end()


def _members(text: str, at: int, depth: int) -> tuple[Any, int]:
    """Return the object or list at an offset, and the offset after it."""
    is_object, closing = text[at] == "{", "}" if text[at] == "{" else "]"
    entries: dict[str, Any] = {}
    items: list[Any] = []
    at = _after_space(text, at + 1)
    while not text.startswith(closing, at):
        if is_object:
            key, at = _key(text, at)
            entries[key], at = _value(text, at, depth + 1)
        else:
            value, at = _value(text, at, depth + 1)
            items.append(value)
        at = _after_space(text, at)
        if text.startswith(",", at):
            at = _after_space(text, at + 1)
        elif not text.startswith(closing, at):
            raise ValueError("neither another value nor the end")
    return entries if is_object else items, at + 1


def _key(text: str, at: int) -> tuple[str, int]:
    if text.startswith(_MARK, at):
        key, at = _string(text, at)
    else:
        match = _BARE.match(text, at)
        assert match is not None
        key, at = match[0].strip(), match.end()
    at = _after_space(text, at)
    if not key or not text.startswith(":", at):
        raise ValueError("a value without a key")
    return key, at + 1


def _string(text: str, at: int) -> tuple[str, int]:
    end = text.index(_MARK, at + len(_MARK))
    return text[at + len(_MARK) : end], end + len(_MARK)


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match is not None else at
