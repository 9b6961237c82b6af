"""Tool calls of Mistral 7B v0.3, Nemo and Small 3: a JSON list as the whole output.

`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`; in their tokenizers the tag is a special
token, which is not part of the text. Later models write names between tags: `[ARGS]`.
"""

from __future__ import annotations

import json
import re
from typing import ClassVar

from edgellm.tools.serve.tool_calls.grammar import CallForm
from edgellm.tools.serve.tool_calls.parser import Call, Item, Tools, cut_calls, is_begun

_MARK = "[TOOL_CALLS]"
_LIST = re.compile(r"\[\s*(\{|$)")


class MistralParser:
    """See `ToolParser`."""

    shown: ClassVar[tuple[str, ...]] = ()  # an output starts with the tag or the list
    form: ClassVar = CallForm(
        before='{"name": "NAME", "arguments": ',
        after="}",
        between=", ",
        opening=f"{_MARK} [",
        closing="]",
        marks=(_MARK,),
        tag=_MARK,
    )

    def __init__(self, tools: Tools) -> None:
        self._tools, self._held, self._is_text = tools, "", False

    @staticmethod
    def recognises(template: str) -> bool:
        """Whether the template has the marks for tools and calls, and none before arguments."""
        return all(part in template for part in (_MARK, "[AVAILABLE_TOOLS]", "tools")) and (
            "[ARGS]" not in template
        )

    def push(self, text: str) -> list[Item]:
        """See `ToolParser.push`."""
        if self._is_text:
            return [text]
        self._held += text
        begun = self._held.lstrip()
        if _MARK.startswith(begun[: len(_MARK)]) or _LIST.match(begun):
            return []
        self._is_text, held = True, self._held
        return [held]

    def finish(self, *, is_cut: bool = False) -> list[Item]:
        """See `ToolParser.finish`."""
        if self._is_text or not self._held:
            return []
        if calls := self._read(self._held):
            return calls
        begun = self._held.lstrip()
        whole = cut_calls(begun.removeprefix(_MARK), self._tools) if is_cut else None
        if whole is None and not (is_cut and is_begun(begun, (_MARK,))):
            return [self._held]
        return [*(whole or ())]

    def _read(self, text: str) -> list[Item]:
        """The calls of an output; empty if one does not parse."""
        calls: list[Item] = []
        try:
            for found in json.loads(text.strip().removeprefix(_MARK)):
                name, arguments = found["name"], found.get("arguments", {})
                if str(name) not in self._tools or not isinstance(arguments, dict):
                    return []
                calls.append(Call(name, json.dumps(arguments, ensure_ascii=False)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return []
        return calls
