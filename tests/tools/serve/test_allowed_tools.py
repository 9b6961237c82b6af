"""`allowed_tools`: a part of the tools, in OpenAI's two protocols; and threads of Anthropic."""

from __future__ import annotations

import pytest

from edgellm.tools.serve.http.errors import ApiError
from edgellm.tools.serve.protocols.openai.responses import ResponsesRequest
from edgellm.tools.serve.schemas.openai import ChatRequest

TURNS = [{"role": "user", "content": "Hi"}]
FLAT = [{"type": "function", "name": name, "strict": name == "b"} for name in "abc"]


def _made(mode, *names):
    tools = [{"type": "function", "name": name} for name in names]
    choice = {"type": "allowed_tools", "mode": mode, "tools": tools}
    flat = ResponsesRequest.model_validate({"input": "Hi", "tools": FLAT, "tool_choice": choice})
    functions = [
        {"type": "function", "function": {"name": one["name"], "strict": one["strict"]}}
        for one in FLAT
    ]
    nested = [{"type": "function", "function": {"name": name}} for name in names]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": nested}}
    body = {"messages": TURNS, "tools": functions, "tool_choice": choice}
    return flat.as_chat(), ChatRequest.model_validate(body)


def _names(functions):
    return [one.name for one in functions]


@pytest.mark.parametrize("names", ["a", "ab", "cab"])
def test_the_model_knows_the_allowed_tools_alone(names):
    for body in _made("required", *names):
        assert _names(tool.function for tool in body.usable_tools()) == sorted(names)
        assert _names(body.must_call()) == sorted(names)
        assert [*body.schemas()] == sorted(names)
        assert not body.has_strict_choice()
    for body in _made("auto", *names):
        assert body.must_call() == []
        assert [*body.schemas()] == sorted(names)
        assert body.has_strict_choice() == ("b" in names)


def test_an_allowed_tool_that_is_missing_is_rejected():
    for body in _made("auto", "a", "d"):
        with pytest.raises(ApiError, match="there is no tool 'd' among the tools"):
            body.usable_tools()


def test_fields_of_todays_clients(server):
    body = {"input": "w20", "max_output_tokens": 2, "truncation": "auto", "max_tool_calls": 3}
    body |= {"top_logprobs": 0, "prompt_cache_options": {"mode": "implicit"}}
    for name in ("truncation", "store"):
        server.expects(f"WARNING: requests have {name}, which is ignored; logged once")
    status, response, content = server.send("/v1/responses", body)
    assert (status, response.headers["x-edgellm-ignored"]) == (200, "truncation"), content
    body = {"messages": TURNS, "max_tokens": 2, "store": True, "modalities": ["text"]}
    status, response, content = server.send("/v1/chat/completions", body)
    assert (status, response.headers["x-edgellm-ignored"]) == (200, "store"), content
    body["modalities"] = ["text", "audio"]
    assert server.json("/v1/chat/completions", body)[0] == 400


def test_a_thread_is_rejected_as_anthropics_client_understands(server):
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "x"}):
        body = {"messages": TURNS, "max_tokens": 2, "thread": thread}
        status, found = server.json("/v1/messages", body)
        assert status == 400
        assert found["error"]["details"]["error_code"] == "thread_unsupported_request"
        assert "send all messages" in found["error"]["message"]
