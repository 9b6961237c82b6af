"""Transcribes recordings with a speech model's engine, window by window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgellm.core.artifact import verify_sizes
from edgellm.core.errors import EdgeLLMError, RequestError
from edgellm.core.manifest import LLM_ENGINE, Engine, load_engine
from edgellm.core.model_spec import AudioSpec
from edgellm.device_runtime.arrays import F32
from edgellm.device_runtime.networks.speech import open_speech
from edgellm.device_runtime.speculate.drafters.draft import require_same_tokens
from edgellm.device_runtime.text.tokenizer import ChatTokenizer, TextStream
from edgellm.device_runtime.transcription.drafts import NGRAM, Draft, ModelDraft, NgramDraft
from edgellm.device_runtime.transcription.options import (
    NO_TIMES,
    TRANSCRIBE,
    WORD_TIMES,
    TranscriptionOptions,
)
from edgellm.device_runtime.transcription.segments import FRAME_S, Span, split_window
from edgellm.device_runtime.transcription.window_decoder import Prompt, WindowDecoder
from edgellm.device_runtime.transcription.window_text import WindowText, compression_ratio
from edgellm.device_runtime.transcription.word_times import Word, split_words
from edgellm.multimodal.audio import SAMPLE_RATE
from edgellm.multimodal.log_mel import HOP, log_mel

_STEP_S = 2 * FRAME_S
_START_TOKENS = 5  # of a prompt, besides earlier text
_CONDITIONS_BELOW = 0.5  # the temperature of a text that the next window's prompt may have


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a transcript. Its quality is that of the window's whole text."""

    start_s: float
    end_s: float
    text: str
    token_ids: tuple[int, ...]  # with timestamps
    seek: int  # first frame of its window
    temperature: float
    avg_logprob: float  # of a token, natural logarithm
    compression_ratio: float  # of the text
    no_speech_prob: float
    words: tuple[Word, ...] = ()  # with times of words


class Transcriber:
    """A loaded speech model."""

    def __init__(self, folder: Path, draft: Path | str = "") -> None:
        """Load the engine in a folder.

        Args:
            folder: of the engine.
            draft: speculates; the folder of a smaller model's engine, or NGRAM. "": none.

        Raises:
            EdgeLLMError: it is damaged, of another machine, or not of a speech model; the draft
                has other tokens.
        """
        engine = load_engine(folder, LLM_ENGINE)
        verify_sizes(folder, engine.files)
        self._network = open_speech(folder, engine)
        assert engine.decoder.audio is not None
        self.spec: AudioSpec = engine.decoder.audio
        self.vocab_size, capacity = engine.decoder.vocab_size, engine.max_kv_cache_capacity
        # Tokens of earlier text in a prompt
        half = min(engine.decoder.max_positions, capacity) // 2 - 1
        self.max_previous = min(half, engine.max_input_len - _START_TOKENS)
        self.tokenizer, self._end_ids = ChatTokenizer(folder), engine.eos_token_ids
        self.draft = _open_draft(folder, engine, draft)
        self.decoder = WindowDecoder(
            network=self._network,
            spec=self.spec,
            end_ids=engine.eos_token_ids,
            capacity=capacity,
            draft=self.draft,
        )

    def transcribe(
        self, samples: F32, options: TranscriptionOptions | None = None
    ) -> Transcription:
        """Begin a transcript: its segments are computed while it is iterated.

        Args:
            samples: of `multimodal.audio.read_audio`.
            options: None: the defaults.

        Raises:
            RequestError: a language or task that the model does not have, or special tokens in
                the prompt.
        """
        return Transcription(self, samples, options or TranscriptionOptions())

    def require(self, options: TranscriptionOptions) -> None:
        """Raise `RequestError` for a language or task that the model does not have."""
        known = self.spec.languages or {"en": 0}
        language = options.language
        if language is not None and language.lower() not in known:
            raise RequestError(
                f"the model does not transcribe the language {language!r}",
                hint=f"give one of its languages: {', '.join(sorted(known))}",
            )
        tasks = self.spec.tasks or {TRANSCRIBE: 0}
        if options.task not in tasks:
            raise RequestError(
                f"the model has no task {options.task!r}, only {' and '.join(tasks)}",
                hint="give one of its tasks, or another model: multilingual ones translate",
            )

    def prompt_ids(self, prompt: str) -> tuple[int, ...]:
        """Tokens of a prompt; () of an empty one.

        Raises:
            RequestError: it has special tokens.
        """
        if not prompt.strip():
            return ()
        found = self.tokenizer.encode(f" {prompt.strip()}", add_special_tokens=False)
        if special := [each for each in found if each >= min(self._end_ids)]:
            raise RequestError(
                f"the prompt has the special token {self.tokenizer.token_text(special[0])}",
                hint="give plain text as the prompt",
            )
        return tuple(found)

    def detect_language(self) -> str:
        """The most probable language of the window that was listened to last."""
        logits = self._network.next_logits(np.array([self.spec.start_id]))
        codes = sorted(self.spec.languages, key=self.spec.languages.__getitem__)
        scores = logits[[self.spec.languages[code] for code in codes]]
        self._network.restart()
        return codes[int(scores.argmax())]

    def listen(self, features: F32, of_draft: F32 | None = None) -> None:
        """Encode a window of features [mel bins, F]; None: the draft has the same."""
        self._network.listen(features)
        if self.draft is not None:
            self.draft.listen(features if of_draft is None else of_draft)


