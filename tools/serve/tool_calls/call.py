"""What a parser of tool calls is, and what it finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from edgellm.tools.serve.tool_calls.grammar import CallForm


@dataclass(frozen=True, slots=True)
class Call:
    """A function that the model wants to be called."""

    name: str
    arguments: str  # a JSON object


class CallReader(Protocol):
    """Separates an answer's text from the calls in it, while it grows."""

    def push(self, text: str) -> list[str | Call]:
        """Add text; what is certainly text, and the calls that are complete."""
        ...

    def finish(self) -> list[str | Call]:
        """The rest, when the answer ends: what became no call is text."""
        ...


class ToolParser(CallReader, Protocol):
    """The reader of a family of models, and how the family writes calls."""

    form: ClassVar[CallForm]  # what `push` reads, for answers that must be calls

    def __init__(self, names: set[str]) -> None:
        """With the names of the functions that there are."""
        ...

    @staticmethod
    def recognises(template: str) -> bool:
        """Whether a chat template asks for calls of this form."""
        ...
