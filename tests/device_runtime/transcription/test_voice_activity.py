"""Voice activity detection is that of silero-vad, and a transcript of it that of its parts."""

from __future__ import annotations

import importlib
import itertools
import sys
import types
from dataclasses import replace

import downloaded
import numpy as np
import pytest
import torch
import transformers
from speech_checkpoints import FIRST_TIMESTAMP, GREEDY, SILERO, chirp, load_speech
from tokenizers import Tokenizer

from edgellm.core.errors import RequestError
from edgellm.device_runtime.transcription import parts, speech_detector
from edgellm.device_runtime.transcription.options import TranscriptionOptions
from edgellm.device_runtime.transcription.parts import Part, SpeechStream, pack
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
    pieces = [samples[begin:end] for begin, end in regions]
    expected = [transcriber.transcribe(each, options).whole().text for each in pieces]
    found = transcriber.transcribe_stream(np.array_split(samples, 50), options).whole()
    assert found.text.split() == " ".join(expected).split()
    assert len(pieces) > 2


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


def _random_speech(monkeypatch, random, count):
    """Probabilities that stay for a while, by frame; they replace those of the network."""
    lengths = random.integers(1, 12, count)
    found = np.repeat(random.choice([0.1, 0.4, 0.9], count, p=[0.3, 0.1, 0.6]), lengths).tolist()
    left = iter(found)
    monkeypatch.setattr(SpeechProbabilities, "_run", lambda *_: next(left, 0.1))
    return found


@pytest.mark.parametrize("cuts_back", [False, True])
def test_the_current_speech_stays_in_its_region(monkeypatch, cuts_back):
    """Unless regions are cut at earlier pauses: then words of later audio would be lost."""
    random, lost, ends = np.random.default_rng(0), 0, set()
    for _ in range(20):
        found = _random_speech(monkeypatch, random, 60)
        detector, regions, seen = SpeechDetector(32000, cuts_back=cuts_back), [], []
        for _ in range(len(found)):
            regions += detector.push(np.zeros(512, np.float32))
            seen += [detector.current] if detector.current else []
        regions += detector.finish()
        for each in seen:
            frames = [at for at in range(each.begin // 512, each.end // 512) if found[at] == 0.9]
            region = next(one for one in regions if one.begin == each.begin)
            lost += 512 * (frames[-1] + 1) > region.end
        assert all(end - begin <= 32000 for begin, end in regions)
        assert all(one.end <= other.begin for one, other in itertools.pairwise(regions))
        assert all(any(one.begin == each.begin for one in regions) for each in seen)
        ends |= {end - begin for begin, end in regions}
    assert (lost > 0) == cuts_back
    assert max(ends) > 12600


def test_speech_that_goes_on_is_a_part_again_and_again(monkeypatch):
    """Each has more audio: 0.6 s, or what the computation took."""
    monkeypatch.setattr(SpeechProbabilities, "_run", lambda *_: 0.9)
    now = 0.0
    monkeypatch.setattr(parts.time, "monotonic", lambda: now)
    chunks = np.array_split(chirp(6), 60)
    ends, taken = [], iter([0.0, 0.0, 1.0, 0.5])
    for part in SpeechStream(chunks, 480000, is_partial=True).parts():
        ends.append((part.regions[0].end / 16000, part.is_complete))
        now += next(taken, 9)
    assert [complete for _, complete in ends] == [False] * 5 + [True]
    steps = np.diff([end for end, _ in ends])
    assert ends[0][0] == pytest.approx(0.3, abs=0.1)
    assert steps[:4] == pytest.approx([0.6, 0.6, 1.0, 0.6], abs=0.15)
    assert steps.min() >= 0.6 - 1e-6
    assert ends[-1] == (6.0, True)


def test_words_come_while_speech_goes_on(deaf_engine, transcriber, samples):
    """Of a model whose decodings always agree; the segment begins with them."""
    deaf = Transcriber(deaf_engine)
    thresholds = {"compression_ratio_threshold": None, "logprob_threshold": None}
    options = TranscriptionOptions(language="de", **GREEDY, **thresholds)
    text = deaf.transcribe(chirp(0.5), options).whole().text
    heard, shown, found = 0, [], []

    def chunks():
        nonlocal heard
        for begin in range(0, len(samples), 800):
            heard = begin + 800
            yield samples[begin : begin + 800]

    for segment in deaf.transcribe_stream(
        chunks(), options, on_words=lambda words: shown.append((heard, words))
    ):
        found.append((heard, segment.text.strip(), [*shown]))
        shown.clear()
    assert {each for _, each, _ in found} == {text}
    assert text
    early = [(words, when) for when, _, words in found if words]
    assert len(early) > 1
    for words, when in early:
        assert words[0][0] < when
        texts = [each for _, each in words]
        assert all(other.startswith(one) for one, other in itertools.pairwise([*texts, text]))
    timed = replace(options, timestamps="segment")
    assert transcriber.transcribe_stream([samples], timed, on_words=pytest.fail).whole().text


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
