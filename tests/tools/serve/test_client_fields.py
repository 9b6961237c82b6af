"""What today's clients of Anthropic and Ollama send, and images in results of tools."""

from __future__ import annotations

from datetime import datetime, timezone

import ollama
import pytest
from pydantic import ValidationError

from edgellm.tools.serve.protocols.anthropic.messages import MessagesRequest
from edgellm.tools.serve.protocols.ollama import OllamaChat
from edgellm.tools.serve.protocols.openai.responses import ResponsesRequest

USER = {"role": "user", "content": "w20 w30"}
PNG = "iVBORw0KGgo="
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
URL = f"data:image/png;base64,{PNG}"


def test_anthropics_fields_without_effect_are_named(server, lettered_server):
    tool = {
        "name": "weather", "input_schema": {"type": "object"}, "type": "custom",
        "defer_loading": True, "input_examples": [{"city": "Bonn"}], "cache_control": None,
        "eager_input_streaming": True, "allowed_callers": ["direct"],
    }  # fmt: skip
    body = {
        "model": "tiny", "max_tokens": 3, "temperature": 1, "stream": False,
        "system": [{"type": "text", "text": "w11", "cache_control": {"type": "ephemeral"}}],
        "metadata": {"user_id": "u"}, "thinking": {"type": "adaptive"}, "mcp_servers": [],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "container": None, "output_config": {"effort": "high"}, "tools": [tool],
        "tool_choice": {"type": "auto"}, "messages": [
            USER,
            {"role": "assistant", "content": [
                {"type": "redacted_thinking", "data": "x"},
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "w21", "citations": None},
            ]},
            USER,
        ],
    }  # fmt: skip
    names = "context_management", "tools.defer_loading", "tools.input_examples"
    for name in (*names, "tools.allowed_callers", "reasoning_effort"):
        lettered_server.expects(f"WARNING: requests have {name}, which is ignored; logged once")
    status, response, content = lettered_server.send("/v1/messages", body)
    assert status == 200, content
    ignored = response.headers["x-edgellm-ignored"].split(", ")
    assert set(names) <= set(ignored)
    assert lettered_server.json("/v1/messages/count_tokens", {
        name: value for name, value in body.items()
        if name not in ("max_tokens", "temperature", "stream", "metadata")
    })[0] == 200  # fmt: skip
    served = {"type": "url", "url": "https://example.com", "name": "x"}
    assert server.json("/v1/messages", {**body, "mcp_servers": [served]})[0] == 400


def _parts(messages):
    """Roles and contents of messages, of parts their types."""

    def shown(content):
        return [part.type for part in content] if isinstance(content, list) else content

    return [(one.role, shown(one.content)) for one in messages]


def test_images_of_results_are_in_the_users_message_after_them():
    text = {"type": "text", "text": "a"}
    used = [{"type": "tool_use", "id": each, "name": "look", "input": {}} for each in "12"]
    results = [
        {"type": "tool_result", "tool_use_id": "1", "content": [text, IMAGE]},
        {"type": "tool_result", "tool_use_id": "2", "content": [IMAGE]},
    ]
    turns = [USER, {"role": "assistant", "content": used}, {"role": "user", "content": results}]
    found = MessagesRequest.model_validate({"messages": turns, "max_tokens": 1}).as_chat()
    after = [("tool", "a"), ("tool", ""), ("user", ["image_url", "image_url"])]
    assert _parts(found.messages)[-3:] == after
    assert found.messages[-1].content[0].image_url.url == URL

    image = {"type": "input_image", "image_url": URL, "detail": "original"}
    items = [
        USER,
        *({"type": "function_call", "call_id": each, "name": "look", "arguments": "{}"}
          for each in "12"),
        {"type": "function_call_output", "call_id": "1",
         "output": [{"type": "input_text", "text": "a"}, image]},
        {"type": "function_call_output", "call_id": "2", "output": [image]},
    ]  # fmt: skip
    found = ResponsesRequest.model_validate({"input": items}).as_chat()
    assert _parts(found.messages)[-3:] == after
    found = ResponsesRequest.model_validate({"input": [*items, USER]}).as_chat()
    assert _parts(found.messages)[-1] == ("user", ["image_url", "image_url", "text"])
    said = {"role": "assistant", "content": "I see."}
    found = ResponsesRequest.model_validate({"input": [*items, said]}).as_chat()
    assert _parts(found.messages)[-2:] == [("user", ["image_url", "image_url"]),
                                           ("assistant", "I see.")]  # fmt: skip


