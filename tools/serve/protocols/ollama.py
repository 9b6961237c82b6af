"""`/api/chat` and `/api/generate`: Ollama's protocol."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Annotated, Any, Literal

from pydantic import Field

from edgellm.device_runtime.api.llm import LLM, Step
from edgellm.tools.serve.engines.events import Finished, Started
from edgellm.tools.serve.http.errors import ApiError
from edgellm.tools.serve.output.chat_output import CallDelta, ChatOutput, OutputItem, call_id
from edgellm.tools.serve.output.streams import LINES, OneText
from edgellm.tools.serve.protocols.openai.logprobs import TokenPlaces, chat_logprobs
from edgellm.tools.serve.schemas.history import Earlier
from edgellm.tools.serve.schemas.openai import ChatRequest, CompletionRequest
from edgellm.tools.serve.schemas.response_format import Body
from edgellm.tools.serve.schemas.sampling import AnySeed, SamplingForm, Temperature
from edgellm.tools.serve.schemas.tools import Tool
from edgellm.tools.serve.tool_calls.parser import Call, ReasoningText

_Fields = dict[str, Any]
_PER_MS = 1_000_000
# Options of loading a model, which is loaded already, and others without effect here.
LOADING = (
    "num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "use_mmap",
    "use_mlock", "low_vram", "vocab_only", "f16_kv", "logits_all", "embedding_only", "numa",
    "penalize_newline", "mirostat_tau", "mirostat_eta", "repeat_last_n",
)  # fmt: skip
_UNLIMITED = 2**31 - 1  # tokens
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_PART = r"([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|ms|s|m|h|)"
_LONGEST_S = 10 * 365 * 86400.0  # which is forever
# Seconds, or a duration as Go writes it, such as 1h30m; below 0: forever.
KeepAlive = Annotated[str, Field(pattern=f"^[+-]?({_PART})+$", max_length=64)] | float


def keep_seconds(given: str | float | None) -> float | None:
    """Seconds that a model stays loaded after a request; None: until its memory is needed."""
    if isinstance(given, str):
        parts = re.findall(_PART, given)
        found = sum(float(number) * _UNITS[unit] for number, unit in parts)
        found = -found if given.startswith("-") else found
    else:
        found = given
    return found if found is not None and 0 <= found <= _LONGEST_S else None


LATEST = ":latest"  # suffix that Ollama's clients add to a name


_FORM = SamplingForm(
    names={"repetition_penalty": "repeat_penalty"},
    types={"temperature": Temperature, "seed": AnySeed},
    defaults={"temperature": 0.8, "top_p": 0.9, "top_k": 40},
)
_Sampling = _FORM.model(Body)


class Options(_Sampling):
    """Sampling options; options of loading have no effect."""

    num_predict: int | None = None  # None or below 0: up to the KV cache's capacity
    stop: str | list[str] | None = None
    num_ctx: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    num_keep: int | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    low_vram: bool | None = None
    vocab_only: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    embedding_only: bool | None = None
    numa: bool | None = None
    # Of methods that are off.
    mirostat: Literal[0] | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    tfs_z: Annotated[float, Field(ge=1, le=1)] | None = None
    typical_p: Annotated[float, Field(ge=1, le=1)] | None = None
    penalize_newline: bool | None = None
    repeat_last_n: int | None = None  # the penalty is of all tokens

    def sampled(self) -> _Fields:
        """The fields of `Sampled`."""
        maximum = self.num_predict
        if maximum is not None and maximum <= 0:
            maximum = _UNLIMITED
        return {"max_tokens": maximum, "stop": self.stop, **_FORM.given(self)}

    def ignored(self) -> list[str]:
        """Names of given fields that have no effect."""
        return [name for name in LOADING if name in self.model_fields_set]


class OllamaCall(Earlier):
    """The function of a call."""

    name: str
    arguments: Annotated[_Fields, Field(default_factory=dict)]
    index: int | None = None


class OllamaToolCall(Earlier):
    """A call that the model made in an earlier turn."""

    function: OllamaCall
    id: str | None = None
    type: str | None = None


class OllamaMessage(Earlier):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: list[str] | None = None  # base64
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def as_openai(self) -> _Fields:
        """As a message of chat completions."""
        content: Any = self.content
        if self.images:
            content = [_image(data) for data in self.images]
            content += [{"type": "text", "text": self.content}] if self.content else []
        found: _Fields = {"role": self.role, "content": content}
        if self.thinking:
            found["reasoning_content"] = self.thinking
        if self.tool_calls:
            found["tool_calls"] = [_called(call) for call in self.tool_calls]
        if self.role == "tool":
            found |= {"tool_call_id": self.tool_call_id or "", "name": self.tool_name}
        return found


def _image(data: str) -> _Fields:
    return {"type": "image_url", "image_url": {"url": f"data:image/unknown;base64,{data}"}}


def _called(call: OllamaToolCall) -> _Fields:
    function = {"name": call.function.name, "arguments": json.dumps(call.function.arguments)}
    return {"id": call.id or call_id(), "function": function}


class _OllamaBody(Body):
    """Common fields of chat and generate."""

    model: str
    stream: bool = True
    format: Literal["", "json"] | _Fields | None = None
    options: Options | None = None
    keep_alive: KeepAlive | None = None  # None: until its memory is needed
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def ignored(self) -> list[str]:
        """Names of given fields that have no effect."""
        return self.options.ignored() if self.options is not None else []

    @property
    def keep_s(self) -> float | None:
        """See `keep_seconds`."""
        return keep_seconds(self.keep_alive)

    def _fields(self) -> _Fields:
        found = {"model": self.model.removesuffix(LATEST), "stream": self.stream}
        found |= (self.options or Options()).sampled()
        if isinstance(self.format, dict):
            schema = {"name": "answer", "schema": self.format}
            found["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif self.format:
            found["response_format"] = {"type": "json_object"}
        return found

    def _logprobs(self) -> _Fields:
        return {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs}

    def _thinks(self) -> _Fields:
        if self.think is None:
            return {}
        effort = {"reasoning_effort": self.think} if isinstance(self.think, str) else {}
        thinks = bool(self.think)
        flags = {"enable_thinking": thinks, "thinking": thinks}
        return effort | {"chat_template_kwargs": flags}


class OllamaChat(_OllamaBody):
    """`/api/chat`."""

    messages: Annotated[list[OllamaMessage], Field(default_factory=list)]
    tools: list[Tool] | None = None

    @property
    def only_loads(self) -> bool:
        """Whether the request asks for no output."""
        return not self.messages

    def as_chat(self) -> ChatRequest:
        """The same in OpenAI's words."""
        found = self._fields() | self._thinks() | self._logprobs()
        found["messages"] = [message.as_openai() for message in self.messages]
        if self.tools:
            found["tools"] = [tool.model_dump(exclude_none=True) for tool in self.tools]
        return ChatRequest.model_validate(found).with_defaults(_FORM.defaults)


