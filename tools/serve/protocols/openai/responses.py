"""`/v1/responses`: bodies of OpenAI's Responses; nothing is stored between requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from edgellm.device_runtime.sampling.params import SamplingParams
from edgellm.tools.serve.http.errors import ApiError
from edgellm.tools.serve.schemas.history import Earlier
from edgellm.tools.serve.schemas.openai import FORM, ChatRequest, Priority, Stop
from edgellm.tools.serve.schemas.response_format import AnyJson, Body, FreeText
from edgellm.tools.serve.schemas.tools import TOOL_NAME

_Fields = dict[str, Any]
_IMAGES = "images"  # in a message: of a result, for the user's message after the results


class InputText(Earlier):
    """Text of a message."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None

    def part(self) -> _Fields:
        """In the form of chat completions."""
        return {"type": "text", "text": self.text}


class InputImage(Earlier):
    """An image in a message."""

    type: Literal["input_image"]
    image_url: str
    detail: str | None = None  # the engine's limits decide

    def part(self) -> _Fields:
        """In the form of chat completions."""
        return {"type": "image_url", "image_url": {"url": self.image_url}}


class RefusalText(Earlier):
    """A refusal of an earlier output: the assistant's text."""

    type: Literal["refusal"]
    refusal: str

    def part(self) -> _Fields:
        """In the form of chat completions."""
        return {"type": "text", "text": self.refusal}


_Part = Annotated[InputText | InputImage | RefusalText, Field(discriminator="type")]


class InputMessage(Earlier):
    """One message of a conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Part]
    id: str | None = None
    status: str | None = None

    def add_to(self, messages: list[_Fields]) -> None:
        """Append a chat message; join it with reasoning before it."""
        content: Any = self.content
        if isinstance(content, list):
            content = [part.part() for part in content]
        if self.role == "assistant":
            _assistant_message(messages)["content"] = content
        else:
            messages.append({"role": self.role, "content": content})


class FunctionCall(Earlier):
    """A call that the model made in an earlier turn."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str  # JSON
    id: str | None = None
    status: str | None = None

    def add_to(self, messages: list[_Fields]) -> None:
        """Append the call to its assistant message."""
        function = {"name": self.name, "arguments": self.arguments}
        call = {"id": self.call_id, "function": function}
        _assistant_message(messages, continues=True).setdefault("tool_calls", []).append(call)


class FunctionCallOutput(Earlier):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[_Part] = ""
    id: str | None = None
    status: str | None = None

    def add_to(self, messages: list[_Fields]) -> None:
        """Append a separate message; its images follow in the user's message."""
        parts = [] if isinstance(self.output, str) else [part.part() for part in self.output]
        texts = [self.output] if isinstance(self.output, str) else []
        texts += [part["text"] for part in parts if part["type"] == "text"]
        images = [part for part in parts if part["type"] == "image_url"]
        found = {"role": "tool", "tool_call_id": self.call_id, "content": "\n".join(texts)}
        messages.append(found | ({_IMAGES: images} if images else {}))


class ReasoningText(Earlier):
    """A part of reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class Reasoned(Earlier):
    """Reasoning of an earlier output."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Annotated[list[ReasoningText], Field(default_factory=list)]
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: str | None = None

    def add_to(self, messages: list[_Fields]) -> None:
        """Append an assistant message that starts with the reasoning."""
        if text := "\n".join(part.text for part in self.content or self.summary):
            messages.append({"role": "assistant", "content": None, "reasoning_content": text})


class ItemReference(Earlier):
    """An item of an earlier output by its id, which is not kept."""

    type: Literal["item_reference"]

    def add_to(self, messages: list[_Fields]) -> None:
        """Raise `ApiError`."""
        del messages
        raise ApiError(
            400,
            "input: an item_reference names an item that this server does not keep: send the item "
            "itself (store: false, in the AI SDK providerOptions.openai.store)",
            param="input",
        )


def _assistant_message(messages: list[_Fields], *, continues: bool = False) -> _Fields:
    """The assistant message of an item: an unfinished one, or a new one.

    Args:
        messages: the messages so far.
        continues: whether text may precede the item in its message.
    """
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or (not continues and last["content"] is not None):
        last = {"role": "assistant", "content": None}
        messages.append(last)
    return last


