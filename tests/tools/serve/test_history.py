"""What clients send back: their own objects of earlier outputs, and null for optional fields."""

from __future__ import annotations

import msgspec
import openai
import pytest
from pydantic import ValidationError

from edgellm.device_runtime.request_files import request_file
from edgellm.tools.serve.app import create_app
from edgellm.tools.serve.schemas.history import Earlier, ignored_fields
from edgellm.tools.serve.schemas.openai import ChatRequest
from edgellm.tools.serve.schemas.response_format import Body

assert create_app  # all modules with bodies are imported
USER = {"role": "user", "content": "w20 w30"}
CALL = {
    "id": "c1", "type": None, "index": 0,
    "function": {"name": "weather", "arguments": "{}", "parsed_arguments": {"a": 1}},
}  # fmt: skip


def _bodies(kind=Body):
    for each in kind.__subclasses__():
        yield each
        yield from _bodies(each)


BODIES = sorted({*_bodies()}, key=lambda one: (one.__module__, one.__qualname__))


def _result(body, given):
    """The body, or the fields that are missing."""
    try:
        return body.model_validate(given)
    except ValidationError as error:
        return [one["loc"][0] for one in error.errors() if one["type"] == "missing"]


@pytest.mark.parametrize("body", BODIES, ids=lambda one: one.__qualname__)
def test_null_means_not_given_in_every_body(body):
    fields = [(one.alias or name, one) for name, one in body.model_fields.items()]
    nulls = {name: None for name, field in fields if not field.is_required()}
    needed = [name for name, field in fields if field.is_required()]
    assert _result(body, nulls) == (needed or _result(body, {}))


@pytest.mark.parametrize(
    "kind", [request_file.Options, request_file.Request, *request_file._PARTS.values()]
)
def test_null_means_not_given_in_every_part_of_a_request_file(kind):
    fields = msgspec.structs.fields(kind)
    given = {"messages": [USER], "role": "user", "content": "w20", "type": "text"}
    needed = [one.name for one in fields if one.required or one.name == "content"]
    given = {name: given[name] for name in needed}
    nulls = {one.name: None for one in fields if one.name not in needed}
    found = request_file.convert({**given, **nulls}, kind, "$")
    assert found == request_file.convert(given, kind, "$")


def test_nulls_of_unknown_options_are_not_given_and_values_are_rejected(server):
    body = {"messages": [USER], "max_tokens": 2}
    assert server.json("/v1/chat/completions", {**body, "audio": None, "functions": None})[0] == 200
    status, found = server.json("/v1/chat/completions", {**body, "temprature": 1})
    assert (status, "did you mean temperature?" in found["error"]["message"]) == (400, True)
    status, found = server.json("/v1/chat/completions", {"messages": None})
    assert status == 400
    assert found["error"]["message"] == "messages: input should be a valid list"


HISTORY = {
    "/v1/chat/completions": (
        {
            "messages": [
                {"role": "user", "content": [
                    {"type": "text", "text": "w20", "cache_control": {"type": "ephemeral"}},
                ]},
                {"role": "assistant", "content": None, "annotations": [], "audio": None,
                 "function_call": None, "refusal": None, "parsed": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": None},
                {"role": "assistant", "content": None, "provider specific": {}},
                USER,
            ],
            "max_tokens": 2,
        },
        "messages.content.cache_control, messages.annotations, messages.tool_calls.index, "
        "messages.tool_calls.function.parsed_arguments, messages.?",
    ),
    "/v1/responses": (
        {
            "input": [
                {"role": "user", "content": "w20"},
                {"type": "message", "id": "m", "role": "assistant", "status": None, "phase": None,
                 "content": [{"type": "output_text", "text": "w21", "parsed": {"a": 1}}]},
                {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}",
                 "caller": {"type": "direct"}, "namespace": None},
                {"type": "function_call_output", "call_id": "1", "output": "w30"},
            ],
            "max_output_tokens": 2,
        },
        "input.content.parsed, input.caller",
    ),
    "/v1/messages": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "w20", "citations": None}]},
                {"role": "assistant", "content": [
                    {"type": "text", "text": "w20", "parsed_output": {"a": 1}},
                    {"type": "tool_use", "id": "1", "name": "weather", "input": {}, "extra": 1},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": None, "is_error": None},
                ]},
            ],
            "max_tokens": 2,
        },
        "messages.content.parsed_output, messages.content.extra",
    ),
    "/api/chat": (
        {
            "model": "tiny",
            "messages": [
                {"role": "user", "content": "w20", "images": None},
                {"role": "assistant", "content": None, "extra": 1, "tool_calls": [
                    {"function": {"name": "weather", "arguments": None}},
                ]},
                {"role": "tool", "content": "w30", "tool_name": "weather"},
            ],
            "stream": False,
            "options": {"num_predict": 2, "stop": None, "num_ctx": None},
        },
        "messages.extra",
    ),
}  # fmt: skip


@pytest.mark.parametrize("path", HISTORY)
def test_unknown_fields_of_earlier_messages_are_ignored_and_named(lettered_server, path):
    body, ignored = HISTORY[path]
    status, response, content = lettered_server.send(path, body)
    assert status == 200, content
    assert response.headers["x-edgellm-ignored"] == ignored


def test_names_of_ignored_fields_are_few_and_fit_a_header():
    many = {f"k{index}": 1 for index in range(100)} | {"a\r\nb": 1, "x" * 1000: 1}
    names = ignored_fields(ChatRequest.model_validate({"messages": [{**USER, **many}] * 3}))
    assert len(names) == 32
    assert all(name.isascii() and name.isprintable() and len(name) < 80 for name in names)


def test_only_parts_of_a_conversation_are_open():
    """What is asked of the model stays exact."""
    opened = {one.__qualname__ for one in BODIES if issubclass(one, Earlier)} - {"Earlier"}
    assert opened == {
        "AudioUrlPart", "Base64Source", "CalledFunction", "FunctionCall", "FunctionCallOutput",
        "ImageBlock", "ImagePart", "ImageUrl", "InputAudio", "InputAudioPart", "InputImage",
        "InputMessage", "InputText", "ItemReference", "Message", "OllamaCall", "OllamaMessage",
        "OllamaToolCall", "ReasoningText", "Reasoned", "RedactedThinkingBlock", "RefusalPart",
        "RefusalText", "TextBlock", "TextPart", "ThinkingBlock", "ToolCall", "ToolReference",
        "ToolResultBlock", "ToolUseBlock", "Turn", "UrlSource", "VideoPart", "VideoUrlPart",
    }  # fmt: skip


def test_openais_objects_are_sent_back_as_they_come(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    chat = {"model": "tiny", "max_tokens": 4, "temperature": 0}
    turns = [USER]
    found = client.chat.completions.create(messages=turns, **chat).choices[0].message
    for sent in (found, found.model_dump(), found.model_dump(exclude_none=True)):
        again = client.chat.completions.create(messages=[*turns, sent, USER], **chat)
        assert again.choices[0].message.content
    ended = {**chat, "stop": found.content[3:6]}  # the client rejects outputs that are cut
    with client.chat.completions.stream(messages=turns, **ended) as stream:
        streamed = stream.get_final_completion().choices[0].message
    assert found.content.startswith(streamed.content)
    again = client.chat.completions.create(messages=[*turns, streamed, USER], **chat)
    refused = {"role": "assistant", "content": None, "refusal": streamed.content}
    assert (
        client.chat.completions.create(messages=[*turns, refused, USER], **chat)
        .choices[0]
        .message.content
        == again.choices[0].message.content
    )
