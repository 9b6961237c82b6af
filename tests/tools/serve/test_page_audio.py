"""Audio on the chat page in a headless Chromium, whose microphone beeps."""

from __future__ import annotations

import base64
import io
import wave

import numpy as np
from chat_page import ANSWERED, ask, events_of, open_page, replies, wait_answered
from serve_process import serving

from edgellm.device_runtime.transcription.options import NO_TIMES, TranscriptionOptions
from edgellm.device_runtime.transcription.transcriber import Transcriber
from edgellm.multimodal.audio import decode_audio


def _takes_audio(page, max_body_bytes=1 << 20):
    about = {"model_info": {"general.architecture": "voxtral"}, "capabilities": ["audio"]}
    about["edgellm"] = {"max_body_bytes": max_body_bytes}
    page.route("**/api/show", lambda route: route.fulfill(json=about))


def _file(name, samples, rate=16_000):
    """A WAV file with one row of 16-bit samples for each channel."""
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setparams((len(samples), 2, rate, samples.shape[1], "NONE", ""))
        file.writeframes(samples.T.astype("<i2").tobytes())
    return {"name": name, "mimeType": "audio/wav", "buffer": content.getvalue()}


def _sent_samples(part):
    """Samples of an `input_audio`; it has one channel at 16 kHz."""
    assert (part["type"], part["input_audio"]["format"]) == ("input_audio", "wav")
    with wave.open(io.BytesIO(base64.b64decode(part["input_audio"]["data"]))) as file:
        assert file.getparams()[:3] == (1, 2, 16_000)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2")


def test_audio_is_recorded_or_attached_and_sent_as_wav(page, server):
    _takes_audio(page)
    bodies = replies(page, events_of("x"))
    open_page(page, server)
    page.focus("#record")
    page.keyboard.press("Enter")
    page.wait_for_selector("#record:text('End recording')")
    assert page.inner_text("#state") == "recording"
    page.wait_for_timeout(300)
    page.keyboard.press("Enter")
    page.wait_for_selector("[aria-label='Remove Recording']")
    assert page.inner_text("#record") == "Record"
    samples = np.random.default_rng(0).integers(-20_000, 20_000, (2, 800))
    page.set_input_files("#file", [_file("a.wav", samples)])
    page.wait_for_selector("[aria-label='Remove a.wav']")
    ask(page, "Who speaks?")
    recorded, attached, text = bodies[0]["messages"][0]["content"]
    assert len(_sent_samples(recorded)) > 1600
    assert np.abs(_sent_samples(attached) - samples.mean(axis=0)).max() <= 2
    assert text == {"type": "text", "text": "Who speaks?"}
    players = page.locator(".user audio[controls]")
    page.wait_for_function("() => document.querySelectorAll('audio')[1].duration === 0.05")
    assert [player.get_attribute("title") for player in players.all()] == ["Recording", "a.wav"]
    page.set_viewport_size({"width": 375, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") == 375


def test_why_there_is_no_audio_is_one_line(page, server):
    _takes_audio(page, max_body_bytes=8192)
    open_page(page, server)
    page.wait_for_selector("#record")
    refuse = """() => { navigator.mediaDevices.getUserMedia =
        async () => { throw new DOMException("", "%s"); }; }"""
    for spoil, reason in (
        (refuse % "NotAllowedError", "does not allow this page to use the microphone"),
        (refuse % "NotFoundError", "There is no microphone."),
        (
            "() => { Object.defineProperty(navigator, 'mediaDevices', {value: undefined}); }",
            "Pages over http may record on localhost only",
        ),
    ):
        page.evaluate(spoil)
        page.click("#record")
        page.wait_for_selector(f"#state:has-text('{reason}')")
    page.set_input_files("#file", [_file("a.wav", np.zeros((1, 4000)))])
    page.wait_for_selector("#state:has-text('a.wav is too large: 0.0 MiB')")
    page.set_input_files("#file", [{"name": "b.wav", "mimeType": "audio/wav", "buffer": b"no"}])
    page.wait_for_selector("#state:has-text('b.wav has no audio')")
    assert not page.locator("#attachments").is_visible()


def test_a_model_without_audio_has_no_record_button(page, server):
    open_page(page, server)
    page.wait_for_function("() => document.getElementById('attach').textContent === 'File'")
    assert not page.locator("#record").is_visible()
    page.set_input_files("#file", [_file("a.wav", np.zeros((1, 400)))])
    page.wait_for_selector("#state:text('This model takes no audio.')")


def test_a_speech_model_transcribes_files_and_recordings(page, speech_engine):
    samples = np.random.default_rng(0).integers(-20_000, 20_000, (1, 30_000))
    file = _file("a.wav", samples)
    options = TranscriptionOptions(timestamps=NO_TIMES)
    audio = decode_audio(io.BytesIO(file["buffer"]), "a.wav", 60)
    expected = Transcriber(speech_engine).transcribe(audio, options).whole()
    with serving(speech_engine, "--modelName", "hearing") as server:
        open_page(page, server)
        page.wait_for_selector("#record")
        assert "transcribes speech" in page.inner_text("#start p")
        for name in ("#text", "#send", "#temperature", ".examples"):
            assert not page.locator(name).is_visible()
        page.set_input_files("#file", [file])
        wait_answered(page)
        shown = page.locator(".assistant .markdown").text_content()
        assert shown.split() == expected.text.split()
        assert page.locator(".user audio").count() == 1
        page.click("#record")
        page.wait_for_selector("#record:text('End recording')")
        page.wait_for_timeout(1500)  # it beeps once a second
        page.click("#record")
        page.wait_for_function("() => document.querySelectorAll('.user audio').length === 2")
        page.wait_for_function(ANSWERED)
        assert page.locator(".fault").all_inner_texts() == []
