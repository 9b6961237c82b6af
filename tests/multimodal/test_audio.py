"""Audio files of all formats as samples, and their log-mel features as transformers has them."""

from __future__ import annotations

import importlib.util
import wave

import av
import numpy as np
import pytest
from speech_checkpoints import chirp, write_wav

from edgellm.core.errors import RequestError
from edgellm.multimodal.audio import decode_audio, read_audio
from edgellm.multimodal.log_mel import log_mel

SECONDS = 1.5


@pytest.mark.parametrize("num_mel_bins", [80, 128])
def test_features_are_those_of_transformers(num_mel_bins):
    """Within 1e-5 of its NumPy form; its float32 form in torch differs from that by as much."""
    import transformers

    features = transformers.WhisperFeatureExtractor(feature_size=num_mel_bins, chunk_length=3)
    for samples in (chirp(3), 0.01 * chirp(3, seed=1), np.pad(chirp(1), (0, 32000))):
        found = log_mel(samples, num_mel_bins)
        expected = features._np_extract_fbank_features(samples[None], "cpu")[0]
        in_torch = features(samples, sampling_rate=16000).input_features[0]
        assert found.dtype == np.float32
        assert found.shape == (num_mel_bins, 300)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
        np.testing.assert_allclose(found, in_torch, rtol=0, atol=1e-4)


def test_long_audio_is_computed_in_blocks(monkeypatch):
    whole = log_mel(chirp(2), 80)
    monkeypatch.setattr("edgellm.multimodal.log_mel._BLOCK", 7)
    np.testing.assert_array_equal(log_mel(chirp(2), 80), whole)


def test_wav_samples_are_exact(tmp_path):
    samples = chirp(SECONDS)
    found = read_audio(write_wav(tmp_path / "a.wav", samples))
    np.testing.assert_array_equal(found, (samples * 32767).round().astype(np.float32) / 32768)
    (tmp_path / "a.PCM").write_bytes((samples * 32767).round().astype("<i2").tobytes())
    np.testing.assert_array_equal(read_audio(tmp_path / "a.PCM"), found)


def test_channels_are_mixed(tmp_path):
    left, right = chirp(SECONDS), chirp(SECONDS, seed=1)
    path = write_wav(tmp_path / "a.wav", np.stack([left, right], axis=1))
    np.testing.assert_allclose(read_audio(path), (left + right) / 2, atol=1e-4)


def _encode(path, codec, rate, samples, **tags):
    """Write samples [1, N] by FFmpeg."""
    with av.open(str(path), "w") as container:
        container.metadata.update(tags)
        stream = container.add_stream(codec, rate=rate, layout="mono")
        size = stream.codec_context.frame_size or None
        resampler = av.AudioResampler(stream.codec_context.format, "mono", rate, size)
        frame = av.AudioFrame.from_ndarray(samples, "flt", "mono")
        frame.sample_rate = rate
        for piece in (*resampler.resample(frame), *resampler.resample(None)):
            container.mux(stream.encode(piece))
        container.mux(stream.encode(None))


@pytest.mark.parametrize(
    ("suffix", "codec", "rate"),
    [
        ("flac", "flac", 16000),
        ("wav", "pcm_f32le", 44100),
        ("ogg", "libopus", 48000),
        ("mp3", "libmp3lame", 44100),
        ("m4a", "aac", 48000),
    ],
)
def test_formats_and_rates(tmp_path, suffix, codec, rate):
    """A tone of 440 Hz is one, whatever the codec, within the silence that codecs add."""
    at = np.arange(int(rate * SECONDS)) / rate
    tone = (0.5 * np.sin(2 * np.pi * 440 * at)).astype(np.float32)[None]
    path = tmp_path / f"a.{suffix}"
    _encode(path, codec, rate, tone)
    found = read_audio(path)
    assert len(found) / 16000 == pytest.approx(SECONDS, abs=0.15)
    middle = found[4000:20000]
    spectrum = np.abs(np.fft.rfft(middle))
    assert spectrum.argmax() == 440
    assert middle.std() == pytest.approx(0.5 / np.sqrt(2), abs=0.05)


def test_tags_of_other_encodings(tmp_path):
    """Old MP3 files have titles in Latin-1."""
    path = tmp_path / "a.flac"
    _encode(path, "flac", 16000, chirp(SECONDS)[None], title="Uebung")
    path.write_bytes(path.read_bytes().replace(b"Uebung", b"\xdcbungX"))
    assert len(read_audio(path)) == 16000 * SECONDS


def _video(path):
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        for _ in range(3):
            container.mux(stream.encode(av.VideoFrame(32, 32, "yuv420p")))
        container.mux(stream.encode(None))


def test_bad_files(tmp_path):
    """One line each, with a remedy."""
    good = write_wav(tmp_path / "good.wav", chirp(SECONDS)).read_bytes()
    (tmp_path / "text.wav").write_text("no sound at all")
    (tmp_path / "empty.wav").write_bytes(b"")
    (tmp_path / "header.wav").write_bytes(good[:44])
    (tmp_path / "odd.raw").write_bytes(good[:1001])
    write_wav(tmp_path / "silent.wav", np.zeros(16000, np.float32))
    _encode(tmp_path / "nan.wav", "pcm_f32le", 16000, np.full((1, 16000), np.nan, np.float32))
    _video(tmp_path / "film.mp4")
    for name, fragment in (
        ("missing.wav", "does not exist"),
        (".", "not a regular file"),
        ("text.wav", "no audio that can be read"),
        ("empty.wav", "no audio that can be read"),
        ("header.wav", "no audio samples"),
        ("odd.raw", "1001 bytes, which are no 16-bit samples"),
        ("silent.wav", "is silent: all of its 1.0 s"),
        ("nan.wav", "samples that are no numbers"),
        ("film.mp4", "holds no audio"),
    ):
        with pytest.raises(RequestError, match=fragment) as caught:
            read_audio(tmp_path / name)
        assert caught.value.hint
        assert "\n" not in str(caught.value)


def test_a_copy_that_was_cut_short(tmp_path):
    """The samples of a WAV file that are there are read, as players do."""
    path = write_wav(tmp_path / "a.wav", chirp(SECONDS))
    whole = read_audio(path)
    path.write_bytes(path.read_bytes()[:20044])
    np.testing.assert_array_equal(read_audio(path), whole[:10000])
    with wave.open(str(path)) as file:
        assert file.getnframes() == len(whole)


def test_without_pyav(tmp_path, monkeypatch):
    path = write_wav(tmp_path / "a.wav", chirp(SECONDS))
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "av" else find(name)
    )
    with pytest.raises(RequestError, match="need PyAV") as caught:
        read_audio(path)
    assert "edgellm[audio]" in caught.value.hint


def test_long_audio_is_rejected_while_it_is_decoded(tmp_path):
    path = write_wav(tmp_path / "a.wav", chirp(3))
    with path.open("rb") as file:
        assert len(decode_audio(file, "the file", 3.0)) == 48000
    with path.open("rb") as file, pytest.raises(RequestError, match=r"more than 2\.9 s") as caught:
        decode_audio(file, "the file", 2.9)
    assert caught.value.hint == "cut it into shorter ones"
