"""Runs a request file: every request gets a response, with an `error` object if it failed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from edgellm.core.errors import (
    EdgeLLMError,
    RequestError,
)
from edgellm.device_runtime.api.generation_request import GenerationRequest
from edgellm.device_runtime.api.llm import LLM, RequestOutput, Step
from edgellm.device_runtime.engine import continuation
from edgellm.device_runtime.engine.chat_template import without_template
from edgellm.device_runtime.engine.profile import Profile
from edgellm.device_runtime.request_faults import Confined, as_failure
from edgellm.device_runtime.request_files.embed_requests import is_pooled, respond
from edgellm.device_runtime.request_files.held_interrupts import HeldInterrupts
from edgellm.device_runtime.request_files.request_file import (
    ContentItem,
    Message,
    Options,
    OutputIndex,
    Request,
    parse_request,
    sampling_of,
)

OnStep = Callable[[OutputIndex, Step], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A request whose output has not been iterated over yet."""

    request: Request
    answer: RequestOutput
    system: str  # the formatted system prompt
    text: str  # the whole formatted request


def start_request(
    llm: LLM,
    options: Options,
    raw: Any,
    index: int,
    *,
    choice: int = 0,
    greedy: bool = False,
    speculative: bool = True,
) -> Started:
    """Check and format one request of a file, for one output.

    Args:
        llm: the engine.
        options: the file's.
        raw: the request as parsed JSON.
        index: its index in the file.
        choice: index of the output; it is added to the seed.
        greedy: decode greedily, overriding the request.
        speculative: False decodes plainly, overriding the request.

    Raises:
        RequestError: it is malformed, or too long.
    """
    request = parse_request(raw, index)
    own = request.merged(options)
    turns = [
        (message, message.items(f"$.requests[{index}].messages[{at}]"))
        for at, message in enumerate(request.messages)
    ]
    images = [shown for _, items in turns for item in items if (shown := item.source) is not None]
    try:
        llm.require_readers(images)
    except RequestError as error:
        raise RequestError(f"$.requests[{index}]: {error}", hint=error.hint) from None
    messages = [_message(message, items) for message, items in turns]
    system, text = _format(llm, own, messages)
    sampling = sampling_of(own, llm.defaults, greedy=greedy)
    if sampling.seed is not None:
        sampling = replace(sampling, seed=(sampling.seed + choice) % 2**63)
    answer = llm.generate_text(
        GenerationRequest(
            text=text,
            images=images,
            add_special_tokens=not own.apply_chat_template,
            continues=own.apply_chat_template and continuation.goes_on(messages, _ending(own)),
            sampling=sampling,
            max_generate_length=own.max_generate_length,
            stop=[own.stop] if isinstance(own.stop, str) else own.stop,
            speculative=speculative and not request.disable_spec_decode,
            system_prompt=system if request.save_system_prompt_kv_cache else None,
            lora=request.lora_name,
        )
    )
    shown = llm.tokenizer.shown
    return Started(request=request, answer=answer, system=shown(system), text=shown(text))


def _message(message: Message, items: list[ContentItem]) -> dict[str, Any]:
    content = [{"type": item.type, "text": item.text} for item in items]
    return {"role": message.role, "content": content, **message.more()}


def run_request(
    llm: LLM, options: Options, raw: Any, index: int, profile: Profile, on_step: OnStep
) -> dict[str, Any]:
    """Run one request of a file, for one output; as `run_requests`.

    Args:
        llm: the engine.
        options: the file's.
        raw: the request as parsed JSON.
        index: its index in the file.
        profile: receives the times.
        on_step: called with every step.
    """
    wanted = [(OutputIndex(index), raw)]
    ((response, times),) = run_requests(llm, options, wanted, on_step)
    profile.add(times)
    return response


def run_requests(
    llm: LLM,
    options: Options,
    wanted: Iterable[tuple[OutputIndex, Any]],
    on_step: OnStep,
    batch_size: int = 1,
    held: HeldInterrupts | None = None,
) -> Iterator[tuple[dict[str, Any], Profile]]:
    """Run requests of a file.

    Args:
        llm: the engine.
        options: the file's.
        wanted: places of the outputs, and their requests as parsed JSON.
        on_step: called with every step.
        batch_size: outputs at a time.
        held: interrupts that wait for the end of a forward pass; None: they do not wait.

    Yields:
        A response object and its times, as soon as it is finished, in any order. The response of
        a failed request contains `error`.
    """
    started: dict[RequestOutput, _Place] = {}
    finished: deque[_Place] = deque()

    def answers() -> Iterator[RequestOutput]:
        for index, raw in wanted:
            place, choice = _Place(index=index), index.choice or 0
            with Confined(place.fail), nullcontext() if held is None else held.at_once():
                if is_pooled(raw):
                    place.pooled = respond(llm, raw, index.request)
                else:
                    place.started = start_request(llm, options, raw, index.request, choice=choice)
            if place.started is None:
                finished.append(place)
            else:
                started[place.started.answer] = place
                if held is not None:
                    place.started.answer.before_pass = held.check
                yield place.started.answer

    for answer, steps in llm.together(answers(), batch_size):
        yield from _results(finished)
        place = started[answer]
        with Confined(place.fail):
            for step in steps:
                on_step(place.index, step)
        if answer.is_complete or answer.failure is not None:
            yield started.pop(answer).result()
    yield from _results(finished)


