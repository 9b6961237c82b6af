"""Voice activity detection is that of silero-vad, and a transcript of it that of its parts."""

from __future__ import annotations

import importlib
import sys
import types

import downloaded
import numpy as np
import pytest
import torch
import transformers
from speech_checkpoints import FIRST_TIMESTAMP, GREEDY, SILERO, chirp, load_speech
from tokenizers import Tokenizer

from edgellm.core.errors import RequestError
from edgellm.device_runtime.transcription import speech_detector
from edgellm.device_runtime.transcription.options import TranscriptionOptions
from edgellm.device_runtime.transcription.parts import Part, pack
from edgellm.device_runtime.transcription.speech_detector import (
    Region,
    SpeechDetector,
    SpeechProbabilities,
)
from edgellm.device_runtime.transcription.transcriber import Transcriber
from edgellm.multimodal.audio import read_audio
from edgellm.scripts.whisper_tiny import fetch

TEXT = (
    "Good morning. The weather is fine today, and we will talk about it, as long as you like, "
    "without a pause, for it is a very long sentence. Goodbye."
)


@pytest.fixture(scope="module", autouse=True)
def silero():
    """The package, whose torchaudio reads files only."""
    folder = downloaded.packages(SILERO)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        speech_detector._session.cache_clear()
        with patch.context() as only_now:
            only_now.setitem(sys.modules, "torchaudio", types.ModuleType("torchaudio"))
            utilities = importlib.import_module("silero_vad.utils_vad")
        model = utilities.OnnxWrapper(f"{folder}/silero_vad/data/silero_vad.onnx")
        yield utilities, model
    for name in [name for name in sys.modules if name.split(".")[0] == "silero_vad"]:
        del sys.modules[name]
    speech_detector._session.cache_clear()


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """Speech with two seconds of noise before, within and after it."""
    path = tmp_path_factory.mktemp("speech") / "a.wav"
    speech = read_audio(fetch.say(TEXT, path))
    noise = 0.001 * np.random.default_rng(0).standard_normal(32000).astype(np.float32)
    return np.concatenate([noise, speech, noise, speech[:20000], noise[:12345]])


def _regions(detector, samples, size):
    """Regions of samples that come in chunks."""
    found = []
    for begin in range(0, len(samples), size):
        found += detector.push(samples[begin : begin + size])
    return found + detector.finish()


@pytest.mark.parametrize("size", [100, 512, 5000])
def test_probabilities_are_those_of_the_package(silero, samples, size):
    """In chunks of any size; the last frame is filled with zeros."""
    _, model = silero
    given = samples[30000:70001]
    expected = model.audio_forward(torch.from_numpy(given), 16000)[0].tolist()
    network, found = SpeechProbabilities(), []
    for begin in range(0, len(given), size):
        found += network.push(given[begin : begin + size])
    found += network.finish()
    assert found == expected
    assert min(found) < 0.2 < 0.8 < max(found)


@pytest.mark.parametrize("seconds", [30.0, 3.0])
def test_regions_are_those_of_the_package(silero, samples, seconds):
    """Also of speech that is longer than a window, which is cut at its longest pause."""
    utilities, model = silero
    expected = utilities.get_speech_timestamps(
        torch.from_numpy(samples),
        model,
        min_silence_duration_ms=500,
        speech_pad_ms=200,
        max_speech_duration_s=seconds,
    )
    size = int(16000 * seconds)
    found = _regions(SpeechDetector(size), samples, 1600)
    # The package adds half of a frame to speech that it cuts without a pause
    tolerance = 256 if seconds == 3 else 0
    np.testing.assert_allclose(
        found, [(each["start"], each["end"]) for each in expected], rtol=0, atol=tolerance
    )
    assert len(found) > (4 if seconds == 3 else 1)
    assert max(end - begin for begin, end in found) <= size
    assert _regions(SpeechDetector(size), samples, len(samples)) == found


def test_speech_without_a_pause_is_cut_at_the_limit(monkeypatch):
    """No sample is lost, and none comes twice."""
    monkeypatch.setattr(SpeechProbabilities, "_run", lambda *_: 0.9)
    found = _regions(SpeechDetector(32000), chirp(5.4), 1600)
    assert [each.begin for each in found[1:]] == [each.end for each in found[:-1]]
    assert (found[0].begin, found[-1].end) == (0, 86400)
    assert max(end - begin for begin, end in found) <= 32000


