"""`/v1/chat/completions`: messages for the chat template, and the response."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from anyio import to_thread

from edgellm.core.errors import suggestion
from edgellm.device_runtime.api.llm import LLM, Step
from edgellm.device_runtime.engine import continuation
from edgellm.device_runtime.sampling.params import Guide
from edgellm.multimodal.media import Audio, Source, Video
from edgellm.tools.serve import tool_calls
from edgellm.tools.serve.engines.ask import EngineRequest
from edgellm.tools.serve.engines.events import Finished, Started
from edgellm.tools.serve.http.errors import ApiError
from edgellm.tools.serve.http.image_source import image_source
from edgellm.tools.serve.output.chat_output import CallDelta, ChatOutput, OutputItem
from edgellm.tools.serve.output.streams import EVENTS
from edgellm.tools.serve.output.token_origins import draft_tree, origins
from edgellm.tools.serve.output.usage import timing, together, usage
from edgellm.tools.serve.protocols.openai.logprobs import TokenPlaces, chat_logprobs
from edgellm.tools.serve.schemas.openai import (
    AudioUrlPart,
    ChatRequest,
    ImagePart,
    InputAudioPart,
    Message,
    RefusalPart,
    StreamOptions,
    TextPart,
    VideoPart,
    VideoUrlPart,
)
from edgellm.tools.serve.settings import ImageRules
from edgellm.tools.serve.tool_calls.parser import ReasoningText

_Event = dict[str, Any]
_END_CHARACTERS = 100  # of a prompt; longer than any tag and its white space


async def ask_of(
    body: ChatRequest, llm: LLM, rules: ImageRules, lora: str | None = None
) -> EngineRequest:
    """The engine request of a chat request.

    Raises:
        ApiError: an image is not allowed, or the chat template has no tools.
    """
    messages, images = await messages_of(body.messages, rules)
    _require_readers(images, llm)
    template = llm.tokenizer.chat_template or ""
    flags = body.template_flags(llm.tokenizer)
    continuation.continues(messages, flags)  # `placed` may turn calls of tools into text
    return EngineRequest(
        prompt=tool_calls.placed(template, messages, flags.get("tools", ())),
        sampling=body.sampling(llm.defaults, _num_logprobs(body), _form(body, llm)),
        max_tokens=body.max_completion_tokens or body.max_tokens,
        stop=body.stops(),
        images=images,
        template_flags=flags,
        shown_tokens=body.answer_form(llm).shown_tokens,
        priority=body.priority or 0,
        lora=lora,
    )


def _require_readers(sources: Sequence[Source], llm: LLM) -> None:
    """Check that the engines for the images and audio of a request are loaded.

    Raises:
        ApiError: one is not.
    """
    kind = "text only" if llm.images is None and llm.audio is None else "no {}"
    for is_audio, reader, name in ((False, llm.images, "visual"), (True, llm.audio, "audio")):
        if reader is None and any(isinstance(each, Audio) is is_audio for each in sources):
            taken = kind.format("audio" if is_audio else "images")
            raise ApiError(
                400, f"this server takes {taken}: it has no {name} engine", param="messages"
            )


async def prompt_end(ask: EngineRequest, body: ChatRequest, llm: LLM) -> str:
    """The end of the formatted messages, which the reasoning parser needs.

    Raises:
        RequestError: the template rejects the messages.
    """
    thinking = body.answer_form(llm).thinking
    if thinking is None or not isinstance(ask.prompt, list):
        return ""
    text = await to_thread.run_sync(llm.formatter.format, ask.prompt, ask.template_flags)
    if continuation.continues(ask.prompt, ask.template_flags):
        said = continuation.said(ask.prompt[-1])
        if thinking.opening in said or thinking.closing in said:
            begin = said.rfind(thinking.opening)
            return said[begin:] if begin > said.rfind(thinking.closing) else ""
        text = text[: text.rfind(said.strip())] if said else text
    return text[-_END_CHARACTERS:]


def _form(body: ChatRequest, llm: LLM) -> Guide | None:
    """The guide of the output: a forced call, the requested format, or strict calls in text.

    `response_format` is the format of a text, so a forced call may come with it, as at OpenAI.
    """
    form, calls = body.form(), body.calls_form(llm)
    if form is not None and calls is not None and body.response_format is None:
        raise ApiError(
            400, "tool_choice: a forced call allows no other output format", param="tool_choice"
        )
    return calls or form or body.strict_form(llm)


async def messages_of(
    given: Sequence[Message], rules: ImageRules
) -> tuple[list[dict[str, Any]], tuple[Source, ...]]:
    """Messages for chat templates, and the sources of their images, videos and audio.

    Raises:
        ApiError: an image is not allowed, or a message has no content.
    """
    messages, images = [], []
    for index, message in enumerate(given):
        messages.append(_template_message(message, f"messages.{index}"))
        parts = message.content if isinstance(message.content, list) else []
        images += [
            await _shown(part, rules)
            for part in parts
            if not isinstance(part, TextPart | RefusalPart)
        ]
    return messages, tuple(images)


def _num_logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs: give logprobs: true as well", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _template_message(message: Message, place: str) -> dict[str, Any]:
    """A message for the formatter."""
    reasoning = message.reasoning_content or message.reasoning
    content: Any = message.content
    if content is None and message.role not in ("assistant", "tool"):
        raise _without_content(message, place)
    if content is None and message.refusal is not None:
        content = message.refusal
    if isinstance(content, list):
        content = [_template_part(part) for part in content]
    found: dict[str, Any] = {"role": message.role, "content": content}
    if reasoning:
        found["reasoning_content"] = reasoning
    if message.name is not None:
        found["name"] = message.name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments, place),
                },
            }
            for call in message.tool_calls
        ]
    return found


def _without_content(message: Message, place: str) -> ApiError:
    """The error of a message without content, with a field that was probably meant as it."""
    for name in message.model_extra or {}:
        if meant := suggestion(name, ["content"]):
            reason = f"{place}.{name:.40}: a message needs content ({meant})"
            return ApiError(400, reason, param=place)
    return ApiError(400, f"{place}.content: a message needs content", param=place)


def _template_part(part: Any) -> dict[str, str]:
    if isinstance(part, TextPart | RefusalPart):
        return {"type": "text", "text": part.text if isinstance(part, TextPart) else part.refusal}
    if isinstance(part, InputAudioPart | AudioUrlPart):
        return {"type": "audio"}
    return {"type": "image" if isinstance(part, ImagePart) else "video"}


async def _shown(
    part: ImagePart | VideoUrlPart | VideoPart | InputAudioPart | AudioUrlPart, rules: ImageRules
) -> Source:
    """The source of an image, video or audio; raises `ApiError` if it is not allowed."""
    if isinstance(part, InputAudioPart):
        given = part.input_audio
        return Audio(f"data:audio/{given.format};base64,{given.data}")
    if isinstance(part, AudioUrlPart):
        return Audio(await image_source(part.audio_url.url, rules, "audio_url"))
    if isinstance(part, ImagePart):
        return await image_source(part.image_url.url, rules)
    given = part.video_url.url if isinstance(part, VideoUrlPart) else part.video
    if isinstance(given, str):
        return Video.of(await image_source(given, rules))
    return Video.of([await image_source(url, rules) for url in given])


def _arguments(text: str | dict[str, Any], place: str) -> Any:
    """Arguments of a call as an object, for templates."""
    if isinstance(text, dict):
        return text
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        raise ApiError(
            400, f"{place}.tool_calls: arguments must be JSON", param=f"{place}.tool_calls"
        ) from None


def _reasoned(text: str) -> _Event:
    """Reasoning under its usual name, and under vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text}


