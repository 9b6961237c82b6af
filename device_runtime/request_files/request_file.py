"""Request files: strict parsing of the JSON format; errors name the path of a field."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import msgspec

from edgellm.core.errors import RequestError, suggestion
from edgellm.core.strict_json import line_of, parse
from edgellm.device_runtime.api.generation_request import GenerationDefaults
from edgellm.device_runtime.sampling.params import (
    LARGEST_BIAS,
    MAX_BIASES,
    OPTIONS,
    Guide,
    GuideKind,
    SamplingParams,
)
from edgellm.multimodal.media import Audio, Source, Video

_ARTICLE = {"text": "a text", "image": "an image", "video": "a video", "audio": "an audio"}
Role = Literal["system", "user", "assistant", "tool"]
ContentKind = Literal["text", "image", "audio", "video"]
Count = Annotated[int, msgspec.Meta(ge=0)]
Choices = Annotated[int, msgspec.Meta(ge=1, le=1024)]
Bias = Annotated[float, msgspec.Meta(ge=-LARGEST_BIAS, le=LARGEST_BIAS)]
LogitBias = Annotated[  # by token id; JSON's keys are strings
    dict[Annotated[int, msgspec.Meta(ge=0)], Bias], msgspec.Meta(max_length=MAX_BIASES)
]
# Types of content in OpenAI's protocols, which edgellm-serve takes.
_IMAGE = 'write {"type": "image", "image": "cat.jpg"}: a path, or a file:// or data: URI'
_VIDEO = 'write {"type": "video", "video": "robot.mp4"}: a path, or a list of images'
_AUDIO = 'write {"type": "audio", "audio": "question.wav"}: a path, or a file:// or data: URI'
_TEXT = 'write {"type": "text", "text": "..."}'
_OF_OPENAI = {
    "image_url": _IMAGE,
    "input_image": _IMAGE,
    "video_url": _VIDEO,
    "input_audio": _AUDIO,
    "audio_url": _AUDIO,
    "input_text": _TEXT,
    "output_text": _TEXT,
}
_NOT_SUPPORTED = {
    "num_logprobs": "log-probabilities",
}


class ContentItem(msgspec.Struct, forbid_unknown_fields=True):
    """One content item: text, or what the encoders of an engine take: image, video, audio."""

    type: ContentKind
    text: str | None = None
    image: str | None = None
    audio: str | None = None
    video: str | list[str] | None = None  # a file, or the frames

    @property
    def source(self) -> Source | None:
        """The file or text of the item."""
        if self.audio is not None:
            return Audio(self.audio)
        return self.image if self.video is None else Video.of(self.video)


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: Role
    content: str | list[ContentItem] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None  # of an earlier turn, in OpenAI's form
    tool_call_id: str | None = None

    def __post_init__(self) -> None:
        """Require content, calls or reasoning."""
        if self.content is None and not self.tool_calls and self.reasoning_content is None:
            raise ValueError("Object missing required field `content`")  # as msgspec words it

    def more(self) -> dict[str, Any]:
        """Fields of the message for the chat template, other than role and content."""
        names = ("name", "reasoning_content", "tool_calls", "tool_call_id")
        given = {name: getattr(self, name) for name in names}
        return {name: value for name, value in given.items() if value is not None}

    def items(self, place: str) -> list[ContentItem]:
        """The content items in order; raises `RequestError` for an unsupported one."""
        if self.content is None:
            return []
        if isinstance(self.content, str):
            return [ContentItem("text", self.content)]
        for index, item in enumerate(self.content):
            where = f"{place}.content[{index}]"
            if getattr(item, item.type) is None:
                raise RequestError(f"{where}: {_ARTICLE[item.type]} item needs `{item.type}`")
        return self.content


class GuidedDecoding(msgspec.Struct, forbid_unknown_fields=True):
    """The constraint on an output; one of these."""

    json_object: bool = False
    json_schema: dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], msgspec.Meta(min_length=1)] | None = None
    ebnf: str | None = None

    def guide(self) -> Guide:
        """The guide for the sampler; raises `RequestError` unless exactly one is given."""
        given: dict[GuideKind, str | None] = {
            "json_object": "" if self.json_object else None,
            "json_schema": None if self.json_schema is None else json.dumps(self.json_schema),
            "regex": self.regex,
            "choice": None if self.choice is None else json.dumps(self.choice),
            "ebnf": self.ebnf,
        }
        found = [Guide(kind, text) for kind, text in given.items() if text is not None]
        if len(found) != 1:
            raise RequestError("guided_decoding: give exactly one of " + ", ".join(given))
        return found[0]


def _fields() -> list[tuple[str, Any, Any]]:
    """The sampling options as fields of a struct; None: not given."""
    found: list[tuple[str, Any, Any]] = []
    for one in OPTIONS.values():
        bounds: dict[str, Any] = {**one.bounds}
        kind: Any = Annotated[one.kind, msgspec.Meta(description=one.doc, **bounds)]
        found.append((one.name, kind | None, None))
    return found


_Sampling = msgspec.defstruct("_Sampling", _fields())


class Options(_Sampling, kw_only=True, forbid_unknown_fields=True):
    """Top-level options of the file; a request may override most of them."""

    batch_size: Annotated[int, msgspec.Meta(ge=1)] = 1
    n: Choices = 1  # outputs of each request; they differ by their seeds
    max_generate_length: Annotated[int, msgspec.Meta(ge=1)] | None = None
    apply_chat_template: bool = True
    add_generation_prompt: bool | None = None  # None: unless the last message is continued
    continue_final_message: bool | None = None  # None: if it is the assistant's
    enable_thinking: bool = False
    logit_bias: LogitBias = msgspec.field(default_factory=dict)
    guided_decoding: GuidedDecoding | None = None
    stop: str | list[str] = msgspec.field(default_factory=list)
    stop_token_ids: list[Count] = msgspec.field(default_factory=list)
    bad_words: list[str] = msgspec.field(default_factory=list)
    # Folders of adapters by name.
    available_lora_weights: dict[str, str] = msgspec.field(default_factory=dict)


class Request(_Sampling, kw_only=True, forbid_unknown_fields=True):
    """One request; null takes the file's value."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    save_system_prompt_kv_cache: bool = False  # pins its prefix for all later requests
    disable_spec_decode: bool = False
    lora_name: str | None = None  # of `available_lora_weights`; None: the base alone
    n: Choices | None = None
    max_generate_length: Annotated[int, msgspec.Meta(ge=1)] | None = None
    apply_chat_template: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    enable_thinking: bool | None = None
    logit_bias: LogitBias | None = None
    guided_decoding: GuidedDecoding | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Count] | None = None
    bad_words: list[str] | None = None

    def merged(self, options: Options) -> Options:
        """The file's options, overridden by this request's."""
        own = {
            name: value
            for name in Options.__struct_fields__
            if (value := getattr(self, name, None)) is not None
        }
        return msgspec.structs.replace(options, **own)


