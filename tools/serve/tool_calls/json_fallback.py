"""Tool calls as plain JSON, which models write whatever their chat template says.

The JSON is the whole output, or a fenced block in it; other text goes to the parser of the model
family.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from edgellm.tools.serve.tool_calls.parser import Call, CallReader, Item, NoCall, Tools, cut_calls

_FENCE = "```"
_INFOS = ("json", "tool_call", "tool", "")
_OPENED = re.compile(r"```[ \t]*(?:json|tool_call|tool)?[ \t]*\n\s*[\[{]")
_UNDECIDED = re.compile(r"```[ \t]*[a-z_]*[ \t]*(\n\s*)?")
_BARE = re.compile(r'\{\s*("|$)|\[\s*(\{|$)')


class JsonFallbackParser:
    """See `CallReader`; `inner` parses text that is neither bare nor fenced JSON."""

    def __init__(self, inner: CallReader, tools: Tools) -> None:
        self._inner, self._tools = inner, tools
        self._held = ""
        self._is_bare: bool | None = None  # whether the output starts as JSON; None: unknown
        self._is_in_code = False  # in a fenced block of another language
        self._follows_call = False

    def push(self, text: str) -> list[Item]:
        """See `CallReader.push`."""
        self._held += text
        if self._is_bare is None:
            begun = self._held.lstrip()
            if not begun:
                return []
            if _BARE.match(begun) is not None:
                self._is_bare = True if len(begun) > 1 and not begun[1:].isspace() else None
                return []
            self._is_bare = False
        return [] if self._is_bare else self._scan()

    def finish(self, *, is_cut: bool = False) -> list[Item]:
        """See `CallReader.finish`."""
        held, self._held = self._held, ""
        text = held if self._is_bare is not False else _inside(held) if _OPENED.match(held) else ""
        if found := loose_calls(text, self._tools):
            return [*found]
        if is_cut and (whole := cut_calls(text, self._tools)) is not None:
            return [*whole]
        return [*self._passed(held), *self._inner.finish(is_cut=is_cut)]

    def _scan(self) -> list[Item]:
        """Forward text up to an incomplete block."""
        found: list[Item] = []
        while (begin := self._held.find(_FENCE)) >= 0:
            found += self._cut(begin)
            if self._is_in_code:
                found += self._cut(len(_FENCE))
                self._is_in_code = False
            elif _OPENED.match(self._held) is not None:
                end = self._held.find(_FENCE, len(_FENCE))
                if end < 0:
                    return found
                found += self._block(end + len(_FENCE))
            elif self._may_open():
                return found
            else:
                found += self._cut(len(_FENCE))
                self._is_in_code = True
        keep = next((n for n in (2, 1) if self._held.endswith(_FENCE[:n])), 0)
        return found + self._cut(len(self._held) - keep)

    def _may_open(self) -> bool:
        match = _UNDECIDED.fullmatch(self._held)
        info = self._held[len(_FENCE) :].strip()
        whole = match is not None and match[1] is not None
        return match is not None and (
            info in _INFOS if whole else any(name.startswith(info) for name in _INFOS)
        )

    def _block(self, end: int) -> list[Item]:
        """Take a complete block from the front: its calls, or its text."""
        calls = loose_calls(_inside(self._held[:end]), self._tools)
        if not calls:
            return self._cut(end)
        self._held, self._follows_call = self._held[end:], True
        return [*calls]

    def _cut(self, size: int) -> list[Item]:
        text, self._held = self._held[:size], self._held[size:]
        return self._passed(text)

    def _passed(self, text: str) -> list[Item]:
        if self._follows_call:
            text = text.lstrip()
            self._follows_call = not text
        return self._inner.push(text) if text else []


def loose_calls(text: str, tools: Tools) -> list[Call]:
    """The calls of a JSON text; empty if any value is not a call."""
    try:
        found = [_call(value) for value in _values(text)]
    except NoCall:
        return []
    return found if all(call.name in tools for call in found) else []


def _inside(block: str) -> str:
    """The content of a fenced block."""
    return block.partition("\n")[2].removesuffix(_FENCE)


def _values(text: str) -> Iterator[Any]:
    """Successive JSON values; lists are flattened."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        if text[at] in " \n\r\t;,":
            at += 1
            continue
        value, at = decoder.raw_decode(text, at)
        yield from value if isinstance(value, list) else [value]


def _call(value: Any) -> Call:
    """A call; raises one of `NoCall` for another value."""
    value = value.get("function", value) if value.get("type") == "function" else value
    arguments = value["arguments"] if "arguments" in value else value["parameters"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise TypeError("arguments are an object")
    return Call(str(value["name"]), json.dumps(arguments, ensure_ascii=False))
