"""`edgellm transcribe`: from an audio file and a model to a transcript, in one command."""

from __future__ import annotations

import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import downloaded
import numpy as np
import pytest
from conftest import assert_one_line_error
from speech_checkpoints import SILERO, chirp, write_wav

from edgellm.device_runtime.transcription.formats import vtt
from edgellm.device_runtime.transcription.options import TranscriptionOptions
from edgellm.device_runtime.transcription.transcriber import Transcriber
from edgellm.device_runtime.transcription.word_times import Word
from edgellm.multimodal.audio import read_audio
from edgellm.scripts.whisper_tiny import fetch
from edgellm.tools.command.transcription_flags import TranscriptionFlags

EDGELLM = Path(sys.executable).parent / "edgellm"
ONCE = "--temperature_increment_on_fallback", "0"
TIME = r"(\d\d):(\d\d):(\d\d)[.,](\d\d\d)"


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    return write_wav(tmp_path_factory.mktemp("audio") / "a.wav", chirp(1.9))


@pytest.fixture(scope="module")
def expected(speech_engine, recording):
    """Its segments in German, and their text."""
    options = TranscriptionOptions(language="de", timestamps="segment", temperatures=(0.0,))
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
    given = recording, speech_engine, "--language", "de", *ONCE
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
    assert (found["language"], found["task"], found["text"]) == ("german", "transcribe", text)
    assert found["duration"] == 1.9
    shown = [each for each in found["segments"] if each["text"].strip()]
    for own, each in zip(shown, segments, strict=True):
        assert (own["text"], own["tokens"]) == (each.text, [*each.token_ids])
        for key in ("seek", "temperature", "avg_logprob", "compression_ratio", "no_speech_prob"):
            assert own[key] == getattr(each, key)


def test_words_have_times(transcribe, speech_engine, recording):
    """Of their own subtitles, in those of vtt, and in a list."""
    options = TranscriptionOptions(language="de", timestamps="word", temperatures=(0.0,))
    segments = [*Transcriber(speech_engine).transcribe(read_audio(recording), options)]
    words = [word for each in segments for word in each.words]
    given = recording, speech_engine, "--language", "de", "--word_timestamps", *ONCE
    found = json.loads(transcribe(*given, "--format", "json").stdout)["words"]
    times = [(round(word.start_s, 2), round(word.end_s, 2)) for word in words]
    assert [(each["start"], each["end"]) for each in found] == times
    assert [each["word"] for each in found] == [word.text.strip() for word in words]
    flat = [time for pair in times for time in pair]
    for words_of in ([], ["--format", "srt"]):
        assert _times(transcribe(*given, *words_of).stdout) == pytest.approx(flat, abs=1e-3)
    shown = transcribe(*given, "--format", "vtt").stdout
    assert re.sub("<.*?>", "", shown).split()[-1] == words[-1].text.strip()


def test_times_of_words_are_inside_of_vtt_cues(expected):
    """They ascend, between those of the cue: https://www.w3.org/TR/webvtt1/#webvtt-cue-timestamp."""
    times = (" Good", 0.5, 0.9), (" morning,", 0.9, 1.2), (" all", 0.9, 1.4), (" there.", 1.6, 2.5)
    words = tuple(Word(text=text, start_s=start, end_s=end) for text, start, end in times)
    segment = replace(expected[0][0], start_s=0.5, end_s=2.0, words=words)
    assert [*vtt([segment])] == [
        "WEBVTT\n\n",
        "00:00:00.500 --> 00:00:02.000\nGood<00:00:00.900> morning, all<00:00:01.600> there.\n\n",
    ]


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


def test_several_files(transcribe, speech_engine, recording, tmp_path):
    other = write_wav(tmp_path / "b.wav", chirp(0.6, seed=1))
    broken = tmp_path / "c.wav"
    broken.write_bytes(b"RIFF")
    folder = tmp_path / "texts" / "of"
    given = speech_engine, "--language", "de", "--output_dir", folder
    result = transcribe(recording, other, *given)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [f"{folder}/a.txt", f"{folder}/b.txt"]
    for path in (recording, other):
        single = transcribe(path, speech_engine, "--language", "de").stdout
        assert (folder / f"{path.stem}.txt").read_text() == single
    result = transcribe(broken, other, *given, "--format", "srt")
    assert (result.returncode, result.stdout) == (2, f"{folder}/b.srt\n")
    assert "holds no audio" in result.stderr
    assert "1 of 2 files were not transcribed" in result.stderr
    assert sorted(each.name for each in folder.iterdir()) == ["a.txt", "b.srt", "b.txt"]
    (tmp_path / "d").mkdir()
    same = write_wav(tmp_path / "d" / "a.wav", chirp(0.5))
    for words, fragments in (
        ((recording, other, speech_engine), ("2 files need a folder", "--output_dir")),
        ((recording, same, *given), ("have the same transcript", "rename")),
        ((recording, tmp_path / "none.wav", *given), ("is no file", "and then the model")),
    ):
        assert_one_line_error(transcribe(*words), *fragments)


