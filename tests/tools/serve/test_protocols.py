"""The clients of Anthropic, of OpenAI's Responses and of Ollama get the answers of the engine."""

from __future__ import annotations

import dataclasses
import json
import urllib.request
from itertools import chain, pairwise

import anthropic
import ollama
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.device_runtime import SamplingParams
from edgellm.device_runtime.api.llm import Step
from edgellm.tools.serve.engines.events import Finished, Started
from edgellm.tools.serve.output.chat_output import ChatOutput
from edgellm.tools.serve.protocols.anthropic.messages import MessagesRequest
from edgellm.tools.serve.protocols.anthropic.writer import MessagesWriter
from edgellm.tools.serve.protocols.ollama import OllamaChat, OllamaWriter
from edgellm.tools.serve.protocols.openai.responses import ResponsesRequest
from edgellm.tools.serve.protocols.openai.responses_writer import ResponsesWriter
from edgellm.tools.serve.schemas.openai import ChatRequest

TURNS = [{"role": "user", "content": "w20 w30"}]
MESSAGES = [{"role": "system", "content": "w11 w12"}, *TURNS]
GREEDY = {"extra_body": {"temperature": 0}}  # the client knows no temperature any more
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bonn"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def expected(offline):
    found = offline.generate(
        MESSAGES, sampling=SamplingParams(temperature=0), max_generate_length=24
    )
    list(found)
    return found


def _claude(server):
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def test_anthropics_client_chats_streams_and_counts(server, expected):
    client = _claude(server)
    asked = {"model": "tiny", "system": "w11 w12", "messages": TURNS, **GREEDY}
    found = client.messages.create(**asked, max_tokens=24)
    assert [block.text for block in found.content] == [expected.text]
    assert (found.stop_reason, found.usage.output_tokens) == ("max_tokens", 24)
    read = found.usage.input_tokens + found.usage.cache_read_input_tokens
    assert read == expected.prompt_token_count
    assert (
        client.messages.count_tokens(model="tiny", system="w11 w12", messages=TURNS).input_tokens
        == read
    )
    with client.messages.stream(**asked, max_tokens=24) as stream:
        assert "".join(stream.text_stream) == expected.text
        assert stream.get_final_message().usage.output_tokens == 24
    stop = expected.text.split()[5]
    found = client.messages.create(**asked, max_tokens=24, stop_sequences=["never", stop])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
    assert expected.text.startswith(found.content[0].text)
    with pytest.raises(anthropic.NotFoundError, match="there is no model 'claude'"):
        client.messages.create(**asked | {"model": "claude"}, max_tokens=1)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens: input should be greater"):
        client.messages.create(model="tiny", messages=TURNS, max_tokens=0)


