"""What a parser of answers is, and what it finds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from edgellm.tools.serve.tool_calls.grammar import CallForm

Tools = Mapping[str, Mapping[str, Any] | None]  # schemas of arguments by the functions' names
# What reading a call raises where there is none.
NoCall = (ValueError, KeyError, TypeError, AttributeError, SyntaxError, RecursionError, MemoryError)


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
class Thought:
    """A piece of the model's reasoning, which is no part of the answer."""

    text: str


Item = str | Call | Thought


def longest_begun(text: str, marks: Iterable[str]) -> int:
    """How many characters at a text's end may be the beginning of a mark, which is not whole."""
    return max(n for mark in marks for n in range(len(mark)) if text.endswith(mark[:n]))


class CallReader(Protocol):
    """Separates an answer's text from the calls in it, while it grows."""

    def push(self, text: str) -> list[Item]:
        """Add text; what is certainly text, and the calls that are complete."""
        ...

    def finish(self) -> list[Item]:
        """The rest, when the answer ends: what became no call is text."""
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
