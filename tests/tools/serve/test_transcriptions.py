"""Audio files to text over HTTP, by the `openai` client and by plain requests."""

from __future__ import annotations

import io
import json

import numpy as np
import openai
import pytest
from serve_process import serving
from speech_checkpoints import FIRST_TIMESTAMP, chirp, write_wav

from edgellm.device_runtime.networks.speech import SpeechNetwork
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.device_runtime.transcription.languages import NAMES
from edgellm.device_runtime.transcription.options import TranscriptionOptions
from edgellm.device_runtime.transcription.transcriber import Transcriber
from edgellm.multimodal.audio import read_audio
from edgellm.tools.serve.engines.loading import Loading
from edgellm.tools.serve.engines.models import read_models

PATH = "/v1/audio/transcriptions"
RUNNING = "vllm:num_requests_running"


@pytest.fixture(scope="module")
def server(speech_engine, tiny_engine):
    """A speech model, and a language model."""
    other = f"text={tiny_engine}"
    with serving(f"hearing={speech_engine}", "--engineDir", other) as process:
        yield process


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    return write_wav(tmp_path_factory.mktemp("audio") / "a.wav", chirp(1.9))


@pytest.fixture(scope="module")
def expected(speech_engine, recording):
    """The transcript of the engine, in German."""
    options = TranscriptionOptions(language="de", timestamps="segment")
    return Transcriber(speech_engine).transcribe(read_audio(recording), options).whole()


def _bytes(samples):
    file = io.BytesIO()
    write_wav(file, samples)
    return file.getvalue()


def test_formats_are_those_of_openai(client, recording, expected):
    def ask(**more):
        with recording.open("rb") as file:
            return client.audio.transcriptions.create(
                file=file, model="hearing", language="de", **more
            )

    found = ask()
    assert found.text == expected.text
    assert (found.usage.type, found.usage.seconds) == ("duration", 2)
    assert ask(response_format="text") == expected.text + "\n"
    found = ask(response_format="verbose_json", timestamp_granularities=["segment"])
    assert (found.text, found.language, found.duration) == (expected.text, "german", 1.9)
    assert [each.text for each in found.segments] == [each.text for each in expected.segments]
    times = [(each.start, each.end) for each in found.segments]
    assert times == [(round(each.start_s, 2), round(each.end_s, 2)) for each in expected.segments]
    assert len(times) > 1
    assert ask(response_format="srt").startswith("1\n00:00:0")
    assert ask(response_format="vtt").startswith("WEBVTT\n\n")


