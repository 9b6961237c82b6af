"""Outputs in the form of OpenAI's Responses."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from edgellm.device_runtime.api.llm import LLM, Step
from edgellm.device_runtime.sampling.params import SamplingParams
from edgellm.tools.serve.engines.events import Finished, Started
from edgellm.tools.serve.output.chat_output import CallDelta, ChatOutput
from edgellm.tools.serve.output.streams import NAMED_EVENTS
from edgellm.tools.serve.output.usage import timing, usage
from edgellm.tools.serve.protocols.openai.responses import ResponsesRequest
from edgellm.tools.serve.protocols.output_parts import PartWriter

_Event = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class _Text:
    """An output item with text: reasoning or the message."""

    head: _Event  # fields of the item
    part: _Event  # content part without its text
    name: str  # prefix of its events
    text: str = ""

    def item(self, status: str) -> _Event:
        parts = [self.whole()] if self.text or status != "in_progress" else []
        return {**self.head, "status": status, "content": parts}

    def whole(self) -> _Event:
        return {**self.part, "text": self.text}


def _message() -> _Text:
    head = {"type": "message", "id": f"msg_{uuid.uuid4().hex}", "role": "assistant"}
    part = {"type": "output_text", "annotations": [], "logprobs": []}
    return _Text(head=head, part=part, name="output_text")


def _reasoning() -> _Text:
    head = {"type": "reasoning", "id": f"rs_{uuid.uuid4().hex}", "summary": []}
    return _Text(head=head, part={"type": "reasoning_text"}, name="reasoning_text")


@dataclass(slots=True)
class _Output:
    """Complete items, and the open one."""

    done: list[_Event] = field(default_factory=list)
    open: _Text | None = None
    call: _Event = field(default_factory=dict)  # the latest one, as it began


class ResponsesWriter(PartWriter):
    """Writes a response."""

    framing, last = NAMED_EVENTS, b""
    thought_kind, text_kind = "reasoning", "message"

    def __init__(
        self,
        *,
        body: ResponsesRequest,
        answer: ChatOutput,
        llm: LLM,
        model: str,
        sampling: SamplingParams,
    ) -> None:
        self._answer, self._llm, self._output = answer, llm, _Output()
        self._number = -1  # of the last event
        self._head: _Event = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "model": model,
            "created_at": int(time.time()),
            "error": None,
            "background": False,
            "store": False,
            "previous_response_id": None,
            "truncation": "disabled",
            **body.echoed(sampling),
        }

    def begin(self, started: Started) -> list[_Event]:
        """The events of a new response."""
        del started
        response = self._response("in_progress", None)
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=response) for kind in kinds]

    def step(self, step: Step) -> list[_Event]:
        """The events of a step."""
        return self._added(self._answer.push(step.text))

    def end(self, figures: Finished) -> list[_Event]:
        """The events of held-back items, and the whole response."""
        status = self._status(figures)
        found = self._added(self._answer.finish(is_cut=figures.is_cut)) + self._closed(status)
        response = self._response(status, figures)
        return [*found, self._event(f"response.{status}", response=response)]

    def whole(self, figures: Finished) -> _Event:
        """The whole response."""
        status = self._status(figures)
        self._added(self._answer.finish(is_cut=figures.is_cut))
        self._closed(status)
        return self._response(status, figures) | {"metrics": timing(figures)}

    def _status(self, figures: Finished) -> str:
        return "incomplete" if figures.finish_reason == "length" else "completed"

    def _response(self, status: str, figures: Finished | None) -> _Event:
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._head,
            "status": status,
            "incomplete_details": reason,
            "output": [*self._output.done],
            "usage": self._usage(figures) if figures is not None else None,
        }

    def _usage(self, figures: Finished) -> _Event:
        """Token counts; reasoning tokens are counted by encoding its text."""
        found = usage(figures)
        thought = self._llm.tokenizer.encode(self._answer.reasoning, add_special_tokens=False)
        speculation = {key: found[key] for key in ("speculation",) if key in found}
        return {
            "input_tokens": figures.prompt_tokens,
            "input_tokens_details": {"cached_tokens": figures.cached_tokens},
            "output_tokens": figures.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": len(thought)},
            "total_tokens": found["total_tokens"],
        } | speculation

    def _text(self, kind: str, text: str) -> list[_Event]:
        found: list[_Event] = []
        current = self._output.open
        if current is None or current.head["type"] != kind:
            found = self._closed("completed")
            current = self._output.open = _message() if kind == "message" else _reasoning()
            found.append(self._item_event("added", current.item("in_progress")))
            found.append(self._part_event("content_part.added", part=current.whole()))
        current.text += text
        logprobs = {"logprobs": []} if kind == "message" else {}
        return [*found, self._part_event(f"{current.name}.delta", delta=text, **logprobs)]

    def _call(self, call: CallDelta) -> list[_Event]:
        found, output = [], self._output
        if call.is_first:
            found = self._closed("completed")
            output.call = {
                "type": "function_call",
                "id": f"fc_{uuid.uuid4().hex}",
                "call_id": call.id,
                "name": call.name,
                "arguments": "",
                "status": "in_progress",
            }
            found.append(self._item_event("added", output.call))
        place = {"item_id": output.call["id"], "output_index": len(output.done)}
        name = "response.function_call_arguments"
        if call.arguments:
            found.append(self._event(f"{name}.delta", **place, delta=call.arguments))
        if call.whole is not None:
            whole = {"name": call.name, "arguments": call.whole.arguments}
            found.append(self._event(f"{name}.done", **place, **whole))
            item = {**output.call, **whole, "status": "completed"}
            found.append(self._item_event("done", item))
            output.done.append(item)
        return found

    def _closed(self, status: str) -> list[_Event]:
        current = self._output.open
        if current is None:
            return []
        logprobs = {"logprobs": []} if current.name == "output_text" else {}
        found = [
            self._part_event(f"{current.name}.done", text=current.text, **logprobs),
            self._part_event("content_part.done", part=current.whole()),
            self._item_event("done", current.item(status)),
        ]
        self._output.done.append(current.item(status))
        self._output.open = None
        return found

    def _item_event(self, what: str, item: _Event) -> _Event:
        index = len(self._output.done)
        return self._event(f"response.output_item.{what}", output_index=index, item=item)

    def _part_event(self, what: str, **contents: Any) -> _Event:
        assert self._output.open is not None
        place = {
            "item_id": self._output.open.head["id"],
            "output_index": len(self._output.done),
            "content_index": 0,
        }
        return self._event(f"response.{what}", **place, **contents)

    def _event(self, kind: str, **contents: Any) -> _Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **contents}
