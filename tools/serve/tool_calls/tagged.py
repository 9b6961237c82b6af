"""Base of parsers of calls between tags, anywhere in the output."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from edgellm.tools.serve.tool_calls.parser import (
    Call,
    Item,
    NoCall,
    Tools,
    cut_calls,
    is_begun,
    longest_begun,
)


class TaggedParser:
    """See `CallReader`; drops white space after a call. Subclasses parse the blocks."""

    openings: ClassVar[tuple[str, ...]]
    closing: ClassVar[str] = ""  # empty: a block ends at the next one or at the end

    def __init__(self, tools: Tools) -> None:
        self._tools, self._held, self._follows_call = tools, "", False

    def push(self, text: str) -> list[Item]:
        """See `CallReader.push`."""
        self._held += text
        found: list[Item] = []
        while (block := self._begin()) is not None:
            begin, inside = block
            found += self._text(begin)
            end = self._end(inside - begin)
            if end < 0:
                return found
            found += self._block(self._held[:end], inside - begin)
            self._held = self._held[end:]
        return found + self._text(len(self._held) - longest_begun(self._held, self.openings))

    def finish(self, *, is_cut: bool = False) -> list[Item]:
        """See `CallReader.finish`; a block without its closing tag counts if its calls parse."""
        held = self._held
        block = self._begin()
        self._held = ""
        if block is not None:
            items = [] if is_cut and self.closing else self._block(held, block[1])
            return self._whole(held[block[1] :]) if is_cut and items in ([], [held]) else items
        if is_cut and is_begun(held, self.openings):
            return []
        return [held] if held and not (self._follows_call and held.isspace()) else []

    def _calls(self, text: str) -> tuple[list[Call], str]:
        """The calls of a block and the text after them; raises one of `NoCall`."""
        raise NotImplementedError

    def _whole(self, text: str) -> list[Item]:
        """The complete calls of a block that is cut, as far as they are JSON."""
        text = text[: len(text) - longest_begun(text, (self.closing or " ",))]
        return [*(cut_calls(text, self._tools) or ())]

    def _begin(self) -> tuple[int, int] | None:
        """Offsets of the first block and of its content."""
        found = ((self._held.find(mark), mark) for mark in self.openings)
        return min(((at, at + len(mark)) for at, mark in found if at >= 0), default=None)

    def _end(self, inside: int) -> int:
        """End of the block at the front; below 0: incomplete."""
        if self.closing:
            at = self._held.find(self.closing, inside)
            return at + len(self.closing) if at >= 0 else at
        places = [at for mark in self.openings if (at := self._held.find(mark, inside)) >= 0]
        return min(places, default=-1)

    def _text(self, size: int) -> list[Item]:
        text, self._held = self._held[:size], self._held[size:]
        if self._follows_call:
            text = text.lstrip()
            self._follows_call = not text
        return [text] if text else []

    def _block(self, block: str, inside: int) -> list[Item]:
        """The calls of a block, or its text if it does not parse; an empty list is no call."""
        text = block[inside:].removesuffix(self.closing)
        if text.split() in (["[]"], ["[", "]"]):
            return []
        try:
            calls, rest = self._calls(text)
            if not calls:
                raise ValueError("no call")
        except NoCall:
            self._follows_call = False
            return [block]
        rest = rest.lstrip()
        self._follows_call = not rest
        return [*calls, *([rest] if rest else [])]


def json_calls(
    text: str, tools: Tools, name: str = "name", arguments: str = "arguments"
) -> tuple[list[Call], str]:
    """The calls of a JSON object or list, and the text after it.

    Args:
        text: starts with JSON.
        tools: the callable functions.
        name: key of the function's name.
        arguments: key of the arguments.

    Raises one of `NoCall`.
    """
    text = text.lstrip()
    found, end = json.JSONDecoder().raw_decode(text)
    listed: list[Any] = found if isinstance(found, list) else [found]
    calls = [Call.to(tools, one[name], one.get(arguments, {})) for one in listed]
    return calls, text[end:]
