"""Temperatures, thresholds, silence and prompts: texts of transformers' `generate`."""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from speech_checkpoints import FIRST_TIMESTAMP, GREEDY, IDS, chirp, load_speech

from edgellm.core.errors import RequestError
from edgellm.device_runtime.transcription.options import TranscriptionOptions, rising_temperatures
from edgellm.device_runtime.transcription.transcriber import Transcriber

OPTIONS = TranscriptionOptions(language="de", timestamps="segment", **GREEDY)
SAMPLES = chirp(2.7)


@pytest.fixture(scope="module")
def model(speech_checkpoint):
    return load_speech(speech_checkpoint)


@pytest.fixture(scope="module")
def transcriber(speech_engine):
    return Transcriber(speech_engine)


@pytest.fixture(scope="module")
def features(speech_checkpoint):
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(speech_checkpoint)
    given = {"truncation": False, "padding": "longest", "return_tensors": "pt"}
    return extractor(SAMPLES, sampling_rate=16000, **given).input_features


@pytest.fixture(scope="module")
def generate(model, features):
    """Tokens of each segment by transformers, and what it found out about each window."""

    def run(**given):
        seen = []
        judge = model._need_fallback

        def need_fallback(tokens, outputs, index, processors, config, vocab_size, temperature):
            verdict = judge(tokens, outputs, index, processors, config, vocab_size, temperature)
            scores = outputs[index]["scores"]
            seen.append(
                (
                    float(model._retrieve_avg_logprobs(scores, tokens, temperature)),
                    float(processors[0].no_speech_prob[0]),
                    model._retrieve_compression_ratio(tokens, vocab_size),
                    *map(bool, verdict),
                )
            )
            return verdict

        given = {"temperature": (0.0,), "task": "transcribe", "language": "de", **given}
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(model, "_need_fallback", need_fallback)
            found = model.generate(features, return_timestamps=True, return_segments=True, **given)
        return [each["tokens"].tolist() for each in found["segments"][0]], seen

    return run


def _same(segments, expected):
    """Whether segments have these tokens; a window's last one has the next one's time, too."""
    found = [[*each.token_ids] for each in segments]
    return len(found) == len(expected) and all(
        own == theirs[: len(own)] and all(each >= FIRST_TIMESTAMP for each in theirs[len(own) :])
        for own, theirs in zip(found, expected, strict=True)
    )


def _windows(segments):
    """The first segment of each window."""
    return [*{each.seek: each for each in reversed(segments)}.values()][::-1]


# None applies
THRESHOLDS = {
    "compression_ratio_threshold": 9.0,
    "logprob_threshold": -99.0,
    "no_speech_threshold": 0.99,
}


@pytest.fixture(scope="module")
def unjudged(generate):
    return generate(**THRESHOLDS)


def test_windows_are_judged_as_by_transformers(transcriber, unjudged):
    """Averages of logarithms, and the probability of no speech."""
    expected, seen = unjudged
    segments = [*transcriber.transcribe(SAMPLES, replace(OPTIONS, **THRESHOLDS))]
    assert _same(segments, expected)
    windows = _windows(segments)
    assert len(windows) > 2
    found = [(each.avg_logprob, each.no_speech_prob) for each in windows]
    np.testing.assert_allclose(found, [each[:2] for each in seen], rtol=1e-4)


def test_compression_ratios_are_those_of_the_text(transcriber, monkeypatch):
    """As openai/whisper computes them: UTF-8 bytes by those after zlib."""
    with transcriber.window_decoder() as decoder:
        decode = decoder.decode
    repeated = (12, 13, 14) * 9
    monkeypatch.setattr(
        decoder,
        "decode",
        lambda *given, **more: replace(decode(*given, **more), token_ids=repeated),
    )
    (segment,) = transcriber.transcribe(chirp(0.8), OPTIONS)
    content = segment.text.encode()
    assert content.split() == [b"w12", b"w13", b"w14"] * 9
    assert segment.compression_ratio == len(content) / len(zlib.compress(content))


@pytest.mark.parametrize("key", ["compression_ratio_threshold", "logprob_threshold"])
def test_poor_texts_are_tried_again(transcriber, generate, unjudged, key):
    """For the same windows as in transformers; the second temperature is greedy, too."""
    values = sorted(each[0 if key == "logprob_threshold" else 2] for each in unjudged[1])
    given = {**THRESHOLDS, key: values[len(values) // 2] - 1e-4}
    _, judged = generate(**given)
    poor = [each[3] for each in judged]
    assert {*poor} == {True, False}
    options = replace(OPTIONS, **given, temperatures=(0.0, 1e-4))
    windows = _windows([*transcriber.transcribe(SAMPLES, options)])
    assert [each.temperature > 0 for each in windows] == poor


def test_silent_windows_have_no_text(transcriber, generate, unjudged):
    silence = sorted(each[1] for each in unjudged[1])
    given = {
        **THRESHOLDS,
        "logprob_threshold": 0.0,
        "no_speech_threshold": 0.99 * silence[len(silence) // 2],
    }
    expected, judged = generate(**given)
    assert {each[4] for each in judged} == {True, False}
    found = [*transcriber.transcribe(SAMPLES, replace(OPTIONS, **given))]
    assert _same(found, expected)


def test_samples_are_those_of_their_seed(transcriber):
    options = replace(OPTIONS, temperatures=(1.0,))
    texts = [
        [each.token_ids for each in transcriber.transcribe(SAMPLES, replace(options, seed=seed))]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert rising_temperatures(0.0) == (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    assert rising_temperatures(0.5, 0.0) == (0.5,)


PROMPT = [7, 9, 30, 55, 8]


@pytest.mark.parametrize(
    ("conditions", "prompted"),
    [
        (True, True),
        pytest.param(True, False, marks=pytest.mark.nightly),
        pytest.param(False, True, marks=pytest.mark.nightly),
    ],
)
def test_prompts_are_those_of_transformers(transcriber, generate, conditions, prompted):
    """Of a text before the recording, and of windows before each window."""
    given: dict[str, object] = {"condition_on_prev_tokens": conditions}
    if prompted:
        given["prompt_ids"] = torch.tensor([IDS["<|startofprev|>"], *PROMPT])
    expected, _ = generate(**THRESHOLDS, **given)
    options = replace(
        OPTIONS,
        **THRESHOLDS,
        condition_on_prev_tokens=conditions,
        prompt=" ".join(f"w{token}" for token in PROMPT) if prompted else "",
    )
    found = [*transcriber.transcribe(SAMPLES, options)]
    assert _same(found, expected)
    plain = [*transcriber.transcribe(SAMPLES, OPTIONS)]
    assert [each.token_ids for each in found] != [each.token_ids for each in plain]


def test_wrong_options_are_rejected(transcriber):
    for given, fragment in (
        ({"timestamps": "words"}, "timestamps 'words'"),
        ({"temperatures": ()}, "temperatures are empty"),
        ({"temperatures": (0.0, -1.0)}, "-1.0 is out of range"),
        ({"logprob_threshold": float("nan")}, "logprob_threshold: nan"),
        ({"seed": -1}, "seed -1"),
    ):
        with pytest.raises(RequestError, match=fragment) as caught:
            TranscriptionOptions(**given)
        assert caught.value.hint
    with pytest.raises(RequestError, match=r"special token <\|startoftranscript\|>"):
        transcriber.transcribe(SAMPLES, replace(OPTIONS, prompt="w1 <|startoftranscript|>"))
