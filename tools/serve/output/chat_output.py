"""What the answer to a conversation is made of, whatever interface it goes out by."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from edgellm.device_runtime.api.llm import LLM
from edgellm.tools.serve.schemas.openai import ChatRequest
from edgellm.tools.serve.tool_calls.parser import Call, Item, ReasoningText


def call_id() -> str:
    """A new name for a call; templates of Mistral take back nine letters and digits alone."""
    return uuid.uuid4().hex[:9]


class ChatOutput:
    """Reasoning, text and calls, while the answer grows."""

    def __init__(self, body: ChatRequest, llm: LLM, *, prompt_end: str = "") -> None:
        """Begin an answer; `prompt_end` is the last of the formatted messages."""
        is_guided = body.form() is not None or bool(body.must_call())
        self._reader = body.answer_form(llm).reader(body.schemas(), prompt_end, is_guided=is_guided)
        self._max_calls = 1 if body.parallel_tool_calls is False else None
        self.reasoning = self.text = ""
        self.calls: list[Call] = []

    def push(self, text: str) -> list[Item]:
        """What text of the model adds."""
        return self._added([text] if self._reader is None else self._reader.push(text))

    def finish(self, *, is_cut: bool = False) -> list[Item]:
        """What was held back, when the output ends; with `is_cut` by its maximum length."""
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
