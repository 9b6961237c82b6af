"""Recordings of several threads share passes; their texts, times and values do not change."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from speech_checkpoints import build_speech, chirp, write_wav

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.networks.decoder import DecoderNetwork
from edgellm.device_runtime.networks.shared_passes import SharedPasses
from edgellm.device_runtime.transcription.options import TranscriptionOptions
from edgellm.device_runtime.transcription.transcriber import Transcriber

OPTIONS = TranscriptionOptions(timestamps="word")
LENGTHS = (1.3, 0.4, 1.2, 0.7)


@pytest.fixture(scope="module")
def batch_engine(speech_engine, speech_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("batch")
    shutil.copytree(speech_engine.parent / "bundle", folder / "bundle")
    return build_speech(folder, speech_checkpoint, max_batch_size=3)


@pytest.fixture
def batches(monkeypatch):
    """Numbers of sequences of all passes."""
    sizes, run = [], DecoderNetwork.run_batch

    def run_batch(self, parts):
        sizes.append(len(parts))
        return run(self, parts)

    monkeypatch.setattr(DecoderNetwork, "run_batch", run_batch)
    return sizes


@pytest.mark.parametrize("draft", ["", pytest.param("ngram", marks=pytest.mark.nightly)])
def test_texts_do_not_depend_on_the_batch(batch_engine, batches, draft):
    """With temperatures, detected languages and times of words."""
    samples = [chirp(length, seed=at) for at, length in enumerate(LENGTHS)]
    with Transcriber(batch_engine, draft) as model:
        expected = [model.transcribe(each, OPTIONS).whole() for each in samples]
        assert {*batches} == {1}
        batches.clear()
        with ThreadPoolExecutor(len(samples)) as threads:
            found = [*threads.map(lambda each: model.transcribe(each, OPTIONS).whole(), samples)]
    assert found == expected
    assert max(batches) == 3
    assert len({each.text for each in found}) == len(samples)
    assert any(each.words for transcript in found for each in transcript)


def test_an_engine_for_one_window_computes_one_at_a_time(speech_engine, batches):
    model, samples = Transcriber(speech_engine), [chirp(0.5), chirp(0.8)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda each: model.transcribe(each, OPTIONS).whole(), samples))
    assert {*batches} == {1}


def test_an_error_of_one_does_not_stop_the_others(batch_engine):
    """It ends between two passes, while the others wait for its next one."""
    samples = [chirp(1.9, seed=at) for at in range(3)]
    with Transcriber(batch_engine) as model:
        expected = [model.transcribe(each, OPTIONS).whole() for each in samples[:2]]
        failing, count = model.transcribe(samples[2], OPTIONS), iter(range(100))

        def fail():
            if next(count) == 5:
                raise ValueError("it ends")

        failing.before_pass = fail
        with ThreadPoolExecutor(3) as threads:
            bad = threads.submit(failing.whole)
            good = [threads.submit(model.transcribe(each, OPTIONS).whole) for each in samples[:2]]
            assert [each.result() for each in good] == expected
            with pytest.raises(ValueError, match="it ends"):
                bad.result()
    with pytest.raises(EdgeLLMError, match="was closed"):
        failing.whole()


def test_a_failed_pass_fails_all_of_its_parts():
    class Network:
        def run_batch(self, parts):
            raise MemoryError(len(parts))

    passes, errors = SharedPasses(Network()), []
    barrier = threading.Barrier(3)

    def work():
        with passes.decoding():
            barrier.wait()
            try:
                passes.run(None)
            except MemoryError as error:
                errors.append(error.args)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert errors == [(3,)] * 3


def test_files_of_the_command_share_passes(command_here, batch_engine, batches, tmp_path):
    """Each file has the text of the file alone; a broken one does not stop the others."""
    files = [write_wav(tmp_path / f"{at}.wav", chirp(1.5, seed=at)) for at in range(4)]
    (tmp_path / "broken.wav").write_bytes(b"RIFF")
    flags = batch_engine, "--language", "de"
    expected = [command_here("edgellm", "transcribe", each, *flags).stdout for each in files]
    assert {*batches} == {1}
    given = files[0], tmp_path / "broken.wav", *files[1:], *flags, "--output_dir", tmp_path / "out"
    result = command_here("edgellm", "transcribe", *given)
    assert result.returncode == 2
    assert [line.partition("out/")[2] for line in result.stdout.splitlines()] == [
        f"{at}.txt" for at in range(4)
    ]
    assert "1 of 5 files were not transcribed" in result.stderr
    assert [(tmp_path / "out" / f"{at}.txt").read_text() for at in range(4)] == expected
    assert max(batches) > 1
    assert len(np.unique(expected)) == 4
