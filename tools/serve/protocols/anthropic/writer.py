"""Outputs in the form of Anthropic's protocol."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from edgellm.device_runtime.api.llm import Step
from edgellm.tools.serve.engines.events import Finished, Started
from edgellm.tools.serve.output.chat_output import CallDelta, ChatOutput
from edgellm.tools.serve.output.streams import NAMED_EVENTS
from edgellm.tools.serve.output.usage import timing
from edgellm.tools.serve.protocols.output_parts import PartWriter

_Event = dict[str, Any]
_TEXTS = {"thinking": ("thinking", "thinking_delta"), "text": ("text", "text_delta")}


class MessagesWriter(PartWriter):
    """Writes a message: blocks of reasoning, text and tool calls."""

    framing, last = NAMED_EVENTS, b""
    thought_kind, text_kind = "thinking", "text"

    def __init__(self, answer: ChatOutput, model: str) -> None:
        self._answer, self._model = answer, model
        self._blocks: list[_Event] = []
        self._is_open = False  # whether the last block accepts more text
        self._space = ""  # leading space of the next text block
        self._id = f"msg_{uuid.uuid4().hex[:24]}"

    def begin(self, started: Started) -> list[_Event]:
        """The event of an empty message."""
        counts = {"input_tokens": started.prompt_tokens, "output_tokens": 0}
        message = self._message([], None, None, counts)
        return [{"type": "message_start", "message": message}]

    def step(self, step: Step) -> list[_Event]:
        """The events of a step."""
        return self._added(self._answer.push(step.text))

    def end(self, figures: Finished) -> list[_Event]:
        """The events of held-back items, the stop reason and the usage."""
        found = self._added(self._answer.finish(is_cut=figures.is_cut)) + self._closed()
        delta = {"stop_reason": self._reason(figures), "stop_sequence": figures.stop_string}
        found.append({"type": "message_delta", "delta": delta, "usage": _usage(figures)})
        return [*found, {"type": "message_stop"}]

    def whole(self, figures: Finished) -> _Event:
        """The whole message."""
        self._added(self._answer.finish(is_cut=figures.is_cut))
        if self._is_open and self._blocks[-1]["type"] == "tool_use":
            self._blocks.pop()  # `max_tokens` cut it
        reason = self._reason(figures)
        message = self._message(self._blocks, reason, figures.stop_string, _usage(figures))
        return message | {"metrics": timing(figures)}

    def _message(
        self, blocks: Sequence[_Event], reason: str | None, stop: str | None, usage: _Event
    ) -> _Event:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [*blocks],
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }

    def _reason(self, figures: Finished) -> str:
        if figures.finish_reason == "length":
            return "max_tokens"
        if self._answer.calls:
            return "tool_use"
        return "end_turn" if figures.stop_string is None else "stop_sequence"

    def _text(self, kind: str, text: str) -> list[_Event]:
        name, delta = _TEXTS[kind]
        found: list[_Event] = []
        if not self._is_open or self._blocks[-1]["type"] != kind:
            text = self._space + text
            self._space = "" if text.strip() else text
            if self._space:
                return []
            empty = {"type": kind, name: ""} | ({"signature": ""} if kind == "thinking" else {})
            found = [*self._closed(), self._opened(empty)]
        self._blocks[-1][name] += text
        return [*found, self._delta({"type": delta, name: text})]

    def _call(self, call: CallDelta) -> list[_Event]:
        found: list[_Event] = []
        if call.is_first:
            self._space = ""
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            found = [*self._closed(), self._opened(block)]
        if call.arguments:
            delta = {"type": "input_json_delta", "partial_json": call.arguments}
            found.append(self._delta(delta))
        if call.whole is not None:
            self._blocks[-1]["input"] = json.loads(call.whole.arguments)
            found += self._closed()
        return found

    def _opened(self, block: _Event) -> _Event:
        self._blocks.append(dict(block))
        self._is_open = True
        index = len(self._blocks) - 1
        return {"type": "content_block_start", "index": index, "content_block": block}

    def _delta(self, delta: _Event) -> _Event:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _closed(self) -> list[_Event]:
        if not self._is_open:
            return []
        self._is_open = False
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]


def _usage(figures: Finished) -> _Event:
    """Token counts; cached prompt tokens are counted separately."""
    return {
        "input_tokens": figures.prompt_tokens - figures.cached_tokens,
        "cache_read_input_tokens": figures.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": figures.completion_tokens,
    }