class Transcription:
    """The transcript of one recording.

    Attributes:
        language: code of the speech; "en" of English-only models.
        task: of the options.
        duration_s: of the recording.
    """

    def __init__(self, model: Transcriber, samples: F32, options: TranscriptionOptions) -> None:
        """Compute the features, and detect the language if it is not given."""
        model.require(options)
        spec, window = model.spec, model.spec.num_frames * HOP
        self._options, self._prompt_ids = options, model.prompt_ids(options.prompt)
        self.task = options.task
        self.duration_s = len(samples) / SAMPLE_RATE
        is_long = len(samples) > window
        self._has_timestamps = options.timestamps != NO_TIMES or is_long
        whole = samples if is_long else np.pad(samples, (0, window - len(samples)))
        self._model, self._features = model, log_mel(whole, spec.num_mel_bins)
        bins = spec.num_mel_bins if model.draft is None else model.draft.num_mel_bins
        same = bins in (0, spec.num_mel_bins)
        self._of_draft = self._features if same else log_mel(whole, bins)
        self._num_frames = min(-(-len(samples) // HOP), self._features.shape[1])  # of audio
        self._heard = -1  # first frame of the encoded window
        self.language = (options.language or "").lower() or self._detect()
        start = [spec.start_id]
        if spec.languages:
            start += [spec.languages[self.language], spec.tasks[options.task]]
        if not self._has_timestamps:
            start.append(spec.no_timestamps_id)
        self._start = tuple(start)

    def __iter__(self) -> Iterator[Segment]:
        """Its segments, as they are computed."""
        model, begin, end = self._model, 0, self._features.shape[1]
        stream = model.tokenizer.stream()
        so_far, may_condition = [*self._prompt_ids], self._options.condition_on_prev_tokens
        while begin < end:
            frames = min(end - begin, model.spec.num_frames)
            self._listen(begin)
            prompt = self._prompt(so_far if may_condition else self._prompt_ids)
            found = self._decode(begin, prompt)
            may_condition = (
                self._options.condition_on_prev_tokens and found.temperature < _CONDITIONS_BELOW
            )
            if found.is_silent(self._options):
                begin += frames
                continue
            spans, covered = split_window(model.spec, found.token_ids, frames)
            for span in spans:
                so_far += span.token_ids
            times = self._token_times(prompt, found, begin)
            yield from self._segments(spans, found, begin, times, stream)
            begin += covered or frames

    def text(self, segments: Sequence[Segment]) -> str:
        """The text of segments together."""
        return self._model.tokenizer.decode(
            [token for each in segments for token in self._words(each.token_ids)]
        )

    def _prompt(self, previous: Sequence[int]) -> Prompt:
        kept = previous[-self._model.max_previous :]
        return Prompt((self._model.spec.previous_id, *kept) if previous else (), self._start)

    def _decode(self, begin: int, prompt: Prompt) -> WindowText:
        """The text of a window at the first temperature with a text that is not poor."""
        options, model = self._options, self._model
        found: WindowText | None = None
        for temperature in options.temperatures:
            found = model.decoder.decode(
                prompt,
                timestamps=self._has_timestamps,
                temperature=temperature,
                seed=options.seed + begin,
                aligns=options.timestamps == WORD_TIMES,
            )
            if found.is_silent(options) or not found.is_poor(options, model.vocab_size):
                break
        assert found is not None  # there are temperatures
        return found

    def _token_times(self, prompt: Prompt, found: WindowText, begin: int) -> list[float]:
        """Seconds at which the tokens of a window end; [] if words have no times."""
        if self._options.timestamps != WORD_TIMES:
            return []
        frames = min(self._num_frames - begin, self._model.spec.num_frames)
        positions = self._model.decoder.align(prompt, found, max(frames // 2, 1))
        return [begin * FRAME_S + position * _STEP_S for position in positions]

    def _segments(
        self,
        spans: Sequence[Span],
        found: WindowText,
        begin: int,
        times: Sequence[float],
        stream: TextStream,
    ) -> Iterator[Segment]:
        """The segments of a window."""
        whole = self._model.tokenizer.decode([*self._words(found.token_ids)]).strip()
        ratio = compression_ratio(whole.encode())
        first, ends = 0, [begin * FRAME_S, *times]
        for span in spans:
            start_s, end_s = (
                min(begin * FRAME_S + steps * _STEP_S, self.duration_s)
                for steps in (span.begin, span.end)
            )
            yield Segment(
                start_s=start_s,
                end_s=end_s,
                text="".join(map(stream.push, self._words(span.token_ids))),
                token_ids=span.token_ids,
                seek=begin,
                temperature=found.temperature,
                avg_logprob=found.avg_logprob,
                compression_ratio=ratio,
                no_speech_prob=found.no_speech_prob,
                words=self._timed_words(span.token_ids, ends[first:]) if times else (),
            )
            first += len(span.token_ids)

    def _timed_words(self, token_ids: Sequence[int], ends: Sequence[float]) -> tuple[Word, ...]:
        """Words of a segment; `ends` of the token before it, and of each of its own."""
        first = self._model.spec.first_timestamp_id
        places = [at for at, token in enumerate(token_ids) if token < first]
        pieces = [self._model.tokenizer.token_bytes(token_ids[at]) for at in places]
        return tuple(
            Word(
                text=text,
                start_s=ends[places[begin]],
                end_s=ends[places[end - 1] + 1],
            )
            for text, begin, end in split_words(pieces, self.language)
        )

    def _words(self, token_ids: Sequence[int]) -> Iterator[int]:
        """Tokens without timestamps."""
        first = self._model.spec.first_timestamp_id
        return (token for token in token_ids if token < first)

    def _detect(self) -> str:
        if not self._model.spec.languages:
            return "en"
        self._listen(0)
        return self._model.detect_language()

    def _listen(self, begin: int) -> None:
        """Encode the window that begins at a frame; frames after the audio are zeros."""
        if begin == self._heard:
            return
        size = self._model.spec.num_frames
        windows = [each[:, begin : begin + size] for each in (self._features, self._of_draft)]
        missing = size - windows[0].shape[1]
        self._model.listen(*(np.pad(each, ((0, 0), (0, missing))) for each in windows))
        self._heard = begin


def _open_draft(folder: Path, engine: Engine, draft: Path | str) -> Draft | None:
    if not draft:
        return None
    if draft == NGRAM:
        return NgramDraft()
    path = Path(draft)
    found, audio = load_engine(path, LLM_ENGINE), engine.decoder.audio
    verify_sizes(path, found.files)
    network, own = open_speech(path, found), found.decoder.audio
    assert audio is not None
    assert own is not None
    require_same_tokens(folder, path)
    if (own.num_frames, found.max_kv_cache_capacity) != (
        audio.num_frames,
        engine.max_kv_cache_capacity,
    ):
        raise EdgeLLMError(
            f"{path} has other windows or another capacity than {folder}",
            hint="build both engines with the same --maxKVCacheCapacity",
        )
    return ModelDraft(network, min(found.eos_token_ids), own.num_mel_bins)
