"""A last message of the assistant is continued by every interface: the engine's own raw text."""

from __future__ import annotations

from types import SimpleNamespace

import anthropic
import ollama
import openai
import pytest
from tokenizers import Tokenizer

from edgellm.device_runtime import SamplingParams
from edgellm.device_runtime.engine.profile import Profile
from edgellm.device_runtime.request_files.request_file import Options
from edgellm.device_runtime.request_files.responses import run_request

GREEDY = SamplingParams(temperature=0)
TURNS = [{"role": "user", "content": "w20 w30"}, {"role": "assistant", "content": "w21 w22"}]
BEGUN = "user : w20 w30 . assistant : w21 w22"
CLOSED = f"{BEGUN} . assistant : "
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.fixture(scope="module")
def expected(offline):
    """The texts and lengths of prompts after the begun message, and after a new turn.

    These words are written with a space before each but the first of a text.
    """

    def after(prompt: str):
        found = offline.generate(prompt, sampling=GREEDY, max_generate_length=6)
        list(found)
        return found

    continued, answered = after(BEGUN), after(CLOSED)
    assert continued.text.strip() != answered.text.strip()
    return (
        SimpleNamespace(
            text=" " + continued.text.strip(), prompt_token_count=continued.prompt_token_count
        ),
        SimpleNamespace(text=answered.text.strip()),
    )


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def _chat(client, turns=TURNS, **more):
    asked = {"model": "tiny", "messages": turns, "temperature": 0, "max_tokens": 6}
    return client.chat.completions.create(**asked, extra_body=more)


def test_openais_client_continues_a_last_assistant_message(client, expected):
    continued, answered = expected
    found = _chat(client)
    assert found.choices[0].message.content == continued.text
    assert found.usage.prompt_tokens == continued.prompt_token_count
    chunks = client.chat.completions.create(
        model="tiny", messages=TURNS, temperature=0, max_tokens=6, stream=True
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == continued.text
    both = {"continue_final_message": True, "add_generation_prompt": False}
    assert _chat(client, **both).choices[0].message.content == continued.text
    for more in ({"continue_final_message": False}, {"add_generation_prompt": True}):
        assert _chat(client, **more).choices[0].message.content == answered.text
    with pytest.raises(openai.BadRequestError, match="contradict each other"):
        _chat(client, continue_final_message=True, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("turn", "fault"),
    [
        ({"content": "w21", "tool_calls": [CALL]}, "it calls tools"),
        ({"content": " \n "}, "it holds white space alone"),
        ({"content": [{"type": "text", "text": " "}]}, "it holds white space alone"),
    ],
)
def test_what_cannot_be_continued_is_one_clear_error(client, turn, fault):
    with pytest.raises(openai.BadRequestError, match=fault) as caught:
        _chat(client, [TURNS[0], {"role": "assistant", **turn}])
    assert "\n" not in caught.value.body["message"]


def test_anthropics_client_continues_a_last_assistant_message(server, expected):
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    blocks = [{"type": "text", "text": "w21 "}, {"type": "text", "text": "w22"}]
    for turns in (TURNS, [TURNS[0], {"role": "assistant", "content": blocks}]):
        asked = {"model": "tiny", "messages": turns}
        found = client.messages.create(**asked, max_tokens=6, extra_body={"temperature": 0})
        assert [block.text for block in found.content] == [expected[0].text]
        count = client.messages.count_tokens(**asked).input_tokens
        assert count == expected[0].prompt_token_count
    used = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    turns = [TURNS[0], {"role": "assistant", "content": [used]}]
    with pytest.raises(anthropic.BadRequestError, match="it calls tools"):
        client.messages.create(model="tiny", messages=turns, max_tokens=6)


def test_ollamas_client_continues_a_last_assistant_message(server, expected):
    options = {"temperature": 0, "num_predict": 6}
    found = ollama.Client(server.url).chat(model="tiny", messages=TURNS, options=options)
    assert found.message.content == expected[0].text


def test_the_responses_api_continues_a_last_assistant_message(client, expected):
    text = {"type": "output_text", "text": "w21 w22"}
    for content in ("w21 w22", [text]):
        turns = [TURNS[0], {"role": "assistant", "content": content}]
        asked = {"model": "tiny", "input": turns, "temperature": 0}
        found = client.responses.create(**asked, max_output_tokens=16)
        assert found.output_text.startswith(expected[0].text)


def test_tokens_are_those_of_the_chat(server, offline):
    tokenizer = Tokenizer.from_str(offline.tokenizer._tokenizer.to_str())
    for more, text in (
        ({}, BEGUN),
        ({"continue_final_message": True, "add_generation_prompt": False}, BEGUN),
        ({"continue_final_message": False}, CLOSED),
        ({"add_generation_prompt": True}, CLOSED),
        ({"add_generation_prompt": False}, f"{BEGUN} . "),
    ):
        found = server.json("/tokenize", {"messages": TURNS, **more})[1]
        assert found["tokens"] == tokenizer.encode(text, add_special_tokens=False).ids


def test_request_files_and_python_continue_alike(offline, expected):
    for more, text, answer in (
        ({}, BEGUN, expected[0]),
        ({"continue_final_message": True}, BEGUN, expected[0]),
        ({"continue_final_message": False}, CLOSED, expected[1]),
        ({"add_generation_prompt": True}, CLOSED, expected[1]),
    ):
        found = offline.generate(TURNS, sampling=GREEDY, max_generate_length=6, **more)
        list(found)
        assert found.text == answer.text
        for options, request in ((Options(**more), {}), (Options(), more)):
            raw = {"messages": TURNS, "temperature": 0, "max_generate_length": 6, **request}
            response = run_request(offline, options, raw, 0, Profile(), lambda *_: None)
            assert response["output_text"] == answer.text
            assert response["formatted_complete_request"] == text
            assert response["finish_reason"] == "length"


def test_unread_chat_template_kwargs_are_rejected_with_a_hint(server):
    asked = {"messages": TURNS[:1], "max_tokens": 1}
    for name, hint in (
        ("temperature", "give temperature as a field of the request"),
        ("max_tokns", "did you mean max_tokens as a field of the request?"),
        ("messages", "give messages as a field of the request"),
        ("add_generation_prompt", "give add_generation_prompt as a field of the request"),
        ("zzz", "it reads add_generation_prompt"),
    ):
        for path in ("/v1/chat/completions", "/tokenize"):
            body = {**asked, "chat_template_kwargs": {name: 1}}
            if path == "/tokenize":
                body.pop("max_tokens")
            status, found = server.json(path, body)
            message = found["error"]["message"]
            assert status == 400
            assert message.startswith(f"chat_template_kwargs.{name} is no variable of the model's")
            assert path == "/tokenize" or f"({hint})" in message
    body = {**asked, "chat_template_kwargs": {"enable_thinking": "no"}}
    assert (
        "is not True or False" in server.json("/v1/chat/completions", body)[1]["error"]["message"]
    )
    for name in ("enable_thinking", "thinking"):
        server.expects(f"WARNING: requests have {name}, which is ignored; logged once")
    for thinks, ignored in ((True, "enable_thinking, thinking"), (False, None), (None, None)):
        flags = {"enable_thinking": thinks, "thinking": thinks}
        body = {**asked, "chat_template_kwargs": flags}
        status, response, _ = server.send("/v1/chat/completions", body)
        assert status == 200
        assert response.getheader("x-edgellm-ignored") == ignored
