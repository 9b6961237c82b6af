"""What a parser of answers is, and what it finds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from edgellm.tools.serve.tool_calls.grammar import CallForm

Tools = Mapping[str, Mapping[str, Any] | None]  # schemas of arguments by the functions' names
# What reading a call raises where there is none.
NoCall = (ValueError, KeyError, TypeError, AttributeError, SyntaxError, RecursionError, MemoryError)

_BETWEEN = " \n\r\t;,[]"  # what stands around calls
_NAMES = ("name", "tool_name")


@dataclass(frozen=True, slots=True)
class Call:
    """A function that the model wants to be called."""

    name: str
    arguments: str  # a JSON object

    @classmethod
    def to(cls, tools: Tools, name: Any, arguments: Any) -> Call:
        """A call of a function that there is; raises one of `NoCall`."""
        if not isinstance(name, str) or name not in tools or not isinstance(arguments, dict):
            raise ValueError("no call")
        return cls(name, json.dumps(arguments, ensure_ascii=False))


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """A piece of the model's reasoning, which is no part of the answer."""

    text: str


Item = str | Call | ReasoningText


def longest_begun(text: str, marks: Iterable[str]) -> int:
    """How many characters at a text's end may be the beginning of a mark, which is not whole."""
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

    Calls stand side by side, or in a list.
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
    """Separates an answer's text from the calls in it, while it grows."""

    def push(self, text: str) -> list[Item]:
        """Add text; what is certainly text, and the calls that are complete."""
        ...

    def finish(self, *, is_cut: bool = False) -> list[Item]:
        """The rest, when the output ends: what became no call is text.

        With `is_cut`, its maximum length ended it: half a call is neither a call nor text.
        """
        ...


class ToolParser(CallReader, Protocol):
    """The reader of a family of models, and how the family writes calls."""

    form: ClassVar[CallForm]  # what `push` reads, for answers that must be calls
    shown: ClassVar[tuple[str, ...]]  # special tokens that it must see in the text

    def __init__(self, tools: Tools) -> None:
        """With the functions that there are."""
        ...

    @staticmethod
    def recognises(template: str) -> bool:
        """Whether a chat template asks for calls of this form."""
        ...
