from __future__ import annotations

import json

import pytest

from edgellm.core.errors import RequestError
from edgellm.device_runtime.request_files.request_file import (
    Options,
    located,
    parse_request,
    read_file,
    sampling_of,
)

USER = {"role": "user", "content": "hi"}


def test_defaults_of_request_files(tmp_path):
    path = tmp_path / "in.json"
    path.write_text(json.dumps({"requests": [{"messages": [USER]}]}))
    options, requests = read_file(path)
    assert (options.temperature, options.top_k, options.max_generate_length) == (None, None, None)
    sampling = sampling_of(options)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 0.8, 50)
    assert options.apply_chat_template
    assert options.add_generation_prompt is options.continue_final_message is None
    assert not options.enable_thinking
    assert parse_request(requests[0], 0).merged(options) == options


def test_a_request_overrides_the_file():
    request = parse_request({"messages": [USER], "temperature": 0, "stop": "x"}, 0)
    merged = request.merged(Options(top_k=7))
    assert (merged.temperature, merged.stop, merged.top_k) == (0, "x", 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"requests": [\n  {"messages": oops}]}', "line 2, column 16"),
        ("[]", "must be an object"),
        ("{}", r"\$\.requests must be a list"),
        ('{"requests": []}', r"\$\.requests must be a list"),
        ('{"requests": [1], "top_p": 2}', r"\$\.top_p: expected `float` <= 1.0"),
        ('{"requests": [1], "top_k": 1, "top_k": 2}', r"in\.json: the key \$\.top_k is there"),
        ('{"requests": [{"seed": 1, "seed": 2}]}', r"the key \$\.requests\[0\]\.seed is there"),
        ('{"requests": [1],\n"temprature": 1}', r"in\.json line 2: \$: .* field `temprature`"),
        ('{"requests": [1], "batch_size": "two"}', r"\$\.batch_size: expected `int`, got `str`"),
        ('{"requests": [1], "available_lora_weights": {"a": 1}}', "expected `str`, got `int`"),
    ],
)
def test_invalid_files_are_rejected(tmp_path, text, message):
    path = tmp_path / "in.json"
    path.write_text(text)
    with pytest.raises(RequestError, match=message):
        read_file(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"requests": [1], "top_k": ' + "9" * 10_000 + "}", "integer string"),
        ('{"requests": [1], "\\ud800": 1}', "surrogate"),
    ],
    ids=["deep", "long", "surrogate"],
)
def test_malformed_json_is_rejected(tmp_path, text, message):
    path = tmp_path / "in.json"
    path.write_text(text)
    with pytest.raises(RequestError, match=message):
        read_file(path)


def test_missing_and_undecodable_files_are_rejected(tmp_path):
    with pytest.raises(RequestError, match="cannot read"):
        read_file(tmp_path / "none.json")
    (tmp_path / "in.json").write_bytes(b'{"requests": ["\xff"]}')
    with pytest.raises(RequestError, match="not UTF-8: byte 15"):
        read_file(tmp_path / "in.json")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (1, r"\$\.requests\[3\]: expected `object`"),
        ({}, "missing required field `messages`"),
        ({"messages": []}, r"messages: expected `array` of length >= 1"),
        ({"messages": [{"role": "usr", "content": "x"}]}, r"messages\[0\]\.role: invalid enum"),
        ({"messages": [{"role": "user"}]}, "missing required field `content`"),
        ({"messages": [{"role": "user", "content": 5}]}, r"messages\[0\]\.content: expected"),
        (
            {"messages": [USER], "max_generate_length": 0},
            "max_generate_length: expected `int` >= 1",
        ),
        ({"messages": [USER], "lora_name": 1}, r"lora_name: expected `str \| null`"),
        ({"messages": [USER], "num_logprobs": 2}, "log-probabilities are not supported"),
        ({"messages": [USER], "temperature": True}, "temperature: expected `float"),
        ({"messages": [USER], "min_p": 1.5}, "min_p: expected `float` <= 1"),
        ({"messages": [USER], "repetition_penalty": 0}, "expected `float` >= 0.01"),
        ({"messages": [USER], "presence_penalty": 3}, "presence_penalty: expected `float` <= 2"),
        ({"messages": [USER], "logit_bias": {"w9": 1}}, "expected `int`, got `str`.*logit_bias"),
        ({"messages": [USER], "logit_bias": {"9": 200}}, "expected `float` <= 100"),
    ],
)
def test_errors_name_the_path_of_the_field(raw, message):
    with pytest.raises(RequestError, match=message):
        parse_request(raw, 3)