def _results(places: deque[_Place]) -> Iterator[tuple[dict[str, Any], Profile]]:
    while places:
        yield places.popleft().result()


@dataclass(slots=True, kw_only=True)
class _Place:
    """State of a running request."""

    index: OutputIndex
    started: Started | None = None  # None: it was rejected, or generates nothing
    pooled: dict[str, Any] | None = None  # response of a request that embeds or ranks
    error: EdgeLLMError | None = None  # that ended it

    def fail(self, error: EdgeLLMError) -> None:
        """Record the error for the response."""
        self.error = self.error or error

    def result(self) -> tuple[dict[str, Any], Profile]:
        """The response object, and the times."""
        head: dict[str, Any] = {**self.index.head(), "batch_idx": 0}
        if self.pooled is not None:
            return {"output_text": "", **head, **self.pooled}, Profile()
        if self.started is None:
            return {"output_text": "", **head, **self._failed()}, Profile()
        answer = self.started.answer
        if answer.failure is not None:
            self.fail(as_failure(answer.failure))
        if self.error is not None:  # with the text generated before
            return {"output_text": answer.text, **head, **self._failed()}, Profile()
        return {"output_text": answer.text, **head, **_response(self.started)}, answer.profile

    def _failed(self) -> dict[str, Any]:
        assert self.error is not None
        hint = {"hint": self.error.hint} if self.error.hint else {}
        return {"finish_reason": "error", "error": {"message": str(self.error), **hint}}


def _ending(options: Options) -> dict[str, Any]:
    """Chat template flags for the text after the last message."""
    return {
        "add_generation_prompt": options.add_generation_prompt,
        "continue_final_message": options.continue_final_message,
    }


def _format(llm: LLM, options: Options, messages: list[dict[str, Any]]) -> tuple[str, str]:
    """The formatted system prompt and the whole formatted request."""
    system_messages = [message for message in messages if message["role"] == "system"]
    if not options.apply_chat_template:
        image_token = llm.images.processor.image_token if llm.images is not None else ""
        marks = {
            **dict.fromkeys(("image", "video"), image_token),
            "audio": llm.audio.texts.token if llm.audio is not None else "",
        }
        parts = (system_messages, messages)
        system, text = (without_template(part, marks) for part in parts)
        return system, text
    flags: dict[str, Any] = {"enable_thinking": options.enable_thinking}
    text = llm.formatter.format(messages, flags | _ending(options))
    try:
        no_answer = {**flags, "add_generation_prompt": False}
        system = llm.formatter.format(system_messages, no_answer) if system_messages else ""
    except RequestError:  # templates may insist on a user message
        system = ""
    return system, text


def _shown(item: ContentItem) -> dict[str, Any]:
    """A content item for the response; media embedded in the request are left out."""
    if item.video is not None:
        frames = [item.video] if isinstance(item.video, str) else item.video
        shown = [_place(frame) for frame in frames]
        return {"type": "video", "video": shown[0] if isinstance(item.video, str) else shown}
    if item.audio is not None:
        return {"type": "audio", "audio": _place(item.audio)}
    if item.image is None:
        return {"type": "text", "text": item.text or ""}
    return {"type": "image", "image": _place(item.image)}


def _place(source: str) -> str:
    return source.partition(",")[0] if source.startswith("data:") else source


def _response(started: Started) -> dict[str, Any]:
    request, answer = started.request, started.answer
    response: dict[str, Any] = {
        "finish_reason": answer.finish_reason,
        "prompt_token_count": answer.prompt_token_count,
        "generated_token_count": len(answer.token_ids),
        "timings": answer.timings(),
        "messages": [
            {
                "role": message.role,
                "content": [_shown(item) for item in message.items("")],
                **message.more(),
            }
            for message in request.messages
        ],
        "formatted_system_prompt": started.system,
        "formatted_complete_request": started.text,
    }
    if answer.seed is not None:
        response["seed"] = answer.seed
    if answer.warnings:
        response["warnings"] = answer.warnings
    return response