def test_options_are_those_of_the_engine(client, speech_engine, recording):
    """A temperature above 0 stays; of words alone there are no segments."""
    options = TranscriptionOptions(
        language="de", timestamps="word", temperatures=(0.7,), prompt="w7 w9"
    )
    expected = Transcriber(speech_engine).transcribe(read_audio(recording), options).whole()
    found = client.audio.transcriptions.create(
        file=recording,
        model="hearing",
        language="de",
        prompt="w7 w9",
        temperature=0.7,
        response_format="verbose_json",
        timestamp_granularities=["word"],
    )
    words = [word for each in expected for word in each.words]
    assert found.text == expected.text
    assert [each.word for each in found.words] == [each.text.strip() for each in words]
    times = [(round(each.start_s, 2), round(each.end_s, 2)) for each in words]
    assert [(each.start, each.end) for each in found.words] == times
    assert found.segments is None
    both = client.audio.transcriptions.create(
        file=recording,
        model="hearing",
        language="de",
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    assert both.words
    assert both.segments[0].avg_logprob < 0


def test_a_stream_has_the_text_in_segments(client, recording, expected):
    stream = client.audio.transcriptions.create(
        file=recording, model="hearing", language="de", stream=True
    )
    *pieces, last = list(stream)
    assert {each.type for each in pieces} == {"transcript.text.delta"}
    assert len(pieces) > 1
    assert last.type == "transcript.text.done"
    assert "".join(each.delta for each in pieces).rstrip() == last.text == expected.text


def test_log_probabilities_are_those_of_the_engine(client, recording, expected):
    """Of the tokens of the text, whole and in parts."""

    def ask(**more):
        return client.audio.transcriptions.create(
            file=recording, model="hearing", language="de", include=["logprobs"], **more
        )

    chosen = [pair for each in expected for pair in zip(each.token_ids, each.logprobs, strict=True)]
    wanted = [logprob for token, logprob in chosen if token < FIRST_TIMESTAMP]
    found, stream = ask(), list(ask(stream=True))
    assert [each.logprob for each in found.logprobs] == pytest.approx(wanted, abs=1e-9)
    assert "".join(each.token for each in found.logprobs).strip() == expected.text
    assert all(bytes(map(int, each.bytes)).decode() == each.token for each in found.logprobs)
    spelled = [(each.token, each.logprob) for each in found.logprobs]
    assert [(each.token, each.logprob) for each in stream[-1].logprobs] == spelled
    parts = [each for delta in stream[:-1] for each in delta.logprobs]
    assert [(each.token, each.logprob) for each in parts] == spelled
    assert len(wanted) > 3


@pytest.mark.parametrize("kind", ["draft", "ngram"])
def test_drafts_of_a_server_speculate(speech_engine, recording, monkeypatch, kind):
    """As they do for language models: by --draftEngineDir, or by n-grams."""
    folder = speech_engine if kind == "draft" else None
    how = SpecOptions(
        network=kind if folder else None,
        draft_engine_dir=folder,
        lookups=() if folder else (kind,),
    )
    (model,) = read_models([f"hearing={speech_engine}"], draft_model=folder)
    sizes, run = [], SpeechNetwork.logits

    def logits(self, token_ids, rows):
        sizes.append((self, len(rows)))
        return run(self, token_ids, rows)

    options = TranscriptionOptions(language="de", temperatures=(0.0,))
    expected = Transcriber(speech_engine).transcribe(recording, options).whole()
    monkeypatch.setattr(SpeechNetwork, "logits", logits)
    loaded = Loading(spec=how).load(model)
    assert isinstance(loaded, Transcriber)
    assert loaded.transcribe(recording, options).whole() == expected
    assert len({network for network, _ in sizes}) == (2 if folder else 1)
    assert max(count for _, count in sizes) > 2  # drafted tokens were verified


def test_translations(client, speech_engine, recording):
    options = TranscriptionOptions(task="translate")
    expected = Transcriber(speech_engine).transcribe(read_audio(recording), options).whole()
    found = client.audio.translations.create(file=recording, model="hearing")
    assert found.text == expected.text
    verbose = client.audio.translations.create(
        file=recording, model="hearing", response_format="verbose_json"
    )
    assert (verbose.language, verbose.text) == (NAMES[expected.language], expected.text)


def test_the_model_is_listed(client):
    assert [each.id for each in client.models.list()] == ["hearing", "text"]


@pytest.mark.parametrize(
    ("fields", "param", "fragment"),
    [
        ({"file": b"no audio at all"}, "file", "holds no audio that can be read"),
        ({"file": b""}, "file", "is empty"),
        ({"file": _bytes(np.zeros(8000, np.float32))}, "file", "is silent: all of its 0.5 s"),
        ({"model": "text"}, "model", "text is a language model"),
        ({"language": "klingon"}, None, "language 'klingon' (give one of its languages: de, en)"),
        ({"response_format": "docx"}, "response_format", "'verbose_json'"),
        ({"include": ["logprobs"], "response_format": "srt"}, "include[]", "response_format json"),
        ({"temperature": 2}, "temperature", "less than or equal to 1"),
        ({"timestamp_granularities": ["word"]}, "timestamp_granularities[]", "verbose_json"),
        ({"chunking_strategy": "auto"}, None, "pip install --no-deps silero-vad"),
        ({"chunking_strategy": {"type": "server_vad"}}, None, "chunking_strategy[type]"),
        ({"prompt": "<|notimestamps|>"}, None, "special token <|notimestamps|>"),
        ({"stream": True, "response_format": "srt"}, "stream", "srt is not streamed"),
        ({"extra_body": {"langage": "de"}}, "langage", "did you mean language?"),
    ],
)
def test_bad_requests(client, recording, fields, param, fragment):
    given = {"file": recording.read_bytes(), "model": "hearing", **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        client.audio.transcriptions.create(**given)
    error = caught.value.body
    assert fragment in error["message"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


def test_a_file_is_needed(server):
    for body, kind in ((b"{}", "application/json"), (b"model=hearing", None)):
        kind = kind or "application/x-www-form-urlencoded"
        status, found = server.json(PATH, body, content_type=kind)
        assert status == 400
        assert "multipart/form-data" in found["error"]["message"]
        assert found["error"]["param"] == "file"


def test_a_speech_model_takes_no_chats(client, server):
    for ask in (
        lambda: client.chat.completions.create(
            model="hearing", messages=[{"role": "user", "content": "w1"}]
        ),
        lambda: client.completions.create(model="hearing", prompt="w1"),
        lambda: client.embeddings.create(model="hearing", input="w1"),
    ):
        with pytest.raises(openai.BadRequestError, match="/v1/audio/transcriptions"):
            ask()
    message = [{"role": "user", "content": "w1"}]
    for path, body in (
        ("/v2/models/hearing/generate", {"text_input": "w1"}),
        ("/api/chat", {"model": "hearing", "messages": message}),
        ("/v1/messages", {"model": "hearing", "max_tokens": 3, "messages": message}),
        ("/tokenize", {"model": "hearing", "prompt": "w1"}),
    ):
        status, found = server.json(path, body)
        assert (status, "is a speech model" in json.dumps(found)) == (400, True)
    status, found = server.json("/api/show", {"model": "hearing"})
    assert (status, found["capabilities"]) == (200, ["transcription"])
    assert found["edgellm"]["max_body_bytes"] == 32 << 20
    for path in ("/api/tags", "/api/ps", "/v2/models/hearing/config", "/v1/models/hearing"):
        status, found = server.json(path)
        assert (status, "hearing" in json.dumps(found)) == (200, True)


def test_large_files_are_rejected(server):
    length = str((32 << 20) + 1)
    status, found = server.json(PATH, b"", content_length=length)
    assert (status, found["error"]["message"]) == (413, "the body has more than 33554432 bytes")


def test_a_short_recording_does_not_wait_for_a_long_one(client, server, recording):
    """A client that leaves ends its work."""
    stream = client.audio.transcriptions.create(
        file=_bytes(chirp(90)), model="hearing", language="de", stream=True
    )
    next(iter(stream))
    client.audio.transcriptions.create(file=recording, model="hearing")
    assert server.metric(RUNNING) == 1
    stream.close()
    server.wait_until(RUNNING, 0)
