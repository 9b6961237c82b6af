"""Protocols of output parsers, and the items that they return."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from edgellm.tools.serve.tool_calls.grammar import CallForm

Tools = Mapping[str, Mapping[str, Any] | None]  # argument schemas by function name
# Exceptions of parsing text that is not a call.
NoCall = (ValueError, KeyError, TypeError, AttributeError, SyntaxError, RecursionError, MemoryError)

_BETWEEN = " \n\r\t;,[]"  # what stands around calls
_NAMES = ("name", "tool_name")


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of the model."""

    name: str
    arguments: str  # a JSON object

    @classmethod
    def to(cls, tools: Tools, name: Any, arguments: Any) -> Call:
        """A call of a known function; raises one of `NoCall`."""
        if not isinstance(name, str) or name not in tools or not isinstance(arguments, dict):
            raise ValueError("no call")
        return cls(name, json.dumps(arguments, ensure_ascii=False))


@dataclass(frozen=True, slots=True)
class CallPart:
    """More of the arguments of a call whose `Call` follows, unless `max_tokens` cuts it."""

    name: str
    arguments: str  # JSON that continues that of earlier parts


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """A part of the model's reasoning."""

    text: str


Item = str | Call | CallPart | ReasoningText


def longest_begun(text: str, marks: Iterable[str]) -> int:
    """Length of the longest suffix of a text that is a proper prefix of a mark."""
    return max(n for mark in marks for n in range(len(mark)) if text.endswith(mark[:n]))


def is_begun(text: str, marks: Iterable[str]) -> bool:
    """Whether a text begins with a mark, or is two or more characters of one's beginning."""
    begun = text.strip()
    return any(
        begun.startswith(mark) or (mark[:2] == begun[:2] and mark.startswith(begun))
        for mark in marks
    )


def cut_calls(text: str, tools: Tools) -> list[Call] | None:
    """The complete calls of a JSON text that ends in the middle of a call; None: it is no call.

    Calls follow each other, or are in a list.
    """
    calls: list[Call] = []
    rest = text.lstrip(_BETWEEN)
    while rest:
        try:
            value, end = json.JSONDecoder().raw_decode(rest)
            arguments = value["arguments"] if "arguments" in value else value["parameters"]
            name = value["tool_name"] if "tool_name" in value else value["name"]
            calls.append(Call.to(tools, name, arguments))
        except NoCall:
            return calls if _is_call_begun(rest, tools) else None
        rest = rest[end:].lstrip(_BETWEEN)
    return calls or None


def _is_call_begun(text: str, tools: Tools) -> bool:
    """Whether a text may go on as the JSON of a call, and has at least a key's quote."""
    begun = re.sub(r'\s+|"type":\s*"function",\s*"function":\s*\{', "", text)
    heads = [f'{{"{key}":"{name}"' for key in _NAMES for name in tools]
    return len(begun) > 1 and any(begun.startswith(h) or h.startswith(begun) for h in heads)


class CallReader(Protocol):
    """Incremental parser that separates text and tool calls."""

    def push(self, text: str) -> list[Item]:
        """Add text; return certain text and complete calls."""
        ...

    def finish(self, *, is_cut: bool = False) -> list[Item]:
        """Return the rest at the end of the output; incomplete calls are text.

        With `is_cut`, `max_tokens` ended the output, and an incomplete call is dropped.
        """
        ...


class ToolParser(CallReader, Protocol):
    """Parser of a model family, and the format of its calls."""

    form: ClassVar[CallForm]  # format of forced calls
    shown: ClassVar[tuple[str, ...]]  # special tokens that the text must keep

    def __init__(self, tools: Tools) -> None:
        """Create a parser for the functions of `tools`."""
        ...

    @staticmethod
    def recognises(template: str) -> bool:
        """Whether a chat template uses this format."""
        ...
