"""Errors of bodies name the field and the alternative that was meant."""

from __future__ import annotations

import gzip
import json

import pytest

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "w20"}
CASES = [
    (CHAT, {"messages": [USER], "stop": ["a"] * 17},
     "stop: list should have at most 16 items after validation, not 17"),
    (CHAT, {"messages": [USER], "stop": 5}, "stop: input should be a valid string or list"),
    (CHAT, {"messages": [USER], "stop": ["a", 5]}, "stop.1: input should be a valid string"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
     "messages.0.content.0.text: input should be a valid string"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
     "messages.0.content.0.image_url.url: field required"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]},
     "messages.0.content: input should be a valid string or list"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "txt", "text": "a"}]}]},
     "messages.0.content.0.type: input should be 'text', 'refusal', 'image_url', 'video_url', "
     "'video', 'input_audio', 'audio_url' (did you mean text?)"),
    (RESPONSES, {"input": [{"type": "mesage", "role": "user", "content": "a"}]},
     "input.0.type: input should be 'function_call', 'function_call_output', 'reasoning', "
     "'item_reference', 'message' (did you mean message?)"),
    (RESPONSES, {"input": [{"role": "user", "content": 5}]},
     "input.0.content: input should be a valid string or list"),
    (RESPONSES, {"input": [{"role": "usr", "content": "a"}]},
     "input.0.role: input should be 'system', 'developer', 'user' or 'assistant' "
     "(did you mean user?)"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "msg_1"}]},
     "input: an item_reference names an item that this server does not keep: send the item"),
    (RESPONSES, {"input": 5}, "input: input should be a valid string or list"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_result",
     "content": [{"type": "text", "text": "a"}]}]}], "max_tokens": 1},
     "messages.0.content.0.tool_use_id: field required"),
    (MESSAGES, {"messages": [USER], "max_tokens": 1, "system": [{"type": "text"}]},
     "system.0.text: field required"),
    (CHAT, {"messages": [USER], "tools": [{"type": "function", "function": {"name": "a b"}}]},
     "tools.0.function.name: string should match pattern"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "message"), CASES, ids=str)
def test_the_place_has_no_names_of_alternatives(server, path, body, message):
    status, found = server.json(path, body)
    assert status == 400
    assert found["error"]["message"].startswith(message)


def test_bodies_that_are_no_text(server):
    body = json.dumps({"messages": [USER]}).encode()
    status, found = server.json(CHAT, gzip.compress(body))
    assert (status, "compressed with gzip" in found["error"]["message"]) == (400, True)
    status, found = server.json(CHAT, body.replace(b"w20", b"caf\xe9"))
    message = "the body is not UTF-8: byte 46 is 0xe9"
    assert (status, found["error"]["message"]) == (400, message)
    assert body.replace(b"w20", b"caf\xe9")[46] == 0xE9
    status, found = server.json(CHAT, b"\xef\xbb\xbf" + body.replace(b"}]}", b'}],"max_tokens":2}'))
    assert status == 200, found


def test_a_regex_says_what_is_wrong_with_it(lettered_server):
    form = {"type": "regex", "regex": "(a"}
    status, found = lettered_server.json(CHAT, {"messages": [USER], "response_format": form})
    assert (status, "unclosed group" in found["error"]["message"]) == (400, True)