def test_sampling_parameters_of_a_request():
    options = Options(min_p=0.1, presence_penalty=0.5)
    raw = {"messages": [USER], "presence_penalty": -1, "logit_bias": {"9": 2.5}}
    found = sampling_of(parse_request(raw, 0).merged(options))
    assert (found.min_p, found.presence_penalty, found.logit_bias) == (0.1, -1, {9: 2.5})
    assert not found.is_greedy
    assert sampling_of(options, greedy=True).is_greedy


def test_content_items_of_a_message():
    def pieces(content):
        request = parse_request({"messages": [{"role": "user", "content": content}]}, 0)
        return [(item.type, item.text or item.image) for item in request.messages[0].items("x")]

    assert pieces("ab") == [("text", "ab")]
    items = [{"type": "text", "text": "a"}, {"type": "image", "image": "cat.png"}]
    assert pieces(items) == [("text", "a"), ("image", "cat.png")]
    for item, message in (
        ({"type": "audio", "text": "cat"}, r"x\.content\[0\]: an audio item needs `audio`"),
        ({"type": "image", "text": "cat"}, r"x\.content\[0\]: an image item needs `image`"),
        ({"type": "text"}, r"x\.content\[0\]: a text item needs `text`"),
    ):
        with pytest.raises(RequestError, match=message):
            pieces([item])


@pytest.mark.parametrize(
    ("request_text", "line", "hint"),
    [
        ('{"messages": [{"role": "user",\n "contnet": "x"}]}', 3, "did you mean content?"),
        ('{"messages": [{"role": "user", "content": "x"}],\n\n "topK": 1}', 4, "mean top_k?"),
        ('{"messages": [\n{"role": "usr", "content": "x"}]}', 3, "did you mean user? roles: "),
        ('{"messages": [{"role": "user", "content": [\n{"type": "txt"}]}]}', 3, "mean text?"),
        ('{"messages": [{"role": "user", "content": "x"}], "guided_decoding":\n{"regx": "a"}}', 3,
         "did you mean regex?"),
    ],
)  # fmt: skip
def test_faults_of_requests_have_a_line_and_a_suggestion(tmp_path, request_text, line, hint):
    path = tmp_path / "in.json"
    path.write_text('{"requests": [\n' + request_text + "]}")
    _, (raw,) = read_file(path)
    with pytest.raises(RequestError) as caught:
        parse_request(raw, 0)
    assert located(path, str(caught.value)).startswith(f"{path} line {line}: $.requests[0]")
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [("image_url", '"type": "image"'), ("input_image", '"type": "image"'),
     ("video_url", '"type": "video"'), ("input_text", '"type": "text"')],
)  # fmt: skip
def test_content_types_of_openai_are_named(kind, wanted):
    """They are types of the server's protocol; the hint shows the form of files."""
    content = [{"type": kind, kind: {"url": "cat.jpg"}}]
    with pytest.raises(RequestError) as caught:
        parse_request({"messages": [{"role": "user", "content": content}]}, 0)
    assert f"content of the type '{kind}' is of OpenAI's protocol" in str(caught.value)
    assert wanted in caught.value.hint


def test_a_byte_order_mark_is_ignored(tmp_path):
    """Editors on Windows write one."""
    path = tmp_path / "in.json"
    text = '{"requests": [\n{"messages": [{"role": "user", "content": "Grüße"}]}], "temperture": 1}'
    path.write_text(text.replace("temperture", "temperature"), "utf-8-sig")
    _, (raw,) = read_file(path)
    assert parse_request(raw, 0).messages[0].content == "Grüße"
    path.write_text(text, "utf-8-sig")
    with pytest.raises(RequestError, match=r"in.json line 2: \$: object contains unknown field"):
        read_file(path)
