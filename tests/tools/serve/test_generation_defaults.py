"""Defaults of requests in every protocol of the server, by real clients."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest
from conftest import assert_one_line_error
from manifests import read_manifest, write_manifest
from serve_process import ServerProcess, serving

from edgellm.device_runtime import LLM, SamplingParams

PROMPT = "w20 w21 w22"
MESSAGES = [{"role": "user", "content": PROMPT}]
LENGTH = 5
SAMPLED = {"temperature": 4.0, "top_p": 1.0, "top_k": 0, "max_generate_length": LENGTH}


@pytest.fixture(scope="module")
def engine(roomy_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine whose model samples hot texts of five tokens."""
    folder = tmp_path_factory.mktemp("sampled") / "engine"
    shutil.copytree(roomy_engine, folder)
    content = read_manifest(folder)
    write_manifest(folder, {**content, "generation_defaults": SAMPLED})
    return folder


@pytest.fixture(scope="module")
def hot(engine: Path) -> Iterator[ServerProcess]:
    with serving(engine, "--modelName", "m") as server:
        yield server


@pytest.fixture(scope="module")
def cold(engine: Path) -> Iterator[ServerProcess]:
    """The same with greedy decoding by flag."""
    with serving(
        engine, "--modelName", "m", "--overrideGenerationConfig", '{"temperature": 0}'
    ) as server:
        yield server


@functools.cache  # a client reads all certificates
def _openai(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@functools.cache
def _anthropic(server: ServerProcess) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


@functools.cache
def _ollama(server: ServerProcess) -> ollama.Client:
    return ollama.Client(host=server.url)


def _chat(server: ServerProcess, **more: Any) -> str:
    done = _openai(server).chat.completions.create(model="m", messages=MESSAGES, **more)
    return done.choices[0].message.content


def _completion(server: ServerProcess, **more: Any) -> str:
    return _openai(server).completions.create(model="m", prompt=PROMPT, **more).choices[0].text


def _responses(server: ServerProcess, **more: Any) -> str:
    return _openai(server).responses.create(model="m", input=PROMPT, **more).output_text


def _messages(server: ServerProcess, **more: Any) -> str:
    given = {"max_tokens": LENGTH, **more}
    return _anthropic(server).messages.create(model="m", messages=MESSAGES, **given).content[0].text


def _ollama_chat(server: ServerProcess, **more: Any) -> str:
    return _ollama(server).chat("m", MESSAGES, options=more).message.content


def _ollama_raw(server: ServerProcess, **more: Any) -> str:
    return _ollama(server).generate("m", PROMPT, raw=True, options=more).response


def _triton(path: str, body: dict[str, Any]) -> Callable[..., str]:
    def one(server: ServerProcess) -> str:
        excluded = {"exclude_input_in_output": True} if "parameters" not in body else {}
        given = {"text_input": PROMPT, **body, **excluded}
        return server.json(f"/v2/models/m/{path}", given)[1]["text_output"].removeprefix(PROMPT)

    return one


CHATS = [_chat, _responses, _messages, _ollama_chat]
TEXTS = [
    _completion, _ollama_raw, _triton("generate", {"parameters": {}}),
    _triton("generate", {"sampling_param_stop": ["none"]}), _triton("generate", {"stop_words": []}),
]  # fmt: skip
IDS = ["chat", "responses", "messages", "ollama chat", "completion", "ollama raw", "triton vllm",
       "triton tensorrt-llm", "triton ensemble"]  # fmt: skip


@pytest.mark.parametrize("ask", [*CHATS, *TEXTS], ids=IDS)
def test_a_silent_request_has_the_models_and_the_servers_values(ask, hot, cold, engine):
    with LLM(engine) as llm:
        prompt = MESSAGES if ask in CHATS else PROMPT
        output = llm.generate(
            prompt, sampling=SamplingParams(temperature=0), max_generate_length=LENGTH
        )
        greedy = "".join(step.text for step in output)
    assert ask(cold).strip() == greedy.strip()
    hot_texts = {ask(hot) for _ in range(3)}
    assert len(hot_texts) == 3
    assert all(0 < len(text.split()) <= LENGTH for text in hot_texts)


def _unlimited(server: ServerProcess) -> str:
    """The begin of an output without a limit, which would fill the KV cache."""
    text, options = "", {"temperature": 0, "num_predict": -1}
    stream = _ollama(server).chat("m", MESSAGES, options=options, stream=True)
    while len(text.split()) <= 2 * LENGTH:
        text += next(stream).message.content
    stream.close()
    return text


def test_a_request_wins(hot, cold):
    assert _chat(hot, temperature=0) == _chat(cold)
    assert len(_chat(hot, temperature=0, max_tokens=7).split()) == 7
    assert _unlimited(hot).startswith(_chat(cold))
    own = {"temperature": 1, "top_k": 0, "seed": 1}
    assert _messages(cold, extra_body=own) != _messages(cold)


def test_the_seed_repeats_an_output(hot, cold):
    raw = _openai(hot).chat.completions.with_raw_response.create(model="m", messages=MESSAGES)
    seed = int(raw.headers["x-edgellm-seed"])
    done = raw.parse()
    assert done.model_extra["metrics"]["seed"] == seed
    assert _chat(hot, seed=seed) == done.choices[0].message.content
    answer = _anthropic(hot).messages.with_raw_response.create(
        model="m", messages=MESSAGES, max_tokens=LENGTH
    )
    own = _messages(hot, extra_body={"seed": int(answer.headers["x-edgellm-seed"])})
    assert own == answer.parse().content[0].text
    _, response, _ = cold.send("/v1/completions", {"prompt": PROMPT})
    assert response.getheader("x-edgellm-seed") is None  # greedy outputs need none


def test_responses_repeat_the_values_used(hot, cold):
    for server, temperature in ((hot, 4.0), (cold, 0.0)):
        done = _openai(server).responses.create(model="m", input=PROMPT)
        assert (done.temperature, done.top_p) == (temperature, 1.0)


def test_without_the_models_values_the_protocols_have_theirs(engine):
    with serving(engine, "--modelName", "m", "--generationConfig", "none") as server:
        done = _openai(server).responses.create(model="m", input=PROMPT, max_output_tokens=3)
        assert (done.temperature, done.top_p) == (1.0, 1.0)
        done = _openai(server).completions.create(model="m", prompt=PROMPT)
        assert done.usage.completion_tokens == 16


@pytest.mark.parametrize(
    ("text", "fragment"),
    [("{", "is not valid JSON"), ("[]", "is not a JSON object"), ('{"top_p": 2}', "out of range"),
     ('{"tempreature": 1}', "did you mean temperature?")],
)  # fmt: skip
def test_invalid_overrides_end_the_command(command_here, engine, text, fragment):
    result = command_here(
        "edgellm-serve", "--engineDir", engine, "--overrideGenerationConfig", text
    )
    assert_one_line_error(result, "--overrideGenerationConfig", fragment)
