"""`edgellm serve` with a speech model and its draft."""

from __future__ import annotations

import pytest
from conftest import assert_one_line_error
from speech_checkpoints import chirp, make_speech, write_wav

from edgellm.core.manifest import LLM_ENGINE, load_engine
from edgellm.device_runtime.networks.speech import SpeechNetwork
from edgellm.device_runtime.transcription.options import TranscriptionOptions
from edgellm.device_runtime.transcription.transcriber import Transcriber
from edgellm.multimodal.audio import read_audio
from edgellm.tools.serve import cli
from edgellm.tools.serve.engines.loading import Loading

OPTIONS = TranscriptionOptions(language="de", temperatures=(0.0,))


@pytest.fixture
def serve(command_here, monkeypatch, tmp_path):
    """Run the command without a server: the result, and what a server would load engines with."""
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / "home"))
    loadings = []
    monkeypatch.setattr(cli, "_run", lambda *_: None)
    prepare = Loading.prepare
    monkeypatch.setattr(
        Loading,
        "prepare",
        lambda self, given: (loadings.append((self, given)), prepare(self, given)),
    )

    def run(*words):
        return command_here("edgellm", "serve", *words, "--port", 0), loadings

    return run


def test_a_speech_model_drafts_by_another(serve, speech_engine, tmp_path, monkeypatch):
    result, loadings = serve(speech_engine, "--draft", speech_engine)
    assert result.returncode == 0, result.stderr
    ((loading, (model,)),) = loadings
    path, networks, run = write_wav(tmp_path / "a.wav", chirp(1.9)), set(), SpeechNetwork.logits
    expected = Transcriber(speech_engine).transcribe(read_audio(path), OPTIONS).whole()

    def logits(self, token_ids, rows):
        networks.add(self)
        return run(self, token_ids, rows)

    monkeypatch.setattr(SpeechNetwork, "logits", logits)
    assert loading.load(model).transcribe(read_audio(path), OPTIONS).whole() == expected
    assert len(networks) == 2


@pytest.mark.nightly
def test_checkpoints_of_both_are_made_to_engines(serve, speech_checkpoint, tmp_path):
    """The engine of the model is stored once, with any draft."""
    smaller = make_speech(tmp_path / "smaller", seed=5, decoder_layers=1, d_model=24)
    result, loadings = serve(speech_checkpoint, "--draft", smaller)
    assert result.returncode == 0, result.stderr
    loading, (model,) = loadings[0]
    folders = model.folder, loading.spec.draft_engine_dir
    sizes = [load_engine(each, LLM_ENGINE).decoder.hidden_size for each in folders]
    assert sizes == [48, 24]
    again, _ = serve(speech_checkpoint)
    assert (again.returncode, again.stderr) == (0, "")
    loading, (model,) = loadings[1]
    assert (model.folder, loading.spec.draft_engine_dir) == (folders[0], None)


def test_drafts_that_a_speech_model_cannot_have(serve, speech_engine, tiny_engine):
    for flags, message in (
        (("--draft", "/nowhere/at/all"), "no such folder or file: /nowhere/at/all"),
        (("--draft", tiny_engine), "has a language model (llama), not a speech model"),
        (("--draft", speech_engine, "--ngram"), "and another flag of speculation are given"),
    ):
        result, _ = serve(speech_engine, *flags)
        assert_one_line_error(result, message)
