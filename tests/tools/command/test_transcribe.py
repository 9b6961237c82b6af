"""`edgellm transcribe`: from an audio file and a model to a transcript, in one command."""

from __future__ import annotations

import io
import json
import re
import sys

import numpy as np
import pytest
from conftest import assert_one_line_error
from speech_checkpoints import chirp, write_wav

from edgellm.device_runtime.transcription.options import TranscriptionOptions
from edgellm.device_runtime.transcription.transcriber import Transcriber
from edgellm.multimodal.audio import read_audio
from edgellm.tools.command.transcription_flags import TranscriptionFlags

TIME = r"(\d\d):(\d\d):(\d\d)[.,](\d\d\d)"


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    return write_wav(tmp_path_factory.mktemp("audio") / "a.wav", chirp(1.9))


@pytest.fixture(scope="module")
def expected(speech_engine, recording):
    """Its segments in German, and their text."""
    options = TranscriptionOptions(language="de", timestamps="segment")
    found = Transcriber(speech_engine).transcribe(read_audio(recording), options)
    segments = list(found)
    return [each for each in segments if each.text.strip()], found.text(segments).strip()


@pytest.fixture
def transcribe(command_here, monkeypatch, tmp_path):
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / "home"))
    return lambda *words: command_here("edgellm", "transcribe", *words)


def _seconds(match):
    hours, minutes, seconds, milliseconds = map(int, match)
    return 3600 * hours + 60 * minutes + seconds + milliseconds / 1000


def _times(text):
    return [_seconds(each) for each in re.findall(TIME, text)]


def test_a_checkpoint_becomes_a_transcript(transcribe, speech_checkpoint, recording):
    """The engine is stored, so that the second call only runs it."""
    first = transcribe(recording, speech_checkpoint, "--language", "de")
    assert first.returncode == 0, first.stderr
    assert first.stdout.strip()
    assert "whisper" in first.stderr
    again = transcribe(recording, speech_checkpoint, "--language", "de")
    assert (again.returncode, again.stdout, again.stderr) == (0, first.stdout, "")


def test_formats(transcribe, speech_engine, recording, expected):
    segments, text = expected
    given = recording, speech_engine, "--language", "de"
    assert transcribe(*given).stdout.split() == text.split()
    times = [time for each in segments for time in (each.start_s, each.end_s)]
    words = [word for each in segments for word in each.text.split()]
    assert len(segments) > 1
    timed = transcribe(*given, "--timestamps").stdout
    assert _times(timed) == pytest.approx(times, abs=1e-3)
    srt = transcribe(*given, "--format", "srt").stdout
    assert re.findall(r"(?m)^\d+$", srt) == [str(at + 1) for at in range(len(segments))]
    vtt = transcribe(*given, "--format", "vtt").stdout
    assert vtt.startswith("WEBVTT\n\n")
    for shown in (srt, vtt):
        assert _times(shown) == pytest.approx(times, abs=1e-3)
        assert [word for word in shown.split() if word.startswith("w")] == words
    assert ",000" not in vtt
    found = json.loads(transcribe(*given, "--format", "json").stdout)
    assert (found["language"], found["task"], found["text"]) == ("de", "transcribe", text)
    assert found["duration"] == 1.9
    shown = [each for each in found["segments"] if each["text"].strip()]
    for own, each in zip(shown, segments, strict=True):
        assert (own["text"], own["tokens"]) == (each.text, [*each.token_ids])
        for key in ("seek", "temperature", "avg_logprob", "compression_ratio", "no_speech_prob"):
            assert own[key] == getattr(each, key)


def test_flags_are_options(transcribe, speech_engine, recording):
    """Without flags they are the defaults of the Python interface."""
    options = TranscriptionFlags().read(needs_times=False)
    assert options == TranscriptionOptions()
    given = recording, speech_engine, "--language", "de", "--format", "json"
    words = (
        *("--prompt", "w7 w9", "--no_condition_on_prev_tokens", "--temperature", "0.7"),
        *("--temperature_increment_on_fallback", "0", "--logprob_threshold", "-9"),
        *("--compression_ratio_threshold", "50", "--no_speech_threshold", "1", "--seed", "5"),
    )
    found = json.loads(transcribe(*given, *words).stdout)["segments"]
    options = TranscriptionOptions(
        language="de",
        timestamps="segment",
        prompt="w7 w9",
        condition_on_prev_tokens=False,
        temperatures=(0.7,),
        logprob_threshold=-9,
        compression_ratio_threshold=50,
        no_speech_threshold=1,
        seed=5,
    )
    expected = Transcriber(speech_engine).transcribe(read_audio(recording), options)
    assert [each["tokens"] for each in found] == [[*each.token_ids] for each in expected]


def test_a_recorder_writes_into_a_pipe(transcribe, speech_engine, recording, monkeypatch):
    """A WAV header without a length, as arecord writes it."""
    expected = transcribe(recording, speech_engine, "--language", "de")
    content = bytearray(recording.read_bytes())
    content[4:8] = content[40:44] = b"\xff\xff\xff\x7f"
    for data in (bytes(content), b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        result = transcribe("-", speech_engine, "--language", "de")
        if data:
            assert (result.returncode, result.stdout) == (0, expected.stdout)
        else:
            assert_one_line_error(result, "standard input holds no audio")


def test_bad_input(transcribe, speech_engine, tiny_engine, recording, tmp_path):
    silent = write_wav(tmp_path / "silent.wav", np.zeros(8000, np.float32))
    for words, fragments in (
        ((tmp_path / "none.wav", speech_engine), ("does not exist", "audio file")),
        ((silent, speech_engine), ("is silent", "microphone")),
        ((recording, tiny_engine), ("language model (llama)", "give a speech model")),
        ((recording, speech_engine, "--language", "klingon"), ("'klingon'", "de, en")),
        ((recording, speech_engine, "--task", "sing"), ("task 'sing'", "translate")),
        ((recording, speech_engine, "--format", "doc"), ("--format doc", "vtt")),
    ):
        result = transcribe(*words)
        assert_one_line_error(result, *fragments)
        assert result.stdout == ""