class OllamaGenerate(_OllamaBody):
    """`/api/generate`: one message, or with `raw` a prompt without a chat template."""

    prompt: str = ""
    system: str | None = None
    images: list[str] | None = None
    raw: bool = False
    suffix: Literal[""] | None = None
    template: Literal[""] | None = None  # the model's own is used
    context: None = None  # of an earlier output; use /api/chat

    @property
    def only_loads(self) -> bool:
        """Whether the request asks for no output."""
        return not self.prompt and not self.images

    def as_chat(self) -> ChatRequest:
        """The same in OpenAI's words."""
        messages = [OllamaMessage(role="user", content=self.prompt, images=self.images)]
        if self.system:
            messages.insert(0, OllamaMessage(role="system", content=self.system))
        found = [message.as_openai() for message in messages]
        given = self._fields() | self._thinks() | self._logprobs() | {"messages": found}
        return ChatRequest.model_validate(given).with_defaults(_FORM.defaults)

    def as_completion(self) -> CompletionRequest:
        """Convert a raw prompt to a completion request.

        Raises:
            ApiError: images or a system message need a template.
        """
        if self.images or self.system:
            name = "images" if self.images else "system"
            raise ApiError(400, f"{name}: a raw prompt is taken as it is", param=name)
        given = self._fields() | {"prompt": self.prompt}
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        return CompletionRequest.model_validate(given).with_defaults(_FORM.defaults)


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Log-probabilities of the tokens of each step."""

    places: TokenPlaces
    end_ids: frozenset[int]  # which are not shown

    @classmethod
    def of(cls, body: ChatRequest | CompletionRequest, llm: LLM) -> StepLogprobs:
        """Those of a request."""
        shown = body.answer_form(llm).shown_tokens if isinstance(body, ChatRequest) else ()
        places = TokenPlaces(llm.tokenizer, llm.tokenizer.hidden_ids(shown))
        return cls(places, body.ends(llm.manifest.eos_token_ids))

    def entries(self, step: Step) -> list[_Fields]:
        """The entries of a step; none if the request has no log-probabilities."""
        self.places.begins = step.begins
        shown = (one for one in step.logprobs if one.token_id not in self.end_ids)
        return chat_logprobs(shown, self.places)


class OllamaWriter(OneText):
    """Writes an output, one line of JSON for each step."""

    framing, last = LINES, b""

    def __init__(
        self,
        *,
        answer: ChatOutput | None,
        model: str,
        chats: bool,
        logprobs: StepLogprobs | None = None,
    ) -> None:
        """Create the writer; `answer` None: all output is text."""
        self._answer, self._model, self._chats = answer, model, chats
        self._text = self._thinking = ""
        self._calls: list[_Fields] = []
        self._logprobs, self._entries = logprobs, list[_Fields]()

    def begin(self, started: Started) -> list[_Fields]:
        """No event before the first token."""
        del started
        return []

    def step(self, step: Step) -> list[_Fields]:
        """The line of a step."""
        items = [step.text] if self._answer is None else self._answer.push(step.text)
        found = self._added(items)
        entries = [] if self._logprobs is None else self._logprobs.entries(step)
        self._entries += entries
        if not entries:
            return [self._line(found, done=False)] if any(found.values()) else []
        return [self._line(found, done=False) | {"logprobs": entries}]

    def end(self, figures: Finished) -> list[_Fields]:
        """The held-back items, and the statistics."""
        found = self._added(self._rest(figures))
        lines = [self._line(found, done=False)] if any(found.values()) else []
        return [*lines, self._line({}, done=True) | _figures(figures)]

    def whole(self, figures: Finished) -> _Fields:
        """The whole body."""
        self._added(self._rest(figures))
        found: _Fields = {"content": self._text}
        if self._thinking:
            found["thinking"] = self._thinking
        if self._calls:
            found["tool_calls"] = self._calls
        entries = {"logprobs": self._entries} if self._entries else {}
        return self._line(found, done=True) | entries | _figures(figures)

    def _rest(self, figures: Finished) -> list[OutputItem]:
        return [] if self._answer is None else self._answer.finish(is_cut=figures.is_cut)

    def _added(self, items: Sequence[OutputItem]) -> _Fields:
        thought = "".join(item.text for item in items if isinstance(item, ReasoningText))
        text = "".join(item for item in items if isinstance(item, str))
        whole = [item.whole for item in items if isinstance(item, CallDelta)]
        calls = [_call(call) for call in whole if call is not None]
        self._thinking, self._text = self._thinking + thought, self._text + text
        self._calls += calls
        found: _Fields = {"content": text}
        if thought:
            found["thinking"] = thought
        if calls:
            found["tool_calls"] = calls
        return found

    def _line(self, found: _Fields, *, done: bool) -> _Fields:
        now = datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
        head: _Fields = {"model": self._model, "created_at": now, "done": done}
        if self._chats:
            return head | {"message": {"role": "assistant", "content": "", **found}}
        thinking = {"thinking": found["thinking"]} if "thinking" in found else {}
        return head | {"response": found.get("content", ""), **thinking}


def _call(call: Call) -> _Fields:
    return {"function": {"name": call.name, "arguments": json.loads(call.arguments)}}


def _figures(figures: Finished) -> _Fields:
    """Counts, and times in nanoseconds."""
    prompt = figures.first_token_ms - figures.queue_ms
    total = figures.first_token_ms + figures.generation_ms
    return {
        "done_reason": figures.finish_reason,
        "total_duration": round(total * _PER_MS),
        "load_duration": 0,
        "prompt_eval_count": figures.prompt_tokens,
        "prompt_eval_duration": round(prompt * _PER_MS),
        "eval_count": figures.completion_tokens,
        "eval_duration": round(figures.generation_ms * _PER_MS),
    }