def test_anthropics_client_gets_a_call_that_must_be_made(lettered_server):
    tool = {"name": "weather", "input_schema": SCHEMA}
    asked = {"model": "tiny", "max_tokens": 80, "messages": TURNS, "tools": [tool]}
    found = _claude(lettered_server).messages.create(
        **asked, tool_choice={"type": "tool", "name": "weather"}
    )
    (block,) = found.content
    assert (found.stop_reason, block.type, block.input) == (
        "tool_use",
        "tool_use",
        {"city": "Bonn"},
    )
    answer = [{"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}]
    turns = [*TURNS, {"role": "assistant", "content": [block.model_dump()]}]
    turns.append({"role": "user", "content": answer})
    assert _claude(lettered_server).messages.create(**asked | {"messages": turns}).content


def test_a_fault_inside_of_a_part_is_named(server):
    content = [{"type": "text", "text": 5}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    for path in ("/v1/messages", "/v1/chat/completions"):
        status, found = server.json(path, body)
        assert status == 400
        message = "messages.0.content.0.text: input should be a valid string"
        assert found["error"]["message"] == message


def test_responses_whole_and_streamed(server, expected):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    asked = {"model": "tiny", "instructions": "w11 w12", "input": "w20 w30", "temperature": 0}
    found = client.responses.create(**asked, max_output_tokens=24)
    assert found.output_text == expected.text
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert found.usage.input_tokens == expected.prompt_token_count
    events = list(client.responses.create(**asked, max_output_tokens=24, stream=True))
    assert (
        "".join(e.delta for e in events if e.type == "response.output_text.delta")
        == found.output_text
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output_text == found.output_text
    turns = [{"role": "user", "content": "w20"}, *found.output, {"role": "user", "content": "w30"}]
    again = client.responses.create(model="tiny", input=turns, max_output_tokens=3)
    assert again.output_text
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(**asked, previous_response_id="resp_1")


def test_responses_with_a_call_and_a_form(lettered_server):
    client = openai.OpenAI(base_url=f"{lettered_server.url}/v1", api_key="none", max_retries=0)
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
    turns = [{"role": "user", "content": "Bonn?"}]
    found = client.responses.create(
        model="tiny",
        input=turns,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=80,
    )
    (call,) = found.output
    assert (call.type, json.loads(call.arguments)) == ("function_call", {"city": "Bonn"})
    turns += [*found.output]
    turns.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    form = {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA}}
    found = client.responses.create(model="tiny", input=turns, text=form, max_output_tokens=80)
    assert json.loads(found.output_text) == {"city": "Bonn"}


def test_ollamas_client_chats_and_generates(server, lettered_server, expected):
    client = ollama.Client(server.url)
    options = {"temperature": 0, "num_predict": 24}
    asked = {"model": "tiny:latest", "messages": MESSAGES, "options": options}
    found = client.chat(**asked)
    assert found.message.content == expected.text
    assert (found.done_reason, found.eval_count) == ("length", 24)
    assert found.prompt_eval_count == expected.prompt_token_count
    pieces = list(client.chat(**asked, stream=True))
    assert "".join(piece.message.content for piece in pieces) == expected.text
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    found = client.generate("tiny", "w20 w30", system="w11 w12", options=options)
    assert found.response == expected.text
    raw = list(client.generate("tiny", "w20 w30 w40", raw=True, options=options, stream=True))
    assert "".join(piece.response for piece in raw)
    assert client.list().models[0].model == "tiny:latest"
    assert client.show("tiny").modelinfo["general.architecture"] == "llama"
    with pytest.raises(ollama.ResponseError, match="there is no model 'other'"):
        client.chat("other", TURNS)
    formed = ollama.Client(lettered_server.url).chat(
        "tiny", TURNS, format=SCHEMA, options={"num_predict": 80}
    )
    assert json.loads(formed.message.content) == {"city": "Bonn"}


def test_ollamas_lines_come_without_a_type(server):
    body = json.dumps({"model": "tiny", "prompt": "w20", "options": {"num_predict": 3}}).encode()
    with urllib.request.urlopen(f"{server.url}/api/generate", body) as reply:  # as curl sends it
        lines = [json.loads(line) for line in reply.read().splitlines()]
        assert reply.headers["content-type"] == "application/x-ndjson"
    assert lines[-1]["done_reason"] == "length"


class _Scripted(ChatOutput):
    """Reads an answer of Qwen's form."""

    def __init__(self, llm):
        tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
        body = ChatRequest.model_validate({"messages": TURNS, "tools": [tool]})
        super().__init__(body, llm, prompt_end="")


class _Llm:
    """As much of one as an answer's reader asks for."""

    chat_template = '<think></think>{% if tools %}<tool_call>"arguments"'

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    @property
    def tokenizer(self):
        return self

    def encode(self, text, *, add_special_tokens):
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)


CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'
TEXT = f"<think>Hm.</think>I look.\n{CALL}\n{CALL}"
FIGURES = Finished(
    finish_reason="stop",
    prompt_tokens=5,
    cached_tokens=2,
    completion_tokens=9,
    rounds=(),
    queue_ms=1.0,
    first_token_ms=2.0,
    generation_ms=3.0,
)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, len(TEXT)), max_size=6))
def test_a_stream_adds_up_to_the_whole(offline, cuts):
    llm = _Llm(offline.tokenizer)
    bounds = [0, *sorted(cuts), len(TEXT)]
    steps = [Step((9,), TEXT[a:b]) for a, b in pairwise(bounds)]

    def both(made):
        writer, other = made(), made()
        for step in steps:
            other.step(step)
        events = writer.begin(Started(5))
        for step in steps:
            events += writer.step(step)
        return [*events, *writer.end(FIGURES)], other.whole(FIGURES)

    events, whole = both(lambda: MessagesWriter(_Scripted(llm), "m"))
    blocks = _added_up(events)
    assert blocks == [{**b, "id": None} if "id" in b else b for b in whole["content"]]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole["stop_reason"] == events[-2]["delta"]["stop_reason"] == "tool_use"

    body = ResponsesRequest.model_validate({"input": "w20"})
    events, whole = both(
        lambda: ResponsesWriter(
            body=body, answer=_Scripted(llm), llm=llm, model="m", sampling=SamplingParams()
        )
    )
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert _unnamed(done) == _unnamed(whole["output"])
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item["type"] for item in done if item.get("content") != "\n"][:2] == kinds[:2]
    assert [item["type"] for item in done].count("function_call") == 2

    lines, whole = both(lambda: OllamaWriter(answer=_Scripted(llm), model="m", chats=True))
    said = [line["message"] for line in lines]
    for name in ("content", "thinking"):
        assert "".join(one.get(name, "") for one in said) == whole["message"][name]
    calls = chain.from_iterable(one.get("tool_calls", ()) for one in said)
    assert list(calls) == whole["message"]["tool_calls"]


