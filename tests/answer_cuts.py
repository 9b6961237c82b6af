"""Answers that come in pieces, to whatever reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgellm.tools.serve.tool_calls.call import CallReader, Item, Thought

_LONG = 1000  # characters: such a text is cut in two alone


def require_read(reader: Callable[[], CallReader], text: str, expected: Sequence[Item]) -> None:
    """Fail if a text gives anything else, whole, letter by letter, or cut in two anywhere."""
    cuts = [(text[:at], text[at:]) for at in range(min(len(text), 250))]
    letters = [] if len(text) > _LONG else [tuple(text)]
    for pieces in [(text,), *letters, *cuts]:
        one = reader()
        found = [item for piece in pieces for item in one.push(piece)]
        assert _joined([*found, *one.finish()]) == list(expected), pieces


def _joined(found: Sequence[Item]) -> list[Item]:
    """Pieces of a kind side by side are one."""
    joined: list[Item] = []
    for item in found:
        last = joined[-1] if joined else None
        if isinstance(item, str) and isinstance(last, str):
            joined[-1] = last + item
        elif isinstance(item, Thought) and isinstance(last, Thought):
            joined[-1] = Thought(last.text + item.text)
        elif item:
            joined.append(item)
    return joined
