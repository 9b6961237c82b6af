r"""Calls between tags, as Hermes 2 Pro, Qwen2.5 and Qwen3 write them.

`<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>`, any number of them.
"""

from __future__ import annotations

import json
from typing import ClassVar

from edgellm.tools.serve.tool_calls.grammar import CallForm
from edgellm.tools.serve.tool_calls.parser import Call, Item, Tools, is_begun

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    """See `ToolParser`; drops newlines after a call."""

    shown: ClassVar[tuple[str, ...]] = (_OPEN, _CLOSE)
    form: ClassVar = CallForm(
        before=_OPEN + '\n{"name": "NAME", "arguments": ',
        after="}\n" + _CLOSE,
        between="\n",
        marks=(_OPEN, _CLOSE),
        tag=_OPEN,
    )

    def __init__(self, tools: Tools) -> None:
        self._tools, self._held, self._follows_call = tools, "", False

    @staticmethod
    def recognises(template: str) -> bool:
        """Whether the template explains the tags, and JSON between them."""
        return all(part in template for part in (_OPEN, '"arguments"', "tools"))

    def push(self, text: str) -> list[Item]:
        """See `ToolParser.push`."""
        self._held += text
        self._skip_newlines()
        found: list[Item] = []
        while (begin := self._held.find(_OPEN)) >= 0:
            end = self._held.find(_CLOSE, begin)
            found.append(self._held[:begin])
            self._held = self._held[begin:]
            if end < 0:
                return [item for item in found if item]
            whole = self._held[: end - begin + len(_CLOSE)]
            self._held = self._held[len(whole) :]
            found.append(self._read(whole))
            self._follows_call = isinstance(found[-1], Call)
            self._skip_newlines()
        keep = next(
            (size for size in range(len(_OPEN) - 1, 0, -1) if self._held.endswith(_OPEN[:size])), 0
        )
        cut = len(self._held) - keep
        found.append(self._held[:cut])
        self._held = self._held[cut:]
        return [item for item in found if item]

    def finish(self, *, is_cut: bool = False) -> list[Item]:
        """See `ToolParser.finish`; a call without its closing tag counts if it parses."""
        held, self._held = self._held, ""
        if not held:
            return []
        item = self._read(held)
        return [] if is_cut and not isinstance(item, Call) and is_begun(held, (_OPEN,)) else [item]

    def _skip_newlines(self) -> None:
        if self._follows_call:
            self._held = self._held.lstrip("\n")
            self._follows_call = not self._held

    def _read(self, text: str) -> Item:
        """The call of a tagged text, or the text if it does not parse."""
        try:
            found = json.loads(text.removeprefix(_OPEN).removesuffix(_CLOSE))
            name, arguments = found["name"], found.get("arguments", {})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return text
        if str(name) not in self._tools or not isinstance(arguments, dict):
            return text
        return Call(name, json.dumps(arguments, ensure_ascii=False))