def test_an_answer_that_is_cut_says_so_though_it_holds_a_call(offline):
    llm, cut = _Llm(offline.tokenizer), dataclasses.replace(FIGURES, finish_reason="length")

    def whole(writer):
        writer.step(Step((9,), f"{CALL}\n<tool_call>"))
        return writer.whole(cut)

    assert whole(MessagesWriter(_Scripted(llm), "m"))["stop_reason"] == "max_tokens"
    found = whole(OllamaWriter(answer=_Scripted(llm), model="m", chats=True))
    assert found["done_reason"] == "length"
    body = ResponsesRequest.model_validate({"input": "w20"})
    found = whole(
        ResponsesWriter(
            body=body, answer=_Scripted(llm), llm=llm, model="m", sampling=SamplingParams()
        )
    )
    assert (found["status"], found["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )


FORM = {
    "type": "object",
    "properties": {"city": {"type": "string", "minLength": 50}},
    "required": ["city"],
}


@pytest.mark.parametrize(
    ("path", "fields", "reason"),
    [
        ("/v1/chat/completions", {"guided_json": FORM}, ("choices", 0, "finish_reason")),
        ("/v1/completions", {"guided_json": FORM, "prompt": "Hi"}, ("choices", 0, "finish_reason")),
        (
            "/v1/responses",
            {
                "text": {"format": {"type": "json_schema", "name": "a", "schema": FORM}},
                "input": "Hi",
            },
            ("incomplete_details", "reason"),
        ),
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": FORM}}},
            ("stop_reason",),
        ),
        ("/api/chat", {"format": FORM, "stream": False}, ("done_reason",)),
        ("/api/generate", {"format": FORM, "stream": False, "prompt": "Hi"}, ("done_reason",)),
    ],
)
def test_a_form_that_is_cut_says_so(lettered_server, path, fields, reason):
    asked = {"model": "tiny", **fields}
    if path.startswith("/api"):
        asked["options"] = {"num_predict": 16}
    else:
        asked["max_output_tokens" if path == "/v1/responses" else "max_tokens"] = 16
    if "prompt" not in asked and "input" not in asked:
        asked["messages"] = TURNS
    status, found = lettered_server.json(path, asked)
    assert status == 200, found
    for part in reason:
        found = found[part]
    assert found in ("length", "max_tokens", "max_output_tokens")


def _added_up(events):
    """The blocks that a client of Anthropic's makes of a stream."""
    blocks = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"]})
            if "id" in blocks[-1]:
                blocks[-1]["id"] = None
        elif event["type"] == "content_block_delta":
            delta = dict(event["delta"])
            if delta.pop("type") == "input_json_delta":
                blocks[-1]["input"] = json.loads(delta["partial_json"])
            else:
                for name, text in delta.items():
                    blocks[-1][name] += text
    return blocks


def _unnamed(items):
    return [{**item, "id": None, "call_id": None} for item in items]


def test_turns_of_other_interfaces_are_those_of_openai():
    used = {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Bonn"}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "a"}]}
    call = {"id": "1", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    wanted = [
        ("user", "Bonn?", None),
        ("assistant", "I look.", "weather"),
        ("tool", "a", None),
        ("user", "And now?", None),
    ]
    text = {"type": "text", "text": "And now?"}
    claude = MessagesRequest.model_validate(
        {
            "max_tokens": 1,
            "messages": [
                {"role": "user", "content": "Bonn?"},
                {"role": "assistant", "content": [{**text, "text": "I look."}, used]},
                {"role": "user", "content": [text, result]},
            ],
        }
    )
    items = [
        {"role": "user", "content": "Bonn?"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "1", **call["function"]},
        {"type": "function_call_output", "call_id": "1", "output": "a"},
        {"role": "user", "content": [{"type": "input_text", "text": "And now?"}]},
    ]
    responses = ResponsesRequest.model_validate({"input": items})
    function = {"name": "weather", "arguments": {"city": "Bonn"}}
    llama = OllamaChat.model_validate(
        {
            "model": "m",
            "messages": [
                {"role": "user", "content": "Bonn?"},
                {"role": "assistant", "content": "I look.", "tool_calls": [{"function": function}]},
                {"role": "tool", "content": "a", "tool_name": "weather"},
                {"role": "user", "content": "And now?"},
            ],
        }
    )
    for body in (claude, responses, llama):
        found = [
            (m.role, _said(m.content), m.tool_calls[0].function.name if m.tool_calls else None)
            for m in body.as_chat().messages
        ]
        assert found == wanted


def _said(content):
    return content if isinstance(content, str) else "".join(part.text for part in content)
