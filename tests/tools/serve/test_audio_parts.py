"""Audio in messages of a server, in OpenAI's form and in vLLM's."""

from __future__ import annotations

import base64

import openai
import pytest
from audio_checkpoints import build_audio_model
from made_once import made_once
from serve_process import serving
from speech_checkpoints import chirp, write_wav

from edgellm.device_runtime import LLM, SamplingParams

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    pytest.importorskip("torch")
    return made_once(
        tmp_path_factory, "audio_qwen3_asr", lambda folder: build_audio_model(folder, "qwen3_asr")
    )


@pytest.fixture(scope="module")
def server(engines):
    with serving(engines.engine, "--audioEngineDir", engines.audio_engine) as process:
        yield process


def _body(part):
    content = [part, {"type": "text", "text": "w1 w2"}]
    messages = [{"role": "user", "content": content}]
    return {"messages": messages, "max_tokens": 6, "temperature": 0}


def test_audio_is_answered_as_by_the_engine(server, engines, tmp_path):
    path = write_wav(tmp_path / "a.wav", chirp(1.2))
    data = base64.b64encode(path.read_bytes()).decode()
    items = [{"type": "audio", "audio": str(path)}, {"type": "text", "text": "w1 w2"}]
    with LLM(engines.engine, audio_engine_dir=engines.audio_engine) as llm:
        output = llm.generate(
            [{"role": "user", "content": items}],
            sampling=SamplingParams(temperature=0),
            max_generate_length=6,
        )
        list(output)
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    made = client.chat.completions.create(model="engine", **_body(part))
    assert made.choices[0].message.content == output.text
    assert made.usage.prompt_tokens == output.prompt_token_count
    url = {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}}
    status, found = server.json(CHAT, _body(url))
    assert (status, found["choices"][0]["message"]["content"]) == (200, output.text)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "no audio"),
        ({"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}}, "audio_url: file:"),
        ({"type": "audio_url", "audio_url": {"url": "http://host/a.wav"}}, "audio_url: http"),
        ({"type": "image_url", "image_url": {"url": "data:,"}}, "no images: it has no visual"),
    ],
)
def test_bad_parts_are_the_clients_faults(server, part, message):
    status, found = server.json(CHAT, _body(part))
    assert status == 400
    assert message in found["error"]["message"]


def test_the_model_says_that_it_takes_audio(server):
    status, found = server.json("/api/show", {"model": "engine"})
    assert (status, "audio" in found["capabilities"]) == (200, True)
    assert found["edgellm"]["max_body_bytes"] == 32 << 20
