r"""Tool calls of GLM-4: a line with the name, then the arguments.

`name\n{...}`, after text or alone.
"""

from __future__ import annotations

import json
from typing import ClassVar

from edgellm.tools.serve.tool_calls.grammar import CallForm
from edgellm.tools.serve.tool_calls.parser import Call, Item, NoCall, Tools


class Glm4Parser:
    """See `ToolParser`; drops white space after a call."""

    shown: ClassVar[tuple[str, ...]] = ()
    form: ClassVar = CallForm(before="NAME\n", after="", between="\n")

    def __init__(self, tools: Tools) -> None:
        self._tools, self._held, self._follows_call = tools, "", False
        self._is_line_begun = False  # whether the held text continues a forwarded line

    @staticmethod
    def recognises(template: str) -> bool:
        """Whether the template has the role of results, and no tags."""
        return all(part in template for part in ("<|observation|>", "[gMASK]", "tools"))

    def push(self, text: str) -> list[Item]:
        """See `CallReader.push`."""
        self._held += text
        return self._scan(is_over=False)

    def finish(self, *, is_cut: bool = False) -> list[Item]:
        """See `CallReader.finish`."""
        if is_cut and self._is_call_begun():
            self._held = ""
        return [*self._scan(is_over=True), *self._text(len(self._held))]

    def _is_call_begun(self) -> bool:
        """Whether what is held is a function's name in a line, or goes on with its arguments."""
        line, newline, rest = self._held.partition("\n")
        if self._is_line_begun or not line or not self._may_be_name(line, is_whole=bool(newline)):
            return False
        return rest.lstrip()[:1] in ("", "{") and self._call(line, rest) is None

    def _scan(self, *, is_over: bool) -> list[Item]:
        found: list[Item] = []
        while self._held:
            line, newline, rest = self._held.partition("\n")
            if not self._is_line_begun and self._may_be_name(line, is_whole=bool(newline)):
                if newline and (call := self._call(line, rest)) is not None:
                    found.append(call)
                    continue
                if not is_over and (not newline or not rest or rest.lstrip()[:1] in ("", "{")):
                    return found
            found += self._text(len(line) + len(newline))
            self._is_line_begun = not newline
        return found

    def _may_be_name(self, line: str, *, is_whole: bool) -> bool:
        """Whether a line is a function's name, or may become one."""
        begun = line.strip()
        if is_whole:
            return begun in self._tools
        return any(name.startswith(begun) for name in self._tools)

    def _call(self, line: str, rest: str) -> Call | None:
        """The call at the front, if its arguments are complete."""
        if "}" not in rest:
            return None
        begun = rest.lstrip()
        try:
            arguments, end = json.JSONDecoder().raw_decode(begun)
            call = Call.to(self._tools, line.strip(), arguments)
        except NoCall:
            return None
        self._held = begun[end:].lstrip()
        self._follows_call = True
        return call

    def _text(self, size: int) -> list[Item]:
        text, self._held = self._held[:size], self._held[size:]
        if self._follows_call:
            text = text.lstrip()
            self._follows_call = not text
        return [text] if text else []
