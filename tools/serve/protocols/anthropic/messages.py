"""`/v1/messages`: bodies of Anthropic's protocol."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from edgellm.tools.serve.http.errors import ApiError
from edgellm.tools.serve.schemas.history import Earlier
from edgellm.tools.serve.schemas.openai import ChatRequest
from edgellm.tools.serve.schemas.response_format import Body
from edgellm.tools.serve.schemas.sampling import SamplingForm
from edgellm.tools.serve.schemas.tools import TOOL_NAME

_Message = dict[str, Any]
_WITHOUT_EFFECT = ("context_management", "container")
_NO_THREADS = "thread_unsupported_request"  # the client's tool runner goes on without a thread
_TOOL_WITHOUT_EFFECT = ("defer_loading", "input_examples", "allowed_callers")
_Cache = dict[str, Any] | None  # a cache breakpoint; all prefixes are cached


class TextBlock(Earlier):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: _Cache = None
    citations: list[Any] | None = None  # of earlier outputs


class Base64Source(Earlier):
    """An image in the request."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str

    def url(self) -> str:
        """The image as a `data:` URI."""
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(Earlier):
    """An image by its URL."""

    type: Literal["url"]
    url_: Annotated[str, Field(alias="url")]

    def url(self) -> str:
        """The URL."""
        return self.url_


class ImageBlock(Earlier):
    """An image."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]
    cache_control: _Cache = None

    def part(self) -> _Message:
        """In the form of chat completions."""
        return {"type": "image_url", "image_url": {"url": self.source.url()}}


class ThinkingBlock(Earlier):
    """Reasoning of an earlier output."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Earlier):
    """Encrypted reasoning of another server, which is left out."""

    type: Literal["redacted_thinking"]


class ToolReference(Earlier):
    """A tool that a search of tools found, as a result: its name."""

    type: Literal["tool_reference"]
    tool_name: str


class ToolUseBlock(Earlier):
    """A call that the model made in an earlier turn."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: _Cache = None
    caller: dict[str, Any] | None = None  # the model


_Result = Annotated[TextBlock | ImageBlock | ToolReference, Field(discriminator="type")]


class ToolResultBlock(Earlier):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[_Result] = ""
    is_error: bool = False
    cache_control: _Cache = None

    def text(self) -> str:
        """The texts of the result."""
        if isinstance(self.content, str):
            return "Error: " * self.is_error + self.content
        texts = [
            block.text if isinstance(block, TextBlock) else block.tool_name
            for block in self.content
            if not isinstance(block, ImageBlock)
        ]
        return "Error: " * self.is_error + "\n".join(texts)

    def images(self) -> list[_Message]:
        """The images of the result, as parts of a message."""
        blocks = [] if isinstance(self.content, str) else self.content
        return [block.part() for block in blocks if isinstance(block, ImageBlock)]


_Block = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class Turn(Earlier):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]

    def messages(self) -> Iterator[_Message]:
        """OpenAI's messages: results of calls are separate messages before the rest.

        Images of results follow them in the user's message: templates take none in results.
        """
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
            return
        parts: list[_Message] = []
        images: list[_Message] = []  # of results
        calls: list[_Message] = []
        thoughts = [block.thinking for block in self.content if isinstance(block, ThinkingBlock)]
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.text()}
                images += block.images()
            elif isinstance(block, TextBlock):
                parts.append({"type": "text", "text": block.text})
            elif isinstance(block, ImageBlock):
                parts.append(block.part())
            elif isinstance(block, ToolUseBlock):
                function = {"name": block.name, "arguments": json.dumps(block.input)}
                calls.append({"id": block.id, "function": function})
        if parts or images or calls or thoughts:
            found: _Message = {"role": self.role, "content": images + parts or None}
            if calls:
                found["tool_calls"] = calls
            if thoughts:
                found["reasoning_content"] = "\n".join(thoughts)
            yield found


def _joined(content: str | Sequence[TextBlock]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content)


class MessagesTool(Body):
    """A tool of the client."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=TOOL_NAME)]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: _Cache = None
    eager_input_streaming: bool | None = None  # calls are sent whole
    # Without effect: all tools are in the prompt, and the model calls them itself.
    defer_loading: bool | None = None
    input_examples: list[Any] | None = None
    allowed_callers: list[str] | None = None

    def as_openai(self) -> dict[str, Any]:
        """Convert to OpenAI's form."""
        facts = self.model_dump(include={"name", "description", "strict"}, exclude_none=True)
        return {"type": "function", "function": facts | {"parameters": self.input_schema}}


