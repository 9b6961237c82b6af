"""The bodies of OpenAI requests; what cannot be served is refused, never ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from edgellm.device_runtime.sampling.guidance import Guide
from edgellm.device_runtime.sampling.sampler import LARGEST_BIAS, LARGEST_REPETITION, SamplingParams
from edgellm.tools.serve.seeds import seed_or_any

# Clients give an unused option its neutral value: that one is taken.
_One = Annotated[int, Field(ge=1, le=1)] | None
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Repetition = Annotated[float, Field(ge=1 / LARGEST_REPETITION, le=LARGEST_REPETITION)]
_TokenId = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
_Bias = Annotated[float, Field(ge=-LARGEST_BIAS, le=LARGEST_BIAS)]
Stop = str | Annotated[list[str], Field(max_length=16)]


class Body(BaseModel):
    """JSON with known fields of the right types only."""

    model_config = ConfigDict(strict=True, extra="forbid")


class StreamOptions(Body):
    """What a stream holds besides the text."""

    include_usage: bool = False
    # An extension: each token with its origin, "drafted", "bonus" or "prompt" (see docs).
    include_tokens: bool = False


class FreeText(Body):
    """Any text."""

    type: Literal["text"]

    def guide(self) -> Guide | None:
        """Nothing guides."""
        return None


class AnyJson(Body):
    """A JSON object."""

    type: Literal["json_object"]

    def guide(self) -> Guide:
        """What guides."""
        return Guide("json_object")


class NamedSchema(Body):
    """A JSON schema with the name that OpenAI asks for."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None  # the schema is always kept


class JsonBySchema(Body):
    """JSON by a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema

    def guide(self) -> Guide:
        """What guides."""
        return Guide.of_schema(self.json_schema.schema_)


class ByRegex(Body):
    """A text that a regular expression matches, an extension."""

    type: Literal["regex"]
    regex: str

    def guide(self) -> Guide:
        """What guides."""
        return Guide("regex", self.regex)


ResponseFormat = Annotated[FreeText | AnyJson | JsonBySchema | ByRegex, Field(discriminator="type")]


class Sampled(Body):
    """What chat and completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None  # an extension, as vLLM has it
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | None = None
    n: _One = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    repetition_penalty: _Repetition | None = None  # vLLM's
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None  # vLLM's
    logit_bias: dict[_TokenId, _Bias] | None = None
    response_format: ResponseFormat | None = None
    # These change no answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def sampling(self, num_logprobs: int | None) -> SamplingParams:
        """OpenAI's defaults: temperature 1 and the whole vocabulary."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            seed=seed_or_any(self.seed),
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
            guide=self.response_format.guide() if self.response_format is not None else None,
            num_logprobs=num_logprobs,
        )

    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def streams(self) -> bool:
        """Whether the answer shall come as server-sent events."""
        return bool(self.stream)


class CompletionRequest(Sampled):
    """`/v1/completions`: a text without a template."""

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: _One = None
    echo: Literal[False] | None = None
    suffix: Annotated[str, Field(max_length=0)] | None = None

    def text(self) -> str:
        """The prompt."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[0]


class TextPart(Body):
    """Text of a message."""

    type: Literal["text"]
    text: str


class ImageUrl(Body):
    """Where a picture is."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None  # the engine's limits decide


class ImagePart(Body):
    """A picture in a message."""

    type: Literal["image_url"]
    image_url: ImageUrl


class CalledFunction(Body):
    """A call that the model made in an earlier turn."""

    name: str
    arguments: str  # JSON


class ToolCall(Body):
    """A call that the model made in an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class Message(Body):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None  # as answers have it
    reasoning_content: None = None


class Function(Body):
    """What a model may call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class Tool(Body):
    """What a model may call."""

    type: Literal["function"]
    function: Function


class TemplateFlags(Body):
    """Variables of the chat template, an extension that vLLM has as well."""

    enable_thinking: bool | None = None


class ChatRequest(Sampled):
    """`/v1/chat/completions`: a conversation for the model's chat template."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    chat_template_kwargs: TemplateFlags | None = None
    store: Literal[False] | None = None