@dataclass(slots=True, kw_only=True)
class _Choice:
    """One choice of a chat completion."""

    index: int
    answer: ChatOutput
    places: TokenPlaces
    calls: list[_Event] = field(default_factory=list)
    logprobs: list[_Event] = field(default_factory=list)
    figures: Finished | None = None  # when it is complete


class ChatWriter:
    """Writes a chat completion whose choices are generated concurrently."""

    framing, last = EVENTS, b"data: [DONE]\n\n"

    def __init__(self, *, body: ChatRequest, llm: LLM, model: str, prompt_end: str = "") -> None:
        """Create the writer; `prompt_end` is the end of the formatted messages."""
        self._end_ids = body.ends(llm.manifest.eos_token_ids)
        hidden = llm.tokenizer.hidden_ids(body.answer_form(llm).shown_tokens)
        self._choices = [
            _Choice(
                index=index,
                answer=ChatOutput(body, llm, prompt_end=prompt_end),
                places=TokenPlaces(llm.tokenizer, hidden),
            )
            for index in range(body.n or 1)
        ]
        self._now = self._choices[0]
        self._options = body.stream_options or StreamOptions()
        self._tokenizer = llm.tokenizer
        self._wants_logprobs = bool(body.logprobs)
        self._head: _Event = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }

    def switch(self, at: int) -> None:
        """See `Writer.switch`: the next events belong to choice `at`."""
        self._now = self._choices[at]

    def begin(self, started: Started) -> list[_Event]:
        """The event of the role."""
        del started
        return [self._chunk({"role": "assistant", "content": ""})]

    def step(self, step: Step) -> list[_Event]:
        """The event of a step: text, tool calls, log-probabilities."""
        delta = self._delta(self._now.answer.push(step.text))
        entries: list[_Event] = []
        if self._wants_logprobs:
            shown = tuple(e for e in step.logprobs if e.token_id not in self._end_ids)
            self._now.places.begins = step.begins
            entries = chat_logprobs(shown, self._now.places)
            self._now.logprobs += entries
        if not delta and not entries and not self._options.include_tokens:
            return []
        found = self._chunk(delta, logprobs={"content": entries} if entries else None)
        if self._options.include_tokens:
            found["edgellm"] = origins(step)
            if self._options.include_trees:
                found["edgellm"] |= draft_tree(step, self._tokenizer)
        return [found]

    def end(self, figures: Finished) -> list[_Event]:
        """The held-back items, the finish reason, and the usage if requested."""
        rest = self._delta(self._now.answer.finish(is_cut=figures.is_cut))
        found = [self._chunk(rest)] if rest else []
        found.append(self._chunk({}, reason=self._reason(figures)))
        self._now.figures = figures
        if self._options.include_usage and all(one.figures for one in self._choices):
            found.append({**self._head, "choices": [], **self._usage()})
        return found

    def whole(self, figures: Finished) -> _Event:
        """The whole body."""
        self._delta(self._now.answer.finish(is_cut=figures.is_cut))
        self._now.figures = figures
        if not all(one.figures for one in self._choices):
            return {}
        head = {**self._head, "object": "chat.completion"}
        return {**head, "choices": [*map(self._completed, self._choices)], **self._usage()}

    def _completed(self, choice: _Choice) -> _Event:
        assert choice.figures is not None
        self._now, content = choice, choice.answer.text
        message: _Event = {"role": "assistant", "content": content or None, "refusal": None}
        if choice.answer.reasoning:
            message |= _reasoned(choice.answer.reasoning)
        if choice.calls:
            message["tool_calls"] = [*choice.calls]
        else:
            message["content"] = content
        return {
            "index": choice.index,
            "message": message,
            "finish_reason": self._reason(choice.figures),
            "logprobs": {"content": choice.logprobs} if self._wants_logprobs else None,
        }

    def _usage(self) -> _Event:
        complete = [one.figures for one in self._choices if one.figures is not None]
        figures = together(complete, of_one=len(self._choices))
        return {"usage": usage(figures), "metrics": timing(figures)}

    def _reason(self, figures: Finished) -> str:
        calls = self._now.calls and not figures.is_cut
        return "tool_calls" if calls else figures.finish_reason

    def _delta(self, added: Sequence[OutputItem]) -> _Event:
        delta: _Event = {}
        if thought := "".join(item.text for item in added if isinstance(item, ReasoningText)):
            delta |= _reasoned(thought)
        if text := "".join(item for item in added if isinstance(item, str)):
            delta["content"] = text
        if calls := [item for item in added if isinstance(item, CallDelta)]:
            delta["tool_calls"] = [self._call(call) for call in calls]
        return delta

    def _call(self, call: CallDelta) -> _Event:
        place = {"index": len(self._now.calls)}
        head = {"id": call.id, "type": "function"}
        if call.whole is not None:
            whole = {"name": call.name, "arguments": call.whole.arguments}
            self._now.calls.append({**head, "function": whole})
        if not call.is_first:
            return {**place, "function": {"arguments": call.arguments}}
        return {**place, **head, "function": {"name": call.name, "arguments": call.arguments}}

    def _chunk(
        self, delta: _Event, *, logprobs: _Event | None = None, reason: str | None = None
    ) -> _Event:
        index = self._now.index
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head, "choices": [choice]}
