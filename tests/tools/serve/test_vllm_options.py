"""What clients of vLLM send: lists of prompts, token ids, endings, forms, harmless fields."""

from __future__ import annotations

import importlib.metadata
import json
import re

import openai
import pytest
from serve_process import serving

from edgellm.device_runtime import SamplingParams

PROMPTS = ["w20 w30 w40", "w50 w60", "w70"]
GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def texts(offline):
    found = []
    for prompt in PROMPTS:
        sampling = SamplingParams(temperature=0)
        answer = offline.generate(prompt, sampling=sampling, max_generate_length=8)
        list(answer)
        found.append(answer)
    return found


def test_a_list_of_prompts_has_a_choice_for_each(client, texts):
    ids = [answer.prompt.token_ids for answer in texts]
    for prompts in (PROMPTS, ids):
        found = client.completions.create(**GREEDY, prompt=prompts, logprobs=1)
        assert [choice.text for choice in found.choices] == [answer.text for answer in texts]
        assert [choice.index for choice in found.choices] == [0, 1, 2]
        assert not any("token_ids" in choice.model_extra for choice in found.choices)
        assert all(len(choice.logprobs.tokens) == 8 for choice in found.choices)
        assert found.usage.completion_tokens == 24
        assert found.usage.prompt_tokens == sum(map(len, ids))
    found = client.completions.create(
        **GREEDY, prompt=PROMPTS, extra_body={"return_token_ids": True}
    )
    assert [choice.model_extra["token_ids"] for choice in found.choices] == [
        list(answer.token_ids) for answer in texts
    ]
    assert client.completions.create(**GREEDY, prompt=ids[0]).choices[0].text == texts[0].text