class ToolChoice(Body):
    """What the model may call, and what it must."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    def as_openai(self) -> str | dict[str, Any]:
        """Convert to OpenAI's form.

        Raises:
            ApiError: a tool without a name.
        """
        if self.type == "tool":
            if self.name is None:
                raise ApiError(400, 'tool_choice: "tool" needs a name', param="tool_choice")
            return {"type": "function", "function": {"name": self.name}}
        return {"auto": "auto", "any": "required", "none": "none"}[self.type]


class Thinking(Body):
    """Whether the model shall reason before it answers."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = None  # the model decides
    display: str | None = None


class OutputFormat(Body):
    """JSON by a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    """The answer's form, and how much the model shall think."""

    effort: str | None = None
    format: OutputFormat | None = None

    def as_openai(self) -> dict[str, Any]:
        """Fields of a `ChatRequest`."""
        found: dict[str, Any] = {"reasoning_effort": self.effort}
        if self.format is not None:
            schema = {"schema": self.format.schema_}
            found["response_format"] = {"type": "json_schema", "json_schema": schema}
        return found


class MessagesMetadata(Body):
    """Who asks."""

    user_id: str | None = None


class CountRequest(Body):
    """`/v1/messages/count_tokens`: a conversation."""

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: _Cache = None
    # Without effect: nothing is kept between requests, and no tools run here.
    context_management: dict[str, Any] | None = None
    container: str | dict[str, Any] | None = None
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None
    thread: dict[str, Any] | None = None  # is rejected so that the client sends all messages

    def ignored(self) -> list[str]:
        """Names of given fields that have no effect."""
        tools = [
            each
            for each in _TOOL_WITHOUT_EFFECT
            for tool in self.tools or ()
            if getattr(tool, each)
        ]
        found = [name for name in _WITHOUT_EFFECT if getattr(self, name) is not None]
        return found + [f"tools.{name}" for name in dict.fromkeys(tools)]

    def conversation(self) -> dict[str, Any]:
        """Fields of a `ChatRequest`; raises `ApiError` for what cannot be asked."""
        if self.thread is not None:
            raise ApiError(
                400,
                "thread: this server keeps no conversations: send all messages",
                param="thread",
                details={"error_code": _NO_THREADS, "unsupported": ["thread"]},
            )
        found: dict[str, Any] = {"model": self.model, "messages": []}
        if self.system:
            found["messages"].append({"role": "system", "content": _joined(self.system)})
        for turn in self.messages:
            found["messages"] += turn.messages()
        if self.tools:
            found["tools"] = [tool.as_openai() for tool in self.tools]
        if self.tool_choice is not None:
            found["tool_choice"] = self.tool_choice.as_openai()
            found["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        if self.output_config is not None:
            found |= self.output_config.as_openai()
        if self.thinking is not None and self.thinking.type in ("enabled", "disabled"):
            thinks = self.thinking.type == "enabled"
            found["chat_template_kwargs"] = {"enable_thinking": thinks, "thinking": thinks}
        return found


_FORM = SamplingForm(types={"temperature": Annotated[float, Field(ge=0, le=1)]})
_Sampling = _FORM.model(CountRequest)


class MessagesRequest(_Sampling):
    """`/v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    stop_sequences: Annotated[list[str], Field(max_length=16)] | None = None
    metadata: MessagesMetadata | None = None
    service_tier: str | None = None

    def as_chat(self) -> ChatRequest:
        """The same in OpenAI's words; raises `ApiError` for what cannot be asked."""
        sampled = {
            "max_tokens": self.max_tokens,
            "stream": self.stream,
            **_FORM.given(self),
            "stop": self.stop_sequences,
            "service_tier": self.service_tier,
        }
        return ChatRequest.model_validate(self.conversation() | sampled)
