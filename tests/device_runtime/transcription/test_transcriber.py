"""Transcripts: rules, segments and text are those of transformers' greedy `generate`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from speech_checkpoints import (
    DECODING,
    ENGLISH,
    FIRST_TIMESTAMP,
    GREEDY,
    IDS,
    build_speech,
    chirp,
    load_speech,
    make_speech,
)
from tokenizers import Tokenizer
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from edgellm.core.errors import EdgeLLMError, RequestError
from edgellm.core.manifest import LLM_ENGINE, load_engine
from edgellm.device_runtime import LLM
from edgellm.device_runtime.transcription.decoding_rules import DecodingRules
from edgellm.device_runtime.transcription.languages import NAMES, code_of
from edgellm.device_runtime.transcription.options import TranscriptionOptions
from edgellm.device_runtime.transcription.parts import Part
from edgellm.device_runtime.transcription.segments import split_window
from edgellm.device_runtime.transcription.speech_detector import Region
from edgellm.device_runtime.transcription.transcriber import Transcriber
from edgellm.device_runtime.transcription.window_decoder import Prompt
from edgellm.device_runtime.transcription.windows import PartWindows

END, VOCABULARY = IDS["<|endoftext|>"], FIRST_TIMESTAMP + 51


@pytest.fixture(scope="module")
def spec(speech_engine):
    return load_engine(speech_engine, LLM_ENGINE).decoder.audio


@pytest.fixture(scope="module")
def model(speech_checkpoint):
    return load_speech(speech_checkpoint)


@pytest.fixture(scope="module")
def transcriber(speech_engine):
    return Transcriber(speech_engine)


def _texts(random, count):
    """Random texts of a window, in which timestamps are as frequent as words."""
    for _ in range(count):
        ids = random.integers(0, END, 7)
        times = np.sort(random.integers(FIRST_TIMESTAMP, VOCABULARY, 7))
        yield np.where(random.random(7) < 0.5, ids, times)[: random.integers(0, 8)].tolist()


@pytest.mark.parametrize("timestamps", [False, True])
def test_rules_choose_the_token_of_transformers(spec, timestamps):
    config = transformers.GenerationConfig(**DECODING)
    prompt, random = [101, 102, 105], np.random.default_rng(0)
    processors = [
        SuppressTokensAtBeginLogitsProcessor(DECODING["begin_suppress_tokens"], len(prompt)),
        SuppressTokensLogitsProcessor(DECODING["suppress_tokens"]),
    ]
    if timestamps:
        processors.append(WhisperTimeStampLogitsProcessor(config, begin_index=len(prompt)))
    rules, chosen = DecodingRules(spec, END, timestamps=timestamps), set()
    for text in _texts(random, 300):
        logits = random.normal(0, 3, VOCABULARY).astype(np.float32)
        logits[FIRST_TIMESTAMP:] -= random.integers(0, 6)
        scores = torch.from_numpy(logits.copy())[None]
        for processor in processors:
            scores = processor(torch.tensor([prompt + text]), scores)
        rules.apply(logits, text)
        token = int(logits.argmax())
        assert token == int(scores.argmax())
        chosen.add(token)
    assert min(chosen) < END  # words
    assert max(chosen) >= FIRST_TIMESTAMP


def test_windows_are_cut_as_transformers_cuts_them(spec, model):
    random, seen = np.random.default_rng(1), set()
    for text in _texts(random, 300):
        frames = int(random.integers(2, 101))
        expected, offset = model._retrieve_segment(
            seek_sequence=torch.tensor(text, dtype=torch.long),
            seek_outputs=[None],
            time_offset=torch.zeros(1, dtype=torch.float64),
            timestamp_begin=FIRST_TIMESTAMP,
            seek_num_frames=torch.tensor([frames]),
            time_precision=0.02,
            time_precision_features=0.01,
            input_stride=2,
            prev_idx=0,
            idx=0,
            return_token_timestamps=False,
            decoder_input_ids=torch.zeros(1, 3),
        )
        spans, covered = split_window(spec, text, frames)
        times = [float(each[place]) for each in expected for place in ("start", "end")]
        steps = [place for each in spans for place in (each.begin, each.end)]
        # Without a timestamp transformers divides frames in float32, which may lose a step.
        is_exact = any(token > FIRST_TIMESTAMP for token in text)
        assert np.multiply(steps, 0.02) == pytest.approx(times, abs=1e-6 if is_exact else 0.021)
        assert covered == int(offset)
        seen.add((len(spans) > 1, covered == frames))
    assert len(seen) == 4


def _features(checkpoint, samples):
    features = transformers.WhisperFeatureExtractor.from_pretrained(checkpoint)
    padding = {"truncation": False, "padding": "longest"} if len(samples) > 16000 else {}
    return features(samples, sampling_rate=16000, return_tensors="pt", **padding).input_features


def _generated(model, checkpoint, samples, *, timestamps, language=None, task=None, **given):
    """Token ids of transformers' `generate`, without timestamps."""
    with torch.no_grad():
        found = model.generate(
            _features(checkpoint, samples),
            return_timestamps=timestamps,
            language=language,
            task=task,
            **given,
        )
    return [token for token in found[0].tolist() if token < FIRST_TIMESTAMP]