def _kind(item: Any) -> str:
    """The type of an item; messages need none."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return "message" if kind is None else str(kind)


Item = Annotated[
    Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[Reasoned, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[InputMessage, Tag("message")],
    Discriminator(_kind),
]


class FlatTool(Body):
    """A function of the client."""

    type: Literal["function"]
    name: Annotated[str, Field(pattern=TOOL_NAME)]
    description: str | None = None
    parameters: _Fields | None = None
    strict: bool | None = None


class FlatChoice(Body):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class FlatAllowed(Body):
    """A part of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatChoice], Field(min_length=1)]


class FlatSchema(Body):
    """A JSON schema of the output."""

    type: Literal["json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[_Fields, Field(alias="schema")]
    strict: bool | None = None


class TextOptions(Body):
    """The format of the output."""

    format: Annotated[FreeText | AnyJson | FlatSchema, Field(discriminator="type")] | None = None
    verbosity: str | None = None

    def response_format(self) -> _Fields | None:
        """In the form of chat completions."""
        if not isinstance(self.format, FlatSchema):
            return None if self.format is None else {"type": self.format.type}
        schema = {"name": self.format.name, "schema": self.format.schema_}
        return {"type": "json_schema", "json_schema": schema}


class ReasoningOptions(Body):
    """Reasoning effort; summaries are unsupported."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


_Sampling = FORM.model(Body)
_Choice = Annotated[FlatChoice | FlatAllowed, Field(discriminator="type")]


class ResponsesRequest(_Sampling):
    """`/v1/responses`."""

    model: str | None = None
    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    # vLLM's extensions.
    stop: Stop | None = None
    priority: Priority | None = None
    tools: list[FlatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | _Choice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None  # ignored
    truncation: Literal["disabled", "auto"] | None = None  # long inputs are rejected
    top_logprobs: Literal[0] | None = None
    max_tool_calls: int | None = None  # of tools that a server runs, which are rejected
    background: Literal[False] | None = None
    previous_response_id: None = None
    conversation: None = None
    store: bool | None = None  # ignored
    # These identify the user, and do not change the output.
    metadata: _Fields | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: _Fields | None = None
    service_tier: str | None = None
    stream_options: _Fields | None = None

    def as_chat(self) -> ChatRequest:
        """Convert to a chat request; raises `ValidationError` for unsupported values."""
        found: _Fields = {
            "model": self.model,
            "messages": self._messages(),
            "stream": self.stream,
            "max_tokens": self.max_output_tokens,
            "stop": self.stop,
            "priority": self.priority,
            **FORM.given(self),
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
        """Requested fields that are ignored."""
        return ["store"] * bool(self.store) + ["truncation"] * (self.truncation == "auto")

    def _messages(self) -> list[_Fields]:
        messages: list[_Fields] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            item.add_to(messages)
        return _with_images(messages)

    def _choice(self) -> str | _Fields | None:
        choice = self.tool_choice
        if isinstance(choice, FlatAllowed):
            tools = [_named(one) for one in choice.tools]
            return {"type": choice.type, "allowed_tools": {"mode": choice.mode, "tools": tools}}
        return _named(choice) if isinstance(choice, FlatChoice) else choice

    def echoed(self, sampling: SamplingParams) -> _Fields:
        """Fields of the request that the response repeats, with its sampling parameters."""
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": _dumped(self.reasoning) or {"effort": None, "summary": None},
            "temperature": sampling.temperature,
            "text": _dumped(self.text) or {"format": {"type": "text"}},
            "tool_choice": _dumped(self.tool_choice) or "auto",
            "tools": [_dumped(tool) for tool in self.tools or ()],
            "top_p": sampling.top_p,
        }


def _named(tool: FlatChoice) -> _Fields:
    return {"type": "function", "function": {"name": tool.name}}


def _with_images(messages: list[_Fields]) -> list[_Fields]:
    """Move images of results into the user's message after them, a new one if there is none."""
    found: list[_Fields] = []
    held: list[_Fields] = []
    for message in messages:
        if held and message["role"] == "user":
            content = message["content"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            message, held = {**message, "content": held + parts}, []
        elif held and message["role"] != "tool":
            found.append({"role": "user", "content": held})
            held = []
        held = held + message.get(_IMAGES, [])
        found.append({name: value for name, value in message.items() if name != _IMAGES})
    return found + ([{"role": "user", "content": held}] if held else [])


def _dumped(value: Body | str | None) -> Any:
    if not isinstance(value, Body):
        return value
    return value.model_dump(by_alias=True, exclude_none=not isinstance(value, FlatTool))


def _function(tool: FlatTool) -> _Fields:
    facts = {"name", "description", "parameters", "strict"}
    return {"type": "function", "function": tool.model_dump(include=facts, exclude_none=True)}
