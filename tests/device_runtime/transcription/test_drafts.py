"""Speculation: texts, times and qualities are those of decoding token by token, bit for bit."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
from conftest import assert_one_line_error
from safetensors.numpy import load_file, save_file
from speech_checkpoints import build_speech, chirp, make_speech, write_wav

from edgellm.core.errors import EdgeLLMError
from edgellm.core.manifest import LLM_ENGINE, load_engine
from edgellm.device_runtime.networks.speech import SpeechNetwork, open_speech
from edgellm.device_runtime.transcription.options import TranscriptionOptions
from edgellm.device_runtime.transcription.transcriber import Transcriber

NAME, ENCODER = "model.safetensors", "model.encoder."
OPTIONS = TranscriptionOptions(language="de", timestamps="word", temperatures=(0.0,))
SAMPLES = chirp(1.8)


@pytest.fixture(scope="module")
def smaller(tmp_path_factory):
    """A model with one layer and 40 mel bins, whose drafts are often wrong."""
    folder = tmp_path_factory.mktemp("smaller")
    sizes = {"decoder_layers": 1, "d_model": 24, "num_mel_bins": 40}
    heads = {"alignment_heads": [[0, 1]]}
    checkpoint = make_speech(folder / "model", seed=5, decoding=heads, **sizes)
    return build_speech(folder, checkpoint)


@pytest.fixture(scope="module")
def distilled(speech_checkpoint, tmp_path_factory):
    """A model with the encoder of the other, in float16, and a decoder of one layer."""
    folder = tmp_path_factory.mktemp("distilled")
    make_speech(folder / "model", seed=6, decoding={"alignment_heads": [[0, 1]]}, decoder_layers=1)
    path, teacher = folder / "model" / "model.safetensors", load_file(speech_checkpoint / NAME)
    own = {name: each for name, each in load_file(path).items() if not name.startswith(ENCODER)}
    taken = {name: each for name, each in teacher.items() if name.startswith(ENCODER)}
    halves = {name: each.astype(np.float16) for name, each in {**own, **taken}.items()}
    save_file(halves, path, {"format": "pt"})
    return build_speech(folder, folder / "model")


@pytest.fixture
def encoded(monkeypatch):
    """Networks whose encoders ran."""
    found, encode = [], SpeechNetwork.encode

    def run(self, features):
        found.append(self)
        return encode(self, features)

    monkeypatch.setattr(SpeechNetwork, "encode", run)
    return found


@pytest.fixture
def passes(monkeypatch):
    """Numbers of tokens of all passes."""
    sizes, run = [], SpeechNetwork.logits

    def logits(self, token_ids, rows):
        sizes.append((self, len(token_ids)))
        return run(self, token_ids, rows)

    monkeypatch.setattr(SpeechNetwork, "logits", logits)
    return sizes


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["ngram", "same", "smaller"])
def test_drafts_change_nothing_but_the_passes(speech_engine, smaller, passes, kind, temperature):
    """Of n-grams, of the model itself, whose drafts are right, and of another model."""
    options = replace(OPTIONS, temperatures=(temperature,))
    expected = [*Transcriber(speech_engine).transcribe(SAMPLES, options)]
    plain = len(passes)
    passes.clear()
    draft = {"ngram": "ngram", "same": speech_engine, "smaller": smaller}[kind]
    transcriber = Transcriber(speech_engine, draft)
    assert [*transcriber.transcribe(SAMPLES, options)] == expected
    assert len(expected) > 2
    base = passes[-1][0] if kind == "ngram" else passes[0][0]
    own = [size for network, size in passes if network is base]
    assert len(own) <= plain
    if kind == "same" or (kind, temperature) == ("ngram", 0.0):
        assert len(own) < plain


def test_a_draft_with_the_encoder_of_its_teacher_does_not_encode(
    speech_engine, distilled, smaller, encoded, passes
):
    """Equal weights are found by their values, of any precision."""
    expected = [*Transcriber(speech_engine).transcribe(SAMPLES, OPTIONS)]
    windows = len(encoded)
    for draft, networks in ((distilled, 1), (smaller, 2)):
        encoded.clear()
        passes.clear()
        assert [*Transcriber(speech_engine, draft).transcribe(SAMPLES, OPTIONS)] == expected
        assert len({*encoded}) == networks
        assert len(encoded) == networks * windows
        assert len({network for network, _ in passes}) == 2


def test_a_shared_encoder_gives_the_draft_its_own_logits(speech_engine, distilled):
    """Those of an engine that encodes itself."""
    features = np.random.default_rng(0).standard_normal((80, 100), np.float32)
    tokens = np.arange(7, 19)
    manifest = load_engine(distilled, LLM_ENGINE)
    alone = open_speech(distilled, manifest)
    alone.listen(alone.encode(features))
    shared = open_speech(distilled, manifest, has_encoder=False)
    base = open_speech(speech_engine, load_engine(speech_engine, LLM_ENGINE))
    shared.listen(base.encode(features))
    found, expected = (each.next_logits(tokens) for each in (shared, alone))
    # The weights of one are rounded to float16
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.05)
    assert np.abs(expected).max() > 1


def test_engines_of_an_older_edgellm_are_rejected(speech_engine):
    engine = load_engine(speech_engine, LLM_ENGINE)
    graphs = {role: each for role, each in engine.graphs.items() if role != "cross_kv"}
    with pytest.raises(EdgeLLMError, match="made by an older edgellm") as caught:
        open_speech(speech_engine, replace(engine, graphs=graphs))
    assert "edgellm-export llm" in caught.value.hint


def test_drafts_with_other_tokens_are_rejected(speech_engine, tiny_engine, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(speech_engine, other)
    content = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(content.replace("▁w99", "▁u99"))
    with pytest.raises(EdgeLLMError, match="other tokens") as caught:
        Transcriber(speech_engine, other, verify=False)
    assert "same tokenizer" in caught.value.hint
    with pytest.raises(EdgeLLMError, match=r"language model \(llama\)"):
        Transcriber(speech_engine, tiny_engine)


def test_the_command_speculates(command_here, speech_engine, smaller, tmp_path, passes):
    recording = write_wav(tmp_path / "a.wav", SAMPLES)
    given = "edgellm", "transcribe", recording, speech_engine, "--language", "de"
    given += "--temperature_increment_on_fallback", "0"
    plain = command_here(*given)
    assert plain.returncode == 0
    for draft in ("ngram", smaller):
        found = command_here(*given, "--draft", draft)
        assert (found.returncode, found.stdout) == (0, plain.stdout)
    assert len({network for network, _ in passes}) == 4
    assert_one_line_error(command_here(*given, "--draft", tmp_path / "none"), "none")
