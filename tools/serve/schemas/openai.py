"""Bodies of OpenAI requests; unsupported values are rejected, never ignored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PrivateAttr

from edgellm.device_runtime.api.generation_request import GenerationDefaults
from edgellm.device_runtime.engine.template_flags import (
    GIVEN,
    THINKING,
    can_think,
    require_known,
)
from edgellm.device_runtime.sampling.params import Guide, SamplingParams
from edgellm.device_runtime.text.tokenizer import ChatTokenizer
from edgellm.tools.serve.schemas.history import Earlier
from edgellm.tools.serve.schemas.response_format import Body, Formed
from edgellm.tools.serve.schemas.sampling import (
    NEUTRAL,
    AnySeed,
    SamplingForm,
    Temperature,
    TokenId,
    TopK,
)
from edgellm.tools.serve.schemas.tools import Tool, Tooled

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_PROMPTS, MAX_CHOICES = 256, 16
WITHOUT_EFFECT = (
    "service_tier", "reasoning_effort", "verbosity", "prediction", "cache_prompt",
    "guided_decoding_backend",
)  # fmt: skip

# Clients send unused options with their neutral value, which is accepted.
_One = Annotated[int, Field(ge=1, le=1)] | None
MAX_FRAMES = 768
_TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Priority = Annotated[int, Field(ge=0, le=100)]
Stop = str | Annotated[list[str], Field(max_length=16)]


def words(given: Stop | None) -> tuple[str, ...]:
    """A text or several, as a tuple."""
    return (given,) if isinstance(given, str) else tuple(given or ())


class StreamOptions(Body):
    """Extra contents of a stream."""

    include_usage: bool = False
    # Extensions, see docs: each token with its origin, "drafted", "bonus" or "plain"; with these,
    # the draft tree of each round.
    include_tokens: bool = False
    include_trees: bool = False


FORM = SamplingForm(types={"temperature": Temperature, "top_k": TopK, "seed": AnySeed})
_Sampling = FORM.model(Formed)


class Sampled(_Sampling):
    """Common fields of chat and completion requests."""

    _defaults: Mapping[str, Any] = PrivateAttr(default_factory=lambda: NEUTRAL)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Stop | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    priority: Priority | None = None  # vLLM's; 0, the default, is the highest
    # These identify the user, and do not change the output.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    # These are unsupported; the response lists them as ignored.
    service_tier: str | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    prediction: dict[str, Any] | None = None
    cache_prompt: bool | None = None
    guided_decoding_backend: str | None = None

    def ignored(self, tokenizer: ChatTokenizer) -> list[str]:
        """Names of the fields that have no effect on this model."""
        del tokenizer
        return [name for name in WITHOUT_EFFECT if getattr(self, name) is not None]

    def with_defaults(self, defaults: Mapping[str, Any]) -> Self:
        """Set the defaults of the request's protocol, in place of OpenAI's."""
        self._defaults = defaults
        return self

    def sampling(
        self, engine: GenerationDefaults, num_logprobs: int | None, guide: Guide | None
    ) -> SamplingParams:
        """Sampling options; OpenAI's defaults are temperature 1 and the whole vocabulary."""
        more = {"guide": guide, "num_logprobs": num_logprobs}
        return FORM.params(self, engine, self._defaults, **more)

    def ends(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """The tokens that end the output and are not part of it."""
        given = FORM.given(self)
        own = () if given.get("ignore_eos") else eos_token_ids
        return frozenset(given.get("stop_token_ids", ())).union(own)

    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return words(self.stop)

    def streams(self) -> bool:
        """Whether the output is streamed as server-sent events."""
        return bool(self.stream)


class CompletionRequest(Sampled):
    """`/v1/completions`: prompts without a chat template."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | _TokenIds
        | Annotated[list[_TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: _One = None
    echo: bool | None = None
    suffix: Annotated[str, Field(max_length=0)] | None = None
    return_token_ids: bool | None = None  # vLLM's; without streaming only

    def prompts(self) -> list[str | list[int]]:
        """The prompts: texts or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[token_id for token_id in self.prompt if isinstance(token_id, int)]]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]


class TextPart(Earlier):
    """Text of a message."""

    type: Literal["text"]
    text: str