def test_a_stream_of_several_prompts(client, texts):
    stream = client.completions.create(
        **GREEDY, prompt=PROMPTS, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    parts = ["", "", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            parts[choice.index] += choice.text
    assert parts == [answer.text for answer in texts]
    reasons = [c.index for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert reasons == [0, 1, 2]
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [24]


def test_an_invalid_prompt_of_a_list_fails_before_generation(client):
    for prompts in ([*PROMPTS, "w20 " * 2000], [[5], [96]]):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match=r"tokens, the engine|no token 96"):
                client.completions.create(**GREEDY, prompt=prompts, stream=stream)


@pytest.mark.parametrize("stream", [False, True])
def test_the_prompt_is_repeated_when_asked(client, texts, stream):
    expected = [prompt + answer.text for prompt, answer in zip(PROMPTS, texts, strict=True)]
    for prompts in (PROMPTS, [answer.prompt.token_ids for answer in texts]):
        found = client.completions.create(**GREEDY, prompt=prompts, echo=True, stream=stream)
        parts = ["", "", ""]
        for chunk in found if stream else [found]:
            for choice in chunk.choices:
                parts[choice.index] += choice.text
        assert parts == expected


@pytest.mark.parametrize(
    ("changed", "fragment"),
    [
        ({"suffix": "w3"}, "it cannot fill a gap before a suffix"),
        ({"prompt": []}, "a list of either"),
        ({"prompt": [[]]}, "a list of either"),
        ({"prompt": ["w20", 5]}, "a list of either"),
        ({"prompt": ["w20"] * 257}, "a list of either"),
        ({"extra_body": {"min_tokens": 9}}, "min_tokens 9 is more than"),
        ({"extra_body": {"stop_token_ids": [4000]}}, "stop_token_ids names token 4000"),
        ({"extra_body": {"guided_json": {}, "guided_regex": "a"}}, "one form of the answer"),
        ({"extra_body": {"structured_outputs": {}}}, "structured_outputs: give json"),
        ({"extra_body": {"guided_choice": []}}, "guided_choice"),
        ({"extra_body": {"structured_outputs": {"structural_tag": "x"}}}, "structural_tag"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(client, changed, fragment):
    with pytest.raises(openai.BadRequestError, match=fragment):
        client.completions.create(**{**GREEDY, "prompt": "w20", **changed})


def test_stop_token_ids_end_after_min_tokens(client, texts):
    ids = texts[0].token_ids
    extra = {"stop_token_ids": [ids[3]], "ignore_eos": True, "min_tokens": 2}
    found = client.completions.create(**GREEDY, prompt=PROMPTS[0], logprobs=0, extra_body=extra)
    count = ids.index(ids[3]) + 1
    assert (found.usage.completion_tokens, found.choices[0].finish_reason) == (count, "stop")
    assert len(found.choices[0].logprobs.tokens) == count - 1
    messages = [{"role": "user", "content": "w20"}]
    found = client.chat.completions.create(**GREEDY, messages=messages, extra_body=extra)
    assert found.usage.completion_tokens >= 2


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
GRAMMAR = 'root ::= ("ab" | "cd") "#"'
FORMS = [
    ({"guided_json": SCHEMA}, r'\{"a": \d\}'),
    ({"guided_json": json.dumps(SCHEMA)}, r'\{"a": \d\}'),
    ({"guided_regex": "[a-c]{3}#"}, "[a-c]{3}#"),
    ({"guided_choice": ["yes", "no"]}, "yes|no"),
    ({"guided_grammar": GRAMMAR}, "(ab|cd)#"),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, r'\{"a": \d\}'),
    ({"structured_outputs": {"regex": "[a-c]{3}#"}}, "[a-c]{3}#"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    ({"structured_outputs": {"grammar": 'start: ("ab" | "cd") "#"'}}, "(ab|cd)#"),
    ({"structured_outputs": {"json_object": True}}, r"\{.*"),
]


def test_bad_words_are_not_in_the_output(client, server):
    asked = {"model": "tiny", "max_tokens": 24, "temperature": 0}
    word = client.completions.create(prompt="w20 w30", **asked).choices[0].text.split()[3]
    turns = [{"role": "user", "content": "w20 w30"}]
    for given in (word, f"  {word} "):
        forbids = {"bad_words": [given]}
        found = client.completions.create(prompt="w20 w30", extra_body=forbids, **asked)
        assert word not in found.choices[0].text.split()
    chat = client.chat.completions
    word = chat.create(messages=turns, **asked).choices[0].message.content.split()[2]
    found = chat.create(messages=turns, extra_body={"bad_words": [word]}, **asked)
    assert word not in found.choices[0].message.content.split()
    user, limit = {"role": "user", "content": "w20 w30"}, {"max_tokens": 24, "temperature": 0}
    options = {"num_predict": 24, "temperature": 0, "bad_words": [word]}
    for path, body in (
        ("/v1/responses", {"input": "w20 w30", "max_output_tokens": 24, "temperature": 0}),
        ("/v1/messages", {"messages": [user], **limit}),
        ("/api/chat", {"model": "tiny", "messages": [user], "stream": False, "options": options}),
    ):
        own = {} if "options" in body else {"bad_words": [word]}
        status, found = server.json(path, {**body, **own})
        assert (status, word in json.dumps(found)) == (200, False), found
    parameters = {"bad_words": [word], "max_tokens": 24, "temperature": 0}
    body = {"text_input": turns[0]["content"], "parameters": parameters}
    assert server.json("/v2/models/tiny/generate", body)[0] == 200
    status, found = server.json("/v1/completions", {"prompt": "w20", "bad_words": [""]})
    assert (status, "is not a word" in found["error"]["message"]) == (400, True)


def test_vllms_structured_outputs(lettered_server):
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40, "seed": 3}
    for form, expected in FORMS:
        for path, prompt in (("/v1/chat/completions", {}), ("/v1/completions", {"prompt": "Hi"})):
            body = {**chat, **form} if not prompt else {**prompt, "max_tokens": 40, **form}
            status, found = lettered_server.json(path, body)
            assert status == 200, found
            choice = found["choices"][0]
            text = choice["text"] if prompt else choice["message"]["content"]
            assert re.fullmatch(expected, text), (form, text)


def test_an_invalid_guide_is_reported(lettered_server):
    status, found = lettered_server.json("/v1/completions", {"prompt": "a", "guided_json": "{no"})
    assert status == 400
    assert "the schema of the answer is not JSON" in found["error"]["message"]
    # The tokens of this model cannot write it.
    status, found = lettered_server.json("/v1/completions", {"prompt": "a", "guided_regex": "ò"})
    assert status == 400
    assert "guiding the answer failed" in found["error"]["message"]


def test_tokens_of_texts_and_chats(server, offline):
    ids = offline.tokenizer.encode("w20 w30", add_special_tokens=True)
    status, found = server.json("/tokenize", {"prompt": "w20 w30", "model": "tiny"})
    assert status == 200
    assert found == {"count": 2, "max_model_len": 4096, "tokens": ids, "token_strs": None}
    found = server.json("/tokenize", {"prompt": "w20", "return_token_strs": True})[1]
    assert found["token_strs"] == ["w20"]
    messages = [{"role": "user", "content": "w20 </s>"}]
    chat = server.json("/tokenize", {"messages": messages})[1]
    usage = server.json("/v1/chat/completions", {"messages": messages, "max_tokens": 1})[1]["usage"]
    assert chat["count"] == len(chat["tokens"]) == usage["prompt_tokens"]
    fewer = server.json("/tokenize", {"messages": messages, "add_generation_prompt": False})[1]
    assert fewer["count"] <= chat["count"]
    assert server.json("/detokenize", {"tokens": ids}) == (200, {"prompt": "w20 w30"})
    assert "</s>" in server.json("/detokenize", {"tokens": [20, 2]})[1]["prompt"]
    version = importlib.metadata.version("edgellm")
    assert server.json("/version") == (200, {"version": version})


@pytest.mark.parametrize(
    ("path", "body", "status", "fragment"),
    [
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "w2", "model": "gpt"}, 404, "only 'tiny'"),
        ("/tokenize", {"messages": [{"role": "king", "content": "x"}]}, 400, "role"),
        ("/tokenize", {"prompt": "\ud800"}, 400, "surrogate"),
        ("/detokenize", {"tokens": [96]}, 400, "no token 96"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": "w2"}, 400, "tokens"),
    ],
)
def test_invalid_tokenize_requests_are_rejected(server, path, body, status, fragment):
    found = server.json(path, body)
    assert found[0] == status, found
    assert fragment in found[1]["error"]["message"]


HARMLESS = {
    "service_tier": "auto", "reasoning_effort": "low", "verbosity": "low", "cache_prompt": True,
    "prediction": {"type": "content", "content": "w20"}, "guided_decoding_backend": "xgrammar",
}  # fmt: skip


def test_ignored_fields_are_accepted_and_logged_once(roomy_engine):
    body = {"messages": [{"role": "user", "content": "w20"}], "max_tokens": 3}
    with serving(roomy_engine) as server:
        for name in HARMLESS:
            server.expects(f"WARNING: requests have {name}, which is ignored; logged once")
        for stream in (False, True, False):
            given = {**body, **HARMLESS, "stream": stream}
            status, response, _ = server.send("/v1/chat/completions", given)
            assert status == 200
            assert set(response.headers["x-edgellm-ignored"].split(", ")) == set(HARMLESS)
        response = server.send("/v1/chat/completions", body)[1]
        assert "x-edgellm-ignored" not in response.headers
        code, errors = server.end()
    assert code == 0
    assert len(errors.splitlines()) == len(HARMLESS)
