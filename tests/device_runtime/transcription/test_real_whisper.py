"""Whisper tiny.en with its own weights: the words of speech, as transformers writes them down."""

from __future__ import annotations

from pathlib import Path

import downloaded
import numpy as np
import pytest
import torch
import transformers
from speech_checkpoints import GREEDY, SILERO, build_speech, load_speech
from tokenizers import Tokenizer

from edgellm.device_runtime.networks.speech import SpeechNetwork
from edgellm.device_runtime.transcription import parts
from edgellm.device_runtime.transcription.drafts import NgramDraft
from edgellm.device_runtime.transcription.options import TranscriptionOptions
from edgellm.device_runtime.transcription.transcriber import Transcriber
from edgellm.multimodal.audio import read_audio
from edgellm.scripts.whisper_tiny import fetch
from edgellm.scripts.whisper_tiny.cli import TEXT

pytestmark = pytest.mark.nightly
FIRST_TIMESTAMP = 50363
THRESHOLDS = {
    "compression_ratio_threshold": 1.35,
    "logprob_threshold": -1.0,
    "no_speech_threshold": 0.6,
    "condition_on_prev_tokens": True,
}


@pytest.fixture(scope="module")
def checkpoint():
    return fetch.model()


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    return read_audio(fetch.say(TEXT, tmp_path_factory.mktemp("speech") / "a.wav"))


@pytest.fixture(scope="module")
def transcriber(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    return Transcriber(build_speech(folder, checkpoint, dtype="fp16", threads=0))


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_speech(checkpoint)


@pytest.mark.parametrize(("repeats", "timestamps"), [(1, False), (1, True), (4, True)])
def test_words_are_those_of_transformers(
    transcriber, model, checkpoint, samples, timestamps, repeats
):
    """In one window, and in several: four times the text takes more than 30 s."""
    audio = np.tile(samples, repeats)
    is_long = repeats > 1
    features = transformers.WhisperFeatureExtractor()
    padding = {"truncation": False, "padding": "longest"} if is_long else {}
    given = features(audio, sampling_rate=16000, return_tensors="pt", **padding).input_features
    with torch.no_grad():
        ids = model.generate(given, return_timestamps=timestamps)[0].tolist()
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    expected = tokenizer.decode([token for token in ids if token < FIRST_TIMESTAMP])
    times = "segment" if timestamps else "none"
    found = transcriber.transcribe(audio, TranscriptionOptions(timestamps=times, **GREEDY))
    segments = list(found)
    assert found.text(segments) == expected
    assert "".join(each.text for each in segments) == expected
    assert "welcome to the meeting" in expected
    assert (len(audio) > 30 * 16000) == is_long


def test_words_between_pauses(transcriber, samples, monkeypatch):
    """Word error rate by jiwer: speech with 40 s of noise in it, as a file and as a stream."""
    monkeypatch.syspath_prepend(downloaded.packages(SILERO))
    monkeypatch.syspath_prepend(downloaded.packages(Path(__file__).with_name("word_errors.txt")))
    import jiwer

    noise = 0.001 * np.random.default_rng(0).standard_normal(640000).astype(np.float32)
    audio = np.concatenate([noise[:40000], samples, noise, samples])
    words = jiwer.Compose(
        [jiwer.ToLowerCase(), jiwer.RemovePunctuation(), jiwer.ReduceToListOfListOfWords()]
    )
    found = transcriber.transcribe(audio, TranscriptionOptions(vad=True, timestamps="word"))
    second = 2.5 + len(samples) / 16000 + 40
    spoken = [word for each in found for word in each.words]
    begins = next(word.start_s for word in spoken[len(spoken) // 2 :])
    assert second - 0.5 < begins < second + 1.5
    stream = transcriber.transcribe_stream(np.array_split(audio, 400)).whole().text
    shown, chunks = [], np.array_split(audio, 400)
    monkeypatch.setattr(parts, "_STEP", 16000)  # a second of audio, however long it takes
    monkeypatch.setattr(parts.time, "monotonic", lambda: 0)
    partial = transcriber.transcribe_stream(chunks, on_words=shown.append).whole()
    assert len(shown) > 2 * len(partial.segments)
    assert all(any(each.text.strip().startswith(text) for each in partial) for text in shown)
    for text in (" ".join(word.text for word in spoken), stream, partial.text):
        errors = jiwer.wer(
            f"{TEXT} {TEXT}", text, reference_transform=words, hypothesis_transform=words
        )
        assert errors < 0.1, text


@pytest.mark.parametrize("repeats", [1, 4])
def test_words_have_the_times_of_transformers(transcriber, model, samples, repeats):
    """With thresholds and the text so far, as by default.

    The engine's KV cache is float16, so that a few times differ by a step.
    """
    audio = np.tile(samples, repeats)
    padding = {"truncation": False, "padding": "longest"} if repeats > 1 else {}
    features = transformers.WhisperFeatureExtractor()(
        audio, sampling_rate=16000, return_tensors="pt", return_attention_mask=True, **padding
    )
    flags = ("return_timestamps", "return_token_timestamps", "return_segments")
    with torch.no_grad():
        found = model.generate(
            **features, **dict.fromkeys(flags, True), temperature=(0.0,), **THRESHOLDS
        )
    expected, ends = [], []
    for segment in found["segments"][0]:
        ids = segment["tokens"].tolist()
        expected += [token for token in ids if token < FIRST_TIMESTAMP]
        ends += segment["token_timestamps"].tolist()
    options = TranscriptionOptions(timestamps="word", temperatures=(0.0,))
    segments = [*transcriber.transcribe(audio, options)]
    own = [token for each in segments for token in each.token_ids if token < FIRST_TIMESTAMP]
    assert own == expected
    words = [word for each in segments for word in each.words]
    distances = [np.abs(np.array(ends) - word.end_s).min() for word in words]
    assert max(distances) < 0.021
    assert np.mean(np.array(distances) < 1e-3) > 0.8
    assert [word.text for word in words[:2]] == [" Good", " morning"]


def test_n_grams_change_nothing(transcriber, samples, monkeypatch):
    """A text that repeats itself takes fewer passes."""
    audio, options = np.tile(samples, 4), TranscriptionOptions(temperatures=(0.0,))
    passes, run = [], SpeechNetwork.logits

    def logits(self, token_ids, rows):
        passes.append(len(token_ids))
        return run(self, token_ids, rows)

    monkeypatch.setattr(SpeechNetwork, "logits", logits)
    expected, plain = [*transcriber.transcribe(audio, options)], len(passes)
    with transcriber.window_decoder() as decoder:
        monkeypatch.setattr(decoder, "_draft", NgramDraft())
    assert [*transcriber.transcribe(audio, options)] == expected
    assert len(passes) - plain < 0.8 * plain
