"""Tool calls of Llama 3.1 and 3.2: one call as the whole output.

`{"name": ..., "parameters": {...}}`, sometimes after `<|python_tag|>`, a special token that is
not part of the text.
"""

from __future__ import annotations

import json
from typing import ClassVar

from edgellm.tools.serve.tool_calls.grammar import CallForm
from edgellm.tools.serve.tool_calls.parser import Call, Item, Tools, cut_calls


class Llama3Parser:
    """See `ToolParser`."""

    shown: ClassVar[tuple[str, ...]] = ()
    form: ClassVar = CallForm(before='{"name": "NAME", "parameters": ', after="}", between="; ")

    def __init__(self, tools: Tools) -> None:
        self._tools, self._held, self._is_text = tools, "", False

    @staticmethod
    def recognises(template: str) -> bool:
        """Whether the template explains parameters, and has the role of results."""
        return all(part in template for part in ('"parameters"', "ipython", "tools"))

    def push(self, text: str) -> list[Item]:
        """See `ToolParser.push`."""
        if self._is_text:
            return [text]
        self._held += text
        if not self._held.lstrip() or self._held.lstrip().startswith("{"):
            return []
        self._is_text, held = True, self._held
        return [held]

    def finish(self, *, is_cut: bool = False) -> list[Item]:
        """See `ToolParser.finish`."""
        if self._is_text or not self._held:
            return []
        if calls := self._read(self._held):
            return [*calls]
        whole = cut_calls(self._held, self._tools) if is_cut else None
        return [self._held] if whole is None else [*whole]

    def _read(self, text: str) -> list[Call]:
        """The calls of an output, separated by semicolons."""
        calls: list[Call] = []
        decoder, at = json.JSONDecoder(), 0
        while at < len(text):
            if text[at] in " \n\r\t;":
                at += 1
                continue
            try:
                found, at = decoder.raw_decode(text, at)
                name, arguments = found["name"], found.get("parameters", {})
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                return []
            if str(name) not in self._tools or not isinstance(arguments, dict):
                return []
            calls.append(Call(name, json.dumps(arguments, ensure_ascii=False)))
        return calls