class ImageUrl(Earlier):
    """URL of an image."""

    url: str
    detail: str | None = None  # the engine's limits decide


class ImagePart(Earlier):
    """An image in a message."""

    type: Literal["image_url"]
    image_url: ImageUrl


class RefusalPart(Earlier):
    """A refusal of an earlier output: the assistant's text."""

    type: Literal["refusal"]
    refusal: str


class CalledFunction(Earlier):
    """A call that the model made in an earlier turn."""

    name: str
    arguments: str | dict[str, Any] = "{}"  # JSON


class ToolCall(Earlier):
    """A call that the model made in an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class VideoUrlPart(Earlier):
    """A video in a message, in vLLM's form."""

    type: Literal["video_url"]
    video_url: ImageUrl


class VideoPart(Earlier):
    """A video in a message: its URL, or the URLs of its frames."""

    type: Literal["video"]
    video: str | Annotated[list[str], Field(min_length=1, max_length=MAX_FRAMES)]


class InputAudio(Earlier):
    """The bytes of an audio file."""

    data: str  # base64
    format: Annotated[str, Field(pattern="^[A-Za-z0-9]{1,16}$")]  # "wav", "mp3", ...


class InputAudioPart(Earlier):
    """Audio in a message."""

    type: Literal["input_audio"]
    input_audio: InputAudio


class AudioUrlPart(Earlier):
    """Audio in a message, in vLLM's form."""

    type: Literal["audio_url"]
    audio_url: ImageUrl


Part = Annotated[
    TextPart | RefusalPart | ImagePart | VideoUrlPart | VideoPart | InputAudioPart | AudioUrlPart,
    Field(discriminator="type"),
]


class Message(Earlier):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None  # the text of an earlier output without content
    reasoning_content: str | None = None  # of an earlier output; `reasoning` in vLLM
    reasoning: str | None = None


class Templated(Body):
    """Options of the chat template, with vLLM's names."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None  # None: true for the assistant's
    chat_template_kwargs: dict[str, Any] | None = None

    def variables(self, tools: Sequence[Tool], tokenizer: ChatTokenizer) -> dict[str, Any]:
        """Variables for the chat template; raises `RequestError` for an unknown one."""
        unused = self.unused_switches(tokenizer)
        given = (self.chat_template_kwargs or {}).items()
        flags = {name: value for name, value in given if value is not None and name not in unused}
        own = {name: f"{name} as a field of the request" for name in type(self).model_fields}
        fixed = ("messages", *GIVEN)
        require_known(flags, tokenizer, own, fixed=fixed, place="chat_template_kwargs.")
        if tools:
            flags["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
        for name in ("add_generation_prompt", "continue_final_message"):
            if (value := getattr(self, name)) is not None:
                flags[name] = value
        return flags

    def unused_switches(self, tokenizer: ChatTokenizer) -> list[str]:
        """Thinking switches that the template does not have; clients send them to all models."""
        if can_think(tokenizer):
            return []
        given = self.chat_template_kwargs or {}
        return [name for name in THINKING if given.get(name) is True]


class ChatRequest(Templated, Tooled, Sampled):
    """`/v1/chat/completions`: messages for the model's chat template."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    store: bool | None = None  # ignored
    modalities: list[Literal["text"]] | None = None

    def ignored(self, tokenizer: ChatTokenizer) -> list[str]:
        """As `Sampled.ignored`, without `reasoning_effort` if the template uses it."""
        names, read = super().ignored(tokenizer), self.template_flags(tokenizer)
        names = [name for name in names if name not in read] + self.unused_switches(tokenizer)
        is_ignored = self.form() is not None or self.ignores_strict(tokenizer.chat_template or "")
        names += ["store"] * bool(self.store)
        return names + ["strict"] * (is_ignored and self.has_strict_choice())

    def template_flags(self, tokenizer: ChatTokenizer) -> dict[str, Any]:
        """Variables for the chat template; raises `RequestError` for an unknown one."""
        flags: dict[str, Any] = {}
        reads_effort = "reasoning_effort" in tokenizer.template_variables()
        if self.reasoning_effort is not None and reads_effort:
            flags["reasoning_effort"] = self.reasoning_effort
        return flags | self.variables(self.usable_tools(), tokenizer)