def test_ollamas_client_loads_unloads_and_describes(lettered_server):
    for name in ("num_ctx", "low_vram", "use_mlock", "numa", "repeat_last_n"):
        lettered_server.expects(f"WARNING: requests have {name}, which is ignored; logged once")
    client = ollama.Client(lettered_server.url)
    assert client.generate("tiny").done_reason == "load"
    assert client.generate("tiny", "", keep_alive=0).done_reason == "unload"
    assert client.chat("tiny", [], keep_alive="5m").done_reason == "load"
    (only,) = client.chat("tiny", keep_alive="0s", stream=True)
    assert (only.done, only.done_reason, only.message.content) == (True, "unload", "")
    with pytest.raises(ollama.ResponseError, match="there is no model 'other'"):
        client.generate("other")
    options = {"num_predict": 3, "num_ctx": 4096, "low_vram": True, "use_mlock": True,
               "numa": False, "repeat_last_n": 64, "mirostat": 0, "tfs_z": 1.0}  # fmt: skip
    assert 0 < client.generate("tiny", "Hi", options=options).eval_count <= 3
    with pytest.raises(ollama.ResponseError, match=r"options\.mirostat"):
        client.generate("tiny", "Hi", options={"mirostat": 2})
    shown = client.show("tiny:latest")
    assert shown.capabilities == ["completion", "tools"]
    assert (shown.details.family, shown.details.parameter_size) == ("llama", "391.8K")
    assert shown.details.quantization_level == "F32"
    assert shown.modelinfo["llama.context_length"] == 4096
    (listed,) = client.list().models
    assert len(listed.digest) == 64
    assert listed.details == shown.details
    (running,) = client.ps().models
    assert running.digest == listed.digest
    version = lettered_server.json("/api/version")[1]["version"]
    assert [*map(int, version.split("."))] >= [0, 6, 4]


def test_ollamas_client_frees_the_engine_and_the_next_request_loads_it(server):
    client, loaded = ollama.Client(server.url), lambda: server.metric("edgellm:engine_loaded")
    options = {"num_predict": 4, "temperature": 0}
    before = client.generate("tiny", "w20 w30", options=options).response
    loads = server.metric("edgellm:engine_loads_total")
    assert loaded() == 1
    assert client.generate("tiny", keep_alive=0).done_reason == "unload"
    assert (loaded(), client.ps().models) == (0, [])
    assert server.json("/health") == (200, {"status": "ok"})
    assert client.chat("tiny", keep_alive=0).done_reason == "unload"  # it is not loaded for that
    assert server.metric("edgellm:engine_loads_total") == loads
    assert client.generate("tiny", "w20 w30", options=options).response == before
    assert server.metric("edgellm:engine_loads_total") == loads + 1
    client.generate("tiny", "w20 w30", options=options, keep_alive="300ms")
    server.wait_until("edgellm:engine_loaded", 0)
    client.chat("tiny", [USER], options=options, keep_alive=0)
    server.wait_until("edgellm:engine_loaded", 0)
    client.generate("tiny", keep_alive="1h30m")
    (model,) = client.ps().models
    minutes = (model.expires_at - datetime.now(timezone.utc)).total_seconds() / 60
    assert 89 < minutes < 91
    client.generate("tiny", keep_alive=-1)
    assert client.ps().models[0].expires_at.year > 2100


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (0, 0), ("0", 0), ("0s", 0), (300, 300), ("300", 300), ("5m", 300), ("1h30m", 5400),
        ("1.5h", 5400), (".5s", 0.5), ("250ms", 0.25), ("+2s", 2), (-1, None), ("-1", None),
        ("-5m", None), (None, None), (1e300, None),
    ],
)  # fmt: skip
def test_durations_are_those_of_go(given, seconds):
    body = OllamaChat.model_validate({"model": "tiny", "keep_alive": given})
    assert body.keep_s == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize("given", ["5 minutes", "", "m", "5d", "1h-2m", "\u0665m", True, [5]])
def test_other_durations_are_rejected(given):
    with pytest.raises(ValidationError):
        OllamaChat.model_validate({"model": "tiny", "keep_alive": given})


def test_ollamas_client_gets_log_probabilities(server):
    """Those of OpenAI's protocol, of the same output."""
    client, options = ollama.Client(server.url), {"num_predict": 4, "temperature": 0}
    asked = {"logprobs": True, "top_logprobs": 2, "options": options}
    chat = {"messages": [USER], "max_tokens": 4, "temperature": 0}
    body = {**chat, "logprobs": True, "top_logprobs": 2}
    expected = server.json("/v1/chat/completions", body)[1]["choices"][0]["logprobs"]["content"]
    pairs = [(one["token"], pytest.approx(one["logprob"])) for one in expected]
    assert len(pairs) == 4
    whole = client.chat("tiny", [USER], **asked).logprobs
    parts = client.chat("tiny", [USER], stream=True, **asked)
    streamed = [one for part in parts for one in part.logprobs or ()]
    for found in (whole, streamed, client.generate("tiny", USER["content"], **asked).logprobs):
        assert [(one.token, one.logprob) for one in found] == pairs
        assert [len(one.top_logprobs) for one in found] == [2] * 4
    raw = client.generate("tiny", "w20", raw=True, logprobs=True, options=options)
    assert [len(one.top_logprobs) for one in raw.logprobs] == [0] * 4
    assert client.chat("tiny", [USER], options=options).logprobs is None
