"""Parsed output of a chat request, the same for all protocols."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from edgellm.device_runtime.api.llm import LLM
from edgellm.tools.serve.schemas.openai import ChatRequest
from edgellm.tools.serve.tool_calls.parser import Call, Item, ReasoningText


def call_id() -> str:
    """A new id of a tool call; Mistral's templates accept exactly nine letters and digits."""
    return uuid.uuid4().hex[:9]


class ChatOutput:
    """Reasoning, text and tool calls of an output, parsed while it is generated."""

    def __init__(self, body: ChatRequest, llm: LLM, *, prompt_end: str = "") -> None:
        """Create the parser; `prompt_end` is the end of the formatted messages."""
        self._reader = body.answer_form(llm).reader(body.schemas(), prompt_end)
        self._max_calls = 1 if body.parallel_tool_calls is False else None
        self.reasoning = self.text = ""
        self.calls: list[Call] = []

    def push(self, text: str) -> list[Item]:
        """Parse more text of the model; return the new items."""
        return self._added([text] if self._reader is None else self._reader.push(text))

    def finish(self, *, is_cut: bool = False) -> list[Item]:
        """Return the held-back items at the end; `is_cut`: `max_tokens` ended the output."""
        return self._added(self._reader.finish(is_cut=is_cut) if self._reader is not None else [])

    def _added(self, found: Sequence[Item]) -> list[Item]:
        kept: list[Item] = []
        for item in found:
            if isinstance(item, ReasoningText):
                self.reasoning += item.text
            elif isinstance(item, str):
                self.text += item
            elif self._max_calls is None or len(self.calls) < self._max_calls:
                self.calls.append(item)
            else:
                continue
            if not isinstance(item, str) or item:
                kept.append(item)
        return kept