# The options that `SamplingParams` has by the same name: a new one needs no further line here.
_SAMPLING = {each.name for each in fields(SamplingParams)}.intersection(Options.__struct_fields__)


def sampling_of(
    options: Options, defaults: GenerationDefaults | None = None, *, greedy: bool = False
) -> SamplingParams:
    """Sampling parameters of a request.

    Args:
        options: of the request and its file.
        defaults: of options that these do not give.
        greedy: overrides the temperature.
    """
    given = {name: getattr(options, name) for name in _SAMPLING}
    values = {name: value for name, value in given.items() if value is not None}
    for name in ("stop_token_ids", "bad_words"):
        values[name] = tuple(values[name])
    if options.guided_decoding is not None:
        values["guide"] = options.guided_decoding.guide()
    if greedy:
        values["temperature"] = 0.0
    return (defaults or GenerationDefaults()).params(values)


class OutputIndex(NamedTuple):
    """Place of an output: index of its request in the file, and its own if there are several."""

    request: int
    choice: int | None = None

    def head(self) -> dict[str, int]:
        """The first fields of its response."""
        choice = {} if self.choice is None else {"choice_idx": self.choice}
        return {"request_idx": self.request, **choice}


def outputs_of(options: Options, raw: Any, index: int) -> list[OutputIndex]:
    """Places of the outputs of a request; a malformed request has one, its error.

    Args:
        options: the file's.
        raw: the request as parsed JSON.
        index: its index in the file.
    """
    own = raw.get("n") if isinstance(raw, dict) else None
    if (options.n if own is None else own) == 1:
        return [OutputIndex(index)]
    try:
        count = parse_request(raw, index).n or options.n
    except RequestError:
        count = 1
    return [OutputIndex(index, at if count > 1 else None) for at in range(count)]


_PARTS: dict[str, type[msgspec.Struct]] = {  # objects in requests, by the field that holds them
    "messages": Message,
    "content": ContentItem,
    "guided_decoding": GuidedDecoding,
}
_FIELD = re.compile(r"(\$(?:\.\w+|\[\d+\])*)(?::.* unknown field `(\w+)`)?")


