"""`/v1/responses`: OpenAI's newer interface; nothing is stored between requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from edgellm.tools.serve.schemas.openai import ChatRequest
from edgellm.tools.serve.schemas.response_format import AnyJson, Body, FreeText
from edgellm.tools.serve.schemas.tools import TOOL_NAME

_Fields = dict[str, Any]
_Status = Literal["in_progress", "completed", "incomplete"] | None


class InputText(Body):
    """Text of a message."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None

    def part(self) -> _Fields:
        """In the form of chat completions."""
        return {"type": "text", "text": self.text}


class InputImage(Body):
    """A picture in a message."""

    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high"] | None = None

    def part(self) -> _Fields:
        """In the form of chat completions."""
        return {"type": "image_url", "image_url": {"url": self.image_url}}


_Part = Annotated[InputText | InputImage, Field(discriminator="type")]


class InputMessage(Body):
    """One turn."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Part]
    id: str | None = None
    status: _Status = None
    phase: str | None = None

    def add_to(self, messages: list[_Fields]) -> None:
        """As a message of chat completions; reasoning before it is its own."""
        content: Any = self.content
        if isinstance(content, list):
            content = [part.part() for part in content]
        if self.role == "assistant":
            _answering(messages)["content"] = content
        else:
            messages.append({"role": self.role, "content": content})


class FunctionCall(Body):
    """A call that the model made in an earlier turn."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str  # JSON
    id: str | None = None
    status: _Status = None

    def add_to(self, messages: list[_Fields]) -> None:
        """As a call of the answer that it is a part of."""
        function = {"name": self.name, "arguments": self.arguments}
        call = {"id": self.call_id, "function": function}
        _answering(messages, continues=True).setdefault("tool_calls", []).append(call)


class FunctionCallOutput(Body):
    """What came of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputText]
    id: str | None = None
    status: _Status = None

    def add_to(self, messages: list[_Fields]) -> None:
        """As a message of its own."""
        parts = [self.output] if isinstance(self.output, str) else [p.text for p in self.output]
        messages.append({"role": "tool", "tool_call_id": self.call_id, "content": "\n".join(parts)})


class ReasoningText(Body):
    """A piece of reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class Reasoned(Body):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Annotated[list[ReasoningText], Field(default_factory=list)]
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: _Status = None

    def add_to(self, messages: list[_Fields]) -> None:
        """As reasoning of the answer that begins with it."""
        if text := "\n".join(part.text for part in self.content or self.summary):
            messages.append({"role": "assistant", "content": None, "reasoning_content": text})


def _answering(messages: list[_Fields], *, continues: bool = False) -> _Fields:
    """The answer that an item belongs to: one that has only begun, or a new one.

    Args:
        messages: so far.
        continues: an answer's text may stand before the item.
    """
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or (not continues and last["content"] is not None):
        last = {"role": "assistant", "content": None}
        messages.append(last)
    return last


Item = Annotated[
    FunctionCall | FunctionCallOutput | Reasoned | InputMessage, Field(union_mode="left_to_right")
]


class FlatTool(Body):
    """A function of the client's."""

    type: Literal["function"]
    name: Annotated[str, Field(pattern=TOOL_NAME)]
    description: str | None = None
    parameters: _Fields | None = None
    strict: bool | None = None


class FlatChoice(Body):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class FlatSchema(Body):
    """A form of the answer."""

    type: Literal["json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[_Fields, Field(alias="schema")]
    strict: bool | None = None


class TextOptions(Body):
    """The answer's form."""

    format: Annotated[FreeText | AnyJson | FlatSchema, Field(discriminator="type")] | None = None
    verbosity: str | None = None

    def response_format(self) -> _Fields | None:
        """In the form of chat completions."""
        if not isinstance(self.format, FlatSchema):
            return None if self.format is None else {"type": self.format.type}
        schema = {"name": self.format.name, "schema": self.format.schema_}
        return {"type": "json_schema", "json_schema": schema}


class ReasoningOptions(Body):
    """How much the model shall think; summaries of it there are none."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(Body):
    """`/v1/responses`."""

    model: str | None = None
    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: int | None = None  # an extension
    tools: list[FlatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None  # none is encrypted
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    previous_response_id: None = None
    conversation: None = None
    store: bool | None = None  # nothing is
    # These say who asks, and change no answer.
    metadata: _Fields | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    stream_options: _Fields | None = None

    def as_chat(self) -> ChatRequest:
        """The same in the words of chat completions."""
        found: _Fields = {
            "model": self.model,
            "messages": self._messages(),
            "stream": self.stream,
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "service_tier": self.service_tier,
            "parallel_tool_calls": self.parallel_tool_calls,
            "tool_choice": self._choice(),
            "store": False,
        }
        if self.tools:
            found["tools"] = [_function(tool) for tool in self.tools]
        if self.text is not None:
            found["response_format"] = self.text.response_format()
            found["verbosity"] = self.text.verbosity
        if self.reasoning is not None:
            found["reasoning_effort"] = self.reasoning.effort
        return ChatRequest.model_validate(found)

    def ignored(self) -> list[str]:
        """What was asked for and cannot be had; tools are strict here unless they say otherwise."""
        is_forced = self.tool_choice == "required" or isinstance(self.tool_choice, FlatChoice)
        is_strict = any(tool.strict for tool in self.tools or ()) and not is_forced
        return ["store"] * bool(self.store) + ["strict"] * is_strict

    def _messages(self) -> list[_Fields]:
        messages: list[_Fields] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            item.add_to(messages)
        return messages

    def _choice(self) -> str | _Fields | None:
        if isinstance(self.tool_choice, FlatChoice):
            return {"type": "function", "function": {"name": self.tool_choice.name}}
        return self.tool_choice

    def echoed(self) -> _Fields:
        """What an answer repeats of the request."""
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": _dumped(self.reasoning) or {"effort": None, "summary": None},
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": _dumped(self.text) or {"format": {"type": "text"}},
            "tool_choice": _dumped(self.tool_choice) or "auto",
            "tools": [_dumped(tool) for tool in self.tools or ()],
            "top_p": 1.0 if self.top_p is None else self.top_p,
        }


def _dumped(value: Body | str | None) -> Any:
    if not isinstance(value, Body):
        return value
    return value.model_dump(by_alias=True, exclude_none=not isinstance(value, FlatTool))


def _function(tool: FlatTool) -> _Fields:
    facts = {"name", "description", "parameters"}
    return {"type": "function", "function": tool.model_dump(include=facts, exclude_none=True)}
