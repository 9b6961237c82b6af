"""Outputs cut into pieces, for parsers of streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from edgellm.tools.serve.tool_calls.parser import (
    Call,
    CallPart,
    CallReader,
    Item,
    ReasoningText,
)

_LONG = 1000  # characters: longer texts are only cut in two


def require_read(reader: Callable[[], CallReader], text: str, expected: Sequence[Item]) -> None:
    """Fail unless a text parses the same whole, letter by letter, and cut in two anywhere."""
    cuts = [(text[:at], text[at:]) for at in range(min(len(text), 250))]
    letters = [] if len(text) > _LONG else [tuple(text)]
    for pieces in [(text,), *letters, *cuts]:
        one = reader()
        found = [item for piece in pieces for item in one.push(piece)]
        assert joined([*found, *one.finish()]) == list(expected), pieces


def joined(found: Sequence[Item], *, is_cut: bool = False) -> list[Item]:
    """Adjacent pieces of one kind, merged; a call's parts must be the beginning of the call.

    Args:
        found: items of an output.
        is_cut: whether parts may have no call.
    """
    together: list[Item] = []
    parts: list[CallPart] = []
    for item in found:
        last = together[-1] if together else None
        if isinstance(item, CallPart):
            parts.append(item)
            continue
        if isinstance(item, Call) and parts:
            assert {part.name for part in parts} == {item.name}
            assert item.arguments.startswith("".join(part.arguments for part in parts))
            parts = []
        assert not parts, "text inside a call"
        if isinstance(item, str) and isinstance(last, str):
            together[-1] = last + item
        elif isinstance(item, ReasoningText) and isinstance(last, ReasoningText):
            together[-1] = ReasoningText(last.text + item.text)
        elif item:
            together.append(item)
    assert is_cut or not parts
    return together


def read_cut(reader: CallReader, text: str, cuts: Iterable[int]) -> list[Item]:
    """Results of a parser for a text in pieces."""
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    found = [item for begin, end in pairwise(places) for item in reader.push(text[begin:end])]
    return joined([*found, *reader.finish()])
