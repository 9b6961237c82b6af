"""Separates reasoning, between tags at the start of the output, from text and calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from edgellm.device_runtime.text.reasoning_marks import ThinkForm
from edgellm.tools.serve.tool_calls.parser import CallReader, Item, ReasoningText, longest_begun

_State = Literal["begin", "thought", "after_thought", "wrapped", "after", "text"]


class ThinkReader:
    """See `CallReader`; other text goes to `inner`, or is text if that is None."""

    def __init__(
        self,
        *,
        form: ThinkForm,
        inner: CallReader | None,
        is_inside: bool,
        is_begun: bool = False,
    ) -> None:
        """Create a parser of one output.

        Args:
            form: the tags of reasoning.
            inner: parser of the rest.
            is_inside: whether the prompt contains the opening tag.
            is_begun: whether the prompt also contains reasoning after it.
        """
        self._form, self._inner, self._held = form, inner, ""
        self._state: _State = "thought" if is_inside else "begin"
        self._is_begun = is_begun  # whether reasoning or wrapped text has started
        self._end = ""  # closing tag of the wrapped text

    def push(self, text: str) -> list[Item]:
        """See `CallReader.push`."""
        self._held += text
        found: list[Item] = []
        before = None
        while before != (self._state, self._held):
            before = self._state, self._held
            found += self._advance()
        return found

    def finish(self, *, is_cut: bool = False) -> list[Item]:
        """See `CallReader.finish`; unfinished reasoning is reasoning."""
        held, self._held = self._held, ""
        if self._state == "thought":
            found = self._thought(held.rstrip())
        elif self._state in ("after_thought", "after") and not held.strip():
            found = []
        else:
            found = self._passed(held)
        return [*found, *(self._inner.finish(is_cut=is_cut) if self._inner is not None else [])]

    def _advance(self) -> list[Item]:
        if self._state == "begin":
            return self._begin()
        if self._state == "thought":
            return self._think()
        if self._state == "after_thought":
            return self._unwrap()
        if self._state == "wrapped":
            return self._inside()
        if self._state == "after":
            self._state = "text" if self._held.strip() else "after"
            return []
        return self._passed(self._take(len(self._held)))

    def _begin(self) -> list[Item]:
        """Detect reasoning or a wrapping tag at the start of the output."""
        begun = self._held.lstrip()
        if begun.startswith(self._form.opening):
            self._held, self._state = begun[len(self._form.opening) :], "thought"
        elif not _may_begin(begun, (self._form.opening, *(wrap[0] for wrap in self._form.wraps))):
            self._state = "text"
        elif any(begun.startswith(wrap[0]) for wrap in self._form.wraps):
            self._state = "after_thought"
        return []

    def _think(self) -> list[Item]:
        if not self._is_begun:
            self._held = self._held.lstrip()
            if _may_begin(self._held, (self._form.opening,)):  # some models repeat the opening tag
                if self._held.startswith(self._form.opening):
                    self._held = self._held[len(self._form.opening) :]
                return []
        if (end := self._held.find(self._form.closing)) >= 0:
            found = self._thought(self._take(end).rstrip())
            self._held, self._state = self._held[len(self._form.closing) :], "after_thought"
            return found
        return self._thought(self._take(_certain(self._held, self._form.closing)))

    def _unwrap(self) -> list[Item]:
        self._held = self._held.lstrip()
        for begin, end in self._form.wraps:
            if self._held.startswith(begin):
                self._held, self._end = self._held[len(begin) :], end
                self._state, self._is_begun = "wrapped", False
                return []
        if self._held and not _may_begin(self._held, (wrap[0] for wrap in self._form.wraps)):
            self._state = "text"
        return []

    def _inside(self) -> list[Item]:
        """The wrapped text, up to its closing tag."""
        if not self._is_begun:
            self._held = self._held.lstrip()
            self._is_begun = bool(self._held)
        if (end := self._held.find(self._end)) >= 0:
            found = self._passed(self._take(end).rstrip())
            self._held, self._state = self._held[len(self._end) :], "after"
            return found
        return self._passed(self._take(_certain(self._held, self._end)))

    def _take(self, size: int) -> str:
        text, self._held = self._held[:size], self._held[size:]
        return text

    def _thought(self, text: str) -> list[Item]:
        self._is_begun = self._is_begun or bool(text)
        return [ReasoningText(text)] if text else []

    def _passed(self, text: str) -> list[Item]:
        if self._inner is not None:
            return self._inner.push(text) if text else []
        return [text] if text else []


def _may_begin(text: str, marks: Iterable[str]) -> bool:
    """Whether a text starts with a mark, or may do so with more text."""
    return any(mark.startswith(text[: len(mark)]) for mark in marks)


def _certain(text: str, mark: str) -> int:
    """Length of the text before a possible mark and its leading white space."""
    return len(text[: len(text) - longest_begun(text, (mark,))].rstrip())