@pytest.fixture(scope="module")
def voice(tmp_path_factory):
    """Packages of speech, and two sentences of it as raw audio."""
    folder = downloaded.packages(SILERO)
    path = tmp_path_factory.mktemp("voice") / "a.wav"
    samples = read_audio(fetch.say("Good morning. How are you?", path))
    return folder, (samples * 32767).round().astype("<i2").tobytes()


@pytest.fixture
def live(voice, tmp_path):
    """Starts the command with a pipe."""
    folder, _ = voice
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "EDGELLM_HOME": str(tmp_path / "home"),
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
    }
    started = []

    def start(*words):
        command = [EDGELLM, "transcribe", *map(str, words)]
        started.append(
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


SILENCE = bytes(32000)


def test_a_pipe_is_transcribed_while_it_comes(live, voice, speech_engine):
    """The text comes before the pipe ends; Ctrl-C ends the recording, not the command."""
    process = live("-", speech_engine, "--live", "--language", "de")
    speech = voice[1]
    for begin in range(0, len(speech), 3201):  # odd: samples are cut
        process.stdin.write(speech[begin : begin + 3201])
        process.stdin.flush()
    process.stdin.write(SILENCE)
    process.stdin.flush()
    first = process.stdout.readline()
    assert first.split()[0].startswith(b"w")
    process.stdin.write(speech)
    process.stdin.flush()
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, b"")
    assert len(rest.splitlines()) >= 1


def test_words_come_before_their_line_is_complete(live, voice, deaf_engine):
    """The line begins with them, and nothing is printed twice; --no_partial prints whole lines."""
    given = "-", deaf_engine, "--live", "--language", "de", *ONCE
    given += "--compression_ratio_threshold", "99", "--logprob_threshold", "-99"
    given += "--no_condition_on_prev_tokens", "--no_speech_threshold", "1"
    whole, _ = live(*given, "--no_partial").communicate(voice[1] + SILENCE, timeout=60)
    process = live(*given)
    process.stdin.write(voice[1][:16000])  # half a second; more is written when words have come
    for begin in range(16000, len(voice[1]), 800):
        process.stdin.write(voice[1][begin : begin + 800])
        process.stdin.flush()
        if select.select([process.stdout], [], [], 0.5)[0]:
            break
    first = os.read(process.stdout.fileno(), 1000)
    assert first.startswith(b"w")
    rest, errors = process.communicate(SILENCE, timeout=60)
    assert (process.returncode, errors) == (0, b"")
    lines = {*(first + rest).splitlines()}
    assert lines == {*whole.splitlines()}
    assert len(lines) == 1


def test_a_microphone_is_recorded(live, voice, speech_engine, tmp_path):
    """A recorder that never ends by itself, and one that fails."""
    recorder = tmp_path / "arecord"
    (tmp_path / "voice.raw").write_bytes(voice[1] + SILENCE)
    recorder.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/words\ncat {tmp_path}/voice.raw\nexec sleep 600\n'
    )
    recorder.chmod(0o755)
    process = live("--mic", speech_engine, "--language", "de")
    assert process.stdout.readline().startswith(b"w")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, b"")
    assert (tmp_path / "words").read_text() == "-q -t raw -f S16_LE -r 16000 -c 1\n"
    recorder.write_text("#!/bin/sh\necho 'audio open error: No such device' >&2\nexit 1\n")
    _, errors = live("--mic", speech_engine).communicate(timeout=60)
    assert b"arecord does not record: audio open error: No such device" in errors


def test_bad_live_input(transcribe, speech_engine, recording, monkeypatch, voice, tmp_path):
    for words, fragments in (
        (("--mic", recording, speech_engine), ("reads no", "one of the two")),
        ((recording, speech_engine, "--live"), ("transcribes a pipe", "- MODEL --live")),
        ((speech_engine,), ("is missing", "--mic")),
        (("-", speech_engine, "--live", "--output_dir", tmp_path), ("--live has no file",)),
    ):
        assert_one_line_error(transcribe(*words), *fragments)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "silero_vad", None)  # not installed
        result = transcribe(recording, speech_engine, "--vad")
    assert_one_line_error(result, "silero-vad", "--no-deps")
    monkeypatch.syspath_prepend(voice[0])
    wave = io.TextIOWrapper(io.BytesIO(recording.read_bytes()))
    monkeypatch.setattr(sys, "stdin", wave)
    result = transcribe("-", speech_engine, "--live")
    assert_one_line_error(result, "is a WAV file, not raw samples", "arecord -t raw")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert_one_line_error(transcribe("--mic", speech_engine), "--mic needs arecord or ffmpeg")