def test_times_are_those_of_the_recording():
    regions = [Region(16000, 32000), Region(48000, 56000), Region(80000, 96000)]
    assert pack(regions, 24000) == [tuple(regions[:2]), (regions[2],)]
    part = Part(np.zeros(24000, np.float32), tuple(regions[:2]))
    for seconds, ends, expected in (
        (0.0, False, 1.0),
        (0.5, True, 1.5),
        (1.0, True, 2.0),
        (1.0, False, 3.0),
        (1.25, False, 3.25),
        (9.0, True, 3.5),
    ):
        assert part.time_s(seconds, ends=ends) == expected


@pytest.fixture(scope="module")
def transcriber(speech_engine):
    return Transcriber(speech_engine)


def test_a_transcript_is_that_of_its_parts(transcriber, speech_checkpoint, samples):
    """Transformers' texts of the regions, packed into windows of one second."""
    samples = samples[:76000]
    groups = pack(_regions(SpeechDetector(16000), samples, 1600), 16000)
    options = TranscriptionOptions(language="de", timestamps="segment", vad=True, **GREEDY)
    found = transcriber.transcribe(samples, options).whole()
    features = transformers.WhisperFeatureExtractor.from_pretrained(speech_checkpoint)
    tokenizer = Tokenizer.from_file(str(speech_checkpoint / "tokenizer.json"))
    model, expected = load_speech(speech_checkpoint), []
    for group in groups:
        audio = np.concatenate([samples[begin:end] for begin, end in group])
        given = features(audio, sampling_rate=16000, return_tensors="pt").input_features
        with torch.no_grad():
            ids = model.generate(given, language="de", return_timestamps=True)[0].tolist()
        expected += [token for token in ids if token < FIRST_TIMESTAMP]
    assert found.text == tokenizer.decode(expected)
    regions = sum(groups, ())
    for segment in found:
        assert any(begin <= 16000 * segment.start_s <= end for begin, end in regions)
        assert segment.start_s <= segment.end_s
    assert found.segments[-1].start_s > groups[-1][0].begin / 16000
    assert found.duration_s == len(samples) / 16000


def test_a_stream_is_transcribed_as_its_regions(transcriber, samples):
    samples = samples[:76000]
    options = TranscriptionOptions(language="de", **GREEDY)
    regions = _regions(SpeechDetector(16000), samples, len(samples))
    parts = [samples[begin:end] for begin, end in regions]
    expected = [transcriber.transcribe(part, options).whole().text for part in parts]
    found = transcriber.transcribe_stream(np.array_split(samples, 50), options).whole()
    assert found.text.split() == " ".join(expected).split()
    assert len(parts) > 2


def test_a_stream_is_transcribed_while_it_comes(transcriber, samples):
    """A segment comes half a second after the end of its speech, cut speech at once."""
    heard = 0

    def chunks():
        nonlocal heard
        for begin in range(0, len(samples), 1600):
            heard = begin + 1600
            yield samples[begin : begin + 1600]

    options = TranscriptionOptions(language="de", timestamps="segment", **GREEDY)
    found = [
        (each.end_s, heard / 16000) for each in transcriber.transcribe_stream(chunks(), options)
    ]
    assert len(found) > 2
    assert all(end <= now < end + 1.5 for end, now in found)


def test_no_speech(transcriber):
    noise = 0.01 * np.random.default_rng(0).standard_normal(32000).astype(np.float32)
    with pytest.raises(RequestError, match=r"no speech was found in 2\.0 s"):
        transcriber.transcribe(noise, TranscriptionOptions(vad=True))
    assert transcriber.transcribe_stream([noise]).whole().text == ""


def test_the_package_is_named_if_it_is_missing(transcriber, monkeypatch):
    monkeypatch.setattr(speech_detector.importlib.util, "find_spec", lambda _: None)
    speech_detector._session.cache_clear()
    with pytest.raises(RequestError, match="silero-vad") as caught:
        transcriber.transcribe(chirp(1), TranscriptionOptions(vad=True))
    assert "pip install --no-deps silero-vad" in caught.value.hint