def read_file(path: Path) -> tuple[Options, list[Any]]:
    """The options of a request file and its raw requests, which are checked one by one.

    Raises:
        RequestError: no such file, not JSON (line and column), wrong top-level fields.
    """
    try:
        document = parse(path.read_text("utf-8"))
    except OSError as error:
        hint = "give the path of a JSON file with `requests` as --inputFile"
        raise RequestError(f"cannot read {path}: {error.strerror}", hint=hint) from None
    except json.JSONDecodeError as error:
        raise RequestError(
            f"{path} is not valid JSON: line {error.lineno}, column {error.colno}: {error.msg}"
        ) from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8: byte {error.start}") from None
    except RecursionError:
        raise RequestError(f"{path} is nested too deeply") from None
    except ValueError as error:  # a key twice, integers of thousands of digits
        raise RequestError(f"{path}: {error}") from None
    if not isinstance(document, dict):
        raise RequestError(f"{path}: the top level must be an object with `requests`")
    requests = document.pop("requests", None)
    if not isinstance(requests, list) or not requests:
        raise RequestError(f"{path}: $.requests must be a list with at least one request")
    try:
        _require_text(document, "$")
        return convert(document, Options, "$"), requests
    except RequestError as error:
        raise RequestError(located(path, str(error)), hint=error.hint) from None


def located(path: Path | None, message: str) -> str:
    """A message that begins with the path of a field, after the file's name and the line."""
    field = _FIELD.match(message)
    if path is None or field is None:
        return message
    try:
        line = line_of(path.read_text("utf-8"), field[1] + "." + (field[2] or ""))
    except (OSError, ValueError):  # it has changed
        return message
    return f"{path} line {line}: {message}"


def parse_request(raw: Any, index: int) -> Request:
    """Check one request; raises `RequestError` with the path of the faulty field."""
    _require_text(raw, f"$.requests[{index}]")
    return convert(raw, Request, f"$.requests[{index}]")


def _require_text(raw: Any, place: str) -> None:
    try:
        json.dumps(raw, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError(
            f"{place}: half of a surrogate pair (\\ud800 to \\udfff) is not text"
        ) from None


def convert(raw: Any, kind: Any, place: str) -> Any:
    """A struct of this kind; raises `RequestError` with the path of the faulty field."""
    if isinstance(raw, dict):
        raw = _without_nulls(raw, kind)
        for name, what in _NOT_SUPPORTED.items():
            if raw.pop(name, None):
                raise RequestError(f"{place}.{name}: {what} are not supported")
    try:
        return msgspec.convert(raw, kind, str_keys=True)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        path = path.removesuffix("`")
        hint = _hint(message, path, kind)
        if hint in _OF_OPENAI.values():
            message = f"Content of the type {message.rpartition(' ')[2]} is of OpenAI's protocol"
        raise RequestError(f"{place}{path}: {message[0].lower()}{message[1:]}", hint=hint) from None


def _without_nulls(raw: dict[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    """A copy of an object in which optional fields that are null are not given."""
    optional = {each.name for each in msgspec.structs.fields(kind) if not each.required}
    found: dict[str, Any] = {}
    for name, value in raw.items():
        part = _PARTS.get(name)
        if value is None and name in optional:
            continue
        if part is not None and isinstance(value, list):
            value = [_without_nulls(one, part) if isinstance(one, dict) else one for one in value]
        elif part is not None and isinstance(value, dict):
            value = _without_nulls(value, part)
        found[name] = value
    return found


def _hint(message: str, path: str, kind: type[msgspec.Struct]) -> str:
    """The known fields of an object, or the known values of a field, and which was meant."""
    last = re.sub(r"\[\d+\]", "", path).rpartition(".")[2]
    if match := re.match("Object contains unknown field `(.*)`", message):
        known = _PARTS.get(last, kind).__struct_fields__
        return " ".join(filter(None, (suggestion(match[1], known), f"fields: {', '.join(known)}")))
    if match := re.match("Invalid enum value '(.*)'", message):
        if last == "type" and match[1] in _OF_OPENAI:
            return _OF_OPENAI[match[1]]
        known = get_args(Role if last == "role" else ContentKind)
        name = "roles" if last == "role" else "types"
        return " ".join(filter(None, (suggestion(match[1], known), f"{name}: {', '.join(known)}")))
    return f"roles: {', '.join(get_args(Role))}" if last == "role" else ""