@pytest.mark.parametrize(
    ("seconds", "timestamps", "language", "task"),
    [
        (0.5, False, None, "transcribe"),
        (1.0, False, "de", "translate"),
        (0.7, True, None, "transcribe"),
        (2.7, True, "en", "translate"),
        pytest.param(5.3, True, None, "transcribe", marks=pytest.mark.nightly),
    ],
)
def test_text_is_that_of_transformers(
    model, transcriber, speech_checkpoint, seconds, timestamps, language, task
):
    samples = chirp(seconds)
    times = "segment" if timestamps else "none"
    options = TranscriptionOptions(language=language, task=task, timestamps=times, **GREEDY)
    found = transcriber.transcribe(samples, options)
    segments = list(found)
    expected = _generated(
        model, speech_checkpoint, samples, timestamps=timestamps, language=language, task=task
    )
    tokenizer = Tokenizer.from_file(str(speech_checkpoint / "tokenizer.json"))
    assert found.text(segments) == tokenizer.decode(expected)
    assert len(expected) > 3
    ends = [0.0, *(each.end_s for each in segments)]
    if timestamps:  # random weights write times without being asked, in any order
        assert ends == sorted(ends)
    assert ends[-1] <= found.duration_s == len(samples) / 16000
    assert found.language == language or language is None


def test_a_long_recording_has_timestamps_without_being_asked(transcriber):
    samples = chirp(1.8)
    asked = TranscriptionOptions(language="en", timestamps="segment", **GREEDY)
    first = list(transcriber.transcribe(samples, asked))
    again = list(transcriber.transcribe(samples, TranscriptionOptions(language="en", **GREEDY)))
    assert first == again
    assert len(first) > 1


def test_english_models_have_no_languages(tmp_path):
    """Their prompts have neither a language nor a task."""
    checkpoint = make_speech(tmp_path / "model", seed=3, decoding=ENGLISH)
    transcriber, samples = Transcriber(build_speech(tmp_path, checkpoint)), chirp(0.6)
    found = transcriber.transcribe(samples, TranscriptionOptions(**GREEDY))
    model = load_speech(checkpoint)
    expected = _generated(model, checkpoint, samples, timestamps=False)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    assert found.text(list(found)) == tokenizer.decode(expected)
    assert found.language == "en"
    for options, fragment in (
        (TranscriptionOptions(language="de"), "language 'de'"),
        (TranscriptionOptions(task="translate"), "no task 'translate'"),
    ):
        with pytest.raises(RequestError, match=fragment):
            transcriber.transcribe(samples, options)


def test_unknown_languages_are_rejected(transcriber):
    with pytest.raises(RequestError, match="language 'xx'") as caught:
        transcriber.transcribe(chirp(0.1), TranscriptionOptions(language="xx"))
    assert caught.value.hint == "give one of its languages: de, en"


def test_language_models_and_speech_models_are_told_apart(speech_engine, tiny_engine):
    with pytest.raises(EdgeLLMError, match=r"language model \(llama\)"):
        Transcriber(tiny_engine)
    with pytest.raises(EdgeLLMError, match=r"speech model \(whisper\)") as caught:
        LLM(speech_engine)
    assert "edgellm transcribe" in caught.value.hint


def test_languages_are_known_by_code_and_name(transcriber):
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    assert NAMES == LANGUAGES
    assert [code_of(each) for each in ("DE", "German", "xx")] == ["de", "de", "xx"]
    named, coded = (
        transcriber.transcribe(chirp(0.5), TranscriptionOptions(language=each))
        for each in ("German", "de")
    )
    assert named.language == coded.language == "de"


@pytest.mark.parametrize("prefix", [(), (7, 9, 11, 13)])
def test_a_text_may_begin_with_given_tokens(transcriber, model, spec, speech_checkpoint, prefix):
    """The rest is that of transformers' logits, token by token."""
    samples, ids = chirp(0.8), [101, 103, 105, IDS["<|notimestamps|>"]]
    part = Part(samples, (Region(0, len(samples)),))
    with transcriber.window_decoder() as decoder:
        decoder.listen(next(iter(PartWindows(part, spec, 0))))
        found = decoder.decode(
            Prompt((), tuple(ids)),
            timestamps=False,
            temperature=0,
            seed=0,
            aligns=False,
            before_pass=lambda: None,
            prefix=prefix,
        )
    begin, given = len(ids), [*ids, *prefix]
    suppressed, chances = DECODING["suppress_tokens"], []
    with torch.no_grad():
        hidden = model.model.encoder(_features(speech_checkpoint, samples))
        while given[-1] != END and len(given) < 48:
            logits = model(encoder_outputs=hidden, decoder_input_ids=torch.tensor([given])).logits
            scores = logits[0, -1]
            scores[suppressed] = -np.inf
            if len(given) == begin:
                scores[DECODING["begin_suppress_tokens"]] = -np.inf
            given.append(int(scores.argmax()))
            chances.append(float(scores.log_softmax(0).max()))
    assert [*found.token_ids, *found.end] == given[begin:]
    assert found.avg_logprob == pytest.approx(np.mean(chances), abs=1e-4)
    wanted = [np.nan] * len(prefix) + chances
    np.testing.assert_allclose(found.logprobs, wanted, rtol=0, atol=1e-4)
    assert len(chances) > 3
