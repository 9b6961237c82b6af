"""Parsed output of a chat request, the same for all protocols."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from edgellm.device_runtime.api.llm import LLM
from edgellm.tools.serve.schemas.openai import ChatRequest
from edgellm.tools.serve.tool_calls.parser import Call, CallPart, Item, ReasoningText


def call_id() -> str:
    """A new id of a tool call; Mistral's templates accept exactly nine letters and digits."""
    return uuid.uuid4().hex[:9]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta:
    """A tool call, or more of one that is being written."""

    id: str
    name: str
    arguments: str  # that earlier deltas of this call do not have
    is_first: bool
    whole: Call | None  # the call, at its end


OutputItem = str | ReasoningText | CallDelta


class ChatOutput:
    """Reasoning, text and tool calls of an output, parsed while it is generated."""

    def __init__(self, body: ChatRequest, llm: LLM, *, prompt_end: str = "") -> None:
        """Create the parser; `prompt_end` is the end of the formatted messages."""
        self._reader = body.answer_form(llm).reader(body.schemas(), prompt_end)
        self._max_calls = 1 if body.parallel_tool_calls is False else None
        self.reasoning = self.text = ""
        self.calls: list[Call] = []
        self._call_id = ""  # of the call that is being written
        self._sent = 0  # characters of its arguments

    def push(self, text: str) -> list[OutputItem]:
        """Parse more text of the model; return the new items."""
        return self._added([text] if self._reader is None else self._reader.push(text))

    def finish(self, *, is_cut: bool = False) -> list[OutputItem]:
        """Return the held-back items at the end; `is_cut`: `max_tokens` ended the output."""
        return self._added(self._reader.finish(is_cut=is_cut) if self._reader is not None else [])

    def _added(self, found: Sequence[Item]) -> list[OutputItem]:
        kept: list[OutputItem] = []
        for item in found:
            if isinstance(item, (Call, CallPart)):
                if self._max_calls is None or len(self.calls) < self._max_calls:
                    kept.append(self._call(item))
            elif isinstance(item, ReasoningText):
                self.reasoning += item.text
                kept.append(item)
            elif item:
                self.text += item
                kept.append(item)
        return kept

    def _call(self, item: Call | CallPart) -> CallDelta:
        is_first = not self._call_id
        found, whole = self._call_id or call_id(), item if isinstance(item, Call) else None
        new = item.arguments if whole is None else item.arguments[self._sent :]
        if whole is None:
            self._call_id, self._sent = found, self._sent + len(new)
        else:
            self._call_id, self._sent = "", 0
            self.calls.append(whole)
        return CallDelta(id=found, name=item.name, arguments=new, is_first=is_first, whole=whole)
