"""Times of words: those of transformers' `generate`, its alignment and its pipeline."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from speech_checkpoints import FIRST_TIMESTAMP, GREEDY, chirp, load_speech
from transformers.models.whisper import generation_whisper, tokenization_whisper

from edgellm.device_runtime.transcription.options import TranscriptionOptions
from edgellm.device_runtime.transcription.transcriber import Transcriber
from edgellm.device_runtime.transcription.word_times import first_positions, split_words


@pytest.fixture(scope="module")
def model(speech_checkpoint):
    return load_speech(speech_checkpoint)


@pytest.mark.parametrize(("tokens", "positions"), [(1, 9), (7, 50), (30, 12), (5, 3)])
def test_paths_are_those_of_transformers(model, tokens, positions):
    random = np.random.default_rng(tokens)
    weights = random.dirichlet(np.ones(positions), (3, tokens)).astype(np.float32)
    outputs = transformers.generation.utils.GenerateEncoderDecoderOutput(
        sequences=torch.zeros(1, tokens + 1, dtype=torch.long),
        cross_attentions=[tuple(torch.from_numpy(weights)[None] for _ in range(3))],
    )
    heads = [[0, 0], [1, 1], [2, 2]]
    expected = model._extract_token_timestamps(outputs, heads, num_input_ids=0)
    found = 0.02 * first_positions(weights, model.config.median_filter_width)
    np.testing.assert_allclose(found, expected[0, :-1].numpy(), atol=1e-6)


@pytest.mark.parametrize("seconds", [0.7, 2.7])
def test_words_have_the_times_of_transformers(model, speech_engine, speech_checkpoint, seconds):
    """Times of each token, in one window and in several."""
    samples = chirp(seconds)
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(speech_checkpoint)
    padding = {"truncation": False, "padding": "longest"} if seconds > 1 else {}
    features = extractor(
        samples, sampling_rate=16000, return_tensors="pt", return_attention_mask=True, **padding
    )
    with torch.no_grad():
        found = model.generate(
            **features,
            return_timestamps=True,
            return_token_timestamps=True,
            return_segments=True,
            language="en",
            task="transcribe",
        )
    expected = []
    for segment in found["segments"][0]:
        first = segment["idxs"][0]
        window = segment["result"]["token_timestamps"]
        offset = float(segment["token_timestamps"][0] - window[first])
        for at, token in enumerate(segment["tokens"].tolist()):
            if token < FIRST_TIMESTAMP:
                times = [float(window[first + at - 1 + n]) + offset for n in (0, 1)]
                expected.append((f" w{token}", *times))
    options = TranscriptionOptions(language="en", timestamps="word", **GREEDY)
    words = [
        (word.text, word.start_s, word.end_s)
        for each in Transcriber(speech_engine).transcribe(samples, options)
        for word in each.words
    ]
    assert [word[0] for word in words] == [word[0] for word in expected]
    times = np.array([word[1:] for word in words])
    np.testing.assert_allclose(times, [word[1:] for word in expected], atol=1e-5)
    assert len({*times[:, 1]}) >= 3
    assert times.max() <= seconds


TEXTS = (
    " Good morning, (she said) 'well' - and \"so\" it... went!",
    "Ärger über 1,5 € - ja?  Nein.",
    " ¿Qué? [música] 10:30",
    "今日は天気がいいですね。",
    " 你好 world\ufffd",
)


@pytest.mark.parametrize("language", ["en", "ja"])
@pytest.mark.parametrize("text", TEXTS)
def test_words_are_split_as_by_transformers(text, language):
    """Tokens are single bytes, or pairs of them."""
    data = text.encode()
    for size in (1, 2):
        pieces = [data[at : at + size] for at in range(0, len(data), size)]

        class Tokens:
            eos_token_id = len(pieces)

            def decode(self, ids, **_):
                return b"".join(pieces[each] for each in ids).decode(errors="replace")  # noqa: B023

        names = {"en": "english", "ja": "japanese"}
        words, _, places = tokenization_whisper._combine_tokens_into_words(
            Tokens(), [*range(len(pieces))], names[language]
        )
        found = split_words(pieces, language)
        assert [each.text for each in found] == words
        assert [[*range(each.begin, each.end)] for each in found] == places


def test_median_filter_and_warping_are_those_of_transformers():
    random = np.random.default_rng(2)
    weights = random.random((2, 6, 20)).astype(np.float32)
    normed = (weights - weights.mean(1, keepdims=True)) / weights.std(1, keepdims=True)
    filtered = generation_whisper._median_filter(torch.from_numpy(normed), 5).numpy()
    text, time = generation_whisper._dynamic_time_warping(-filtered.mean(0).astype(np.float64))
    expected = [time[[*text].index(token)] for token in range(6)]
    assert first_positions(weights, 5).tolist() == expected
