"""Transcribes recordings with a speech model's engine, window by window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgellm.core.checksums import FileCheck
from edgellm.core.errors import EdgeLLMError, RequestError
from edgellm.core.manifest import LLM_ENGINE, load_engine
from edgellm.core.model_spec import AudioSpec
from edgellm.device_runtime.arrays import F32
from edgellm.device_runtime.networks.speech import SpeechNetwork, open_speech
from edgellm.device_runtime.text.tokenizer import ChatTokenizer, TextStream
from edgellm.device_runtime.transcription.decoding_rules import DecodingRules
from edgellm.device_runtime.transcription.fair_lock import FairLock
from edgellm.device_runtime.transcription.options import (
    NO_TIMES,
    TRANSCRIBE,
    TranscriptionOptions,
)
from edgellm.device_runtime.transcription.segments import FRAME_S, Span, split_window
from edgellm.multimodal.audio import SAMPLE_RATE
from edgellm.multimodal.log_mel import HOP, log_mel

_STEP_S = 2 * FRAME_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a transcript."""

    start_s: float
    end_s: float
    text: str
    token_ids: tuple[int, ...]  # with timestamps


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """A whole transcript."""

    language: str
    task: str
    duration_s: float
    text: str
    segments: tuple[Segment, ...]

    def __iter__(self) -> Iterator[Segment]:
        """Its segments."""
        return iter(self.segments)

    def whole(self) -> Transcript:
        """Itself, as `Transcription.whole`."""
        return self


class Transcriber:
    """A loaded speech model; `close` or `with` frees its memory.

    Threads may share it: windows of their recordings are computed in turns.
    """

    def __init__(self, folder: Path | str, *, verify: bool | None = None) -> None:
        """Load the engine in a folder.

        Args:
            folder: made by llm_build on this machine.
            verify: as of `LLM`.

        Raises:
            EdgeLLMError: it is damaged, of another machine, or not of a speech model.
        """
        folder = Path(folder)
        engine = load_engine(folder, LLM_ENGINE)
        with FileCheck(folder, engine.files, verify):
            self._loaded: SpeechNetwork | None = open_speech(folder, engine)
            self.tokenizer = ChatTokenizer(folder)
        assert engine.decoder.audio is not None
        self.spec: AudioSpec = engine.decoder.audio
        self.turn = FairLock()  # held while a window is computed
        self.heard: object = None  # the window that was listened to last
        self._capacity, self._end_ids = engine.max_kv_cache_capacity, engine.eos_token_ids

    def __enter__(self) -> Transcriber:
        """`with Transcriber(...) as model:` closes it at the end."""
        return self

    def __exit__(self, *_: object) -> None:
        """See `close`."""
        self.close()

    def close(self) -> None:
        """Free the memory after the running window; unfinished transcripts fail."""
        with self.turn:
            self._loaded = None

    @property
    def _network(self) -> SpeechNetwork:
        if self._loaded is None:
            raise EdgeLLMError("the transcriber was closed", hint="load the engine again")
        return self._loaded

    def transcribe(
        self, samples: F32, options: TranscriptionOptions | None = None
    ) -> Transcription:
        """Begin a transcript: its segments are computed while it is iterated.

        Args:
            samples: of `multimodal.audio.read_audio`.
            options: None: the defaults.

        Raises:
            RequestError: a language or task that the model does not have.
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

    def detect_language(self) -> str:
        """The most probable language of the window that was listened to last."""
        logits = self._network.next_logits(np.array([self.spec.start_id]))
        codes = sorted(self.spec.languages, key=self.spec.languages.__getitem__)
        scores = logits[[self.spec.languages[code] for code in codes]]
        self._network.restart()
        return codes[int(scores.argmax())]

    def listen(self, features: F32) -> None:
        """Encode a window of features [mel bins, F]."""
        self._network.listen(features)

    def write(self, prompt: Sequence[int], rules: DecodingRules) -> list[int]:
        """The tokens of the window after a prompt, without the end token."""
        text: list[int] = []
        logits = self._network.next_logits(np.array(prompt))
        while True:
            text.append(rules.choose(logits, text))
            if text[-1] in self._end_ids:
                return text[:-1]
            if len(prompt) + len(text) >= self._capacity:
                return text
            logits = self._network.next_logits(np.array(text[-1:]))

    def rules(self, *, timestamps: bool) -> DecodingRules:
        """The rules of its tokens."""
        return DecodingRules(self.spec, min(self._end_ids), timestamps=timestamps)


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
        self.task = options.task
        self.duration_s = len(samples) / SAMPLE_RATE
        is_long = len(samples) > window
        self._has_timestamps = options.timestamps != NO_TIMES or is_long
        whole = samples if is_long else np.pad(samples, (0, window - len(samples)))
        self._model, self._features = model, log_mel(whole, spec.num_mel_bins)
        self.language = (options.language or "").lower() or self._detect()
        self._prompt = [spec.start_id]
        if spec.languages:
            self._prompt += [spec.languages[self.language], spec.tasks[options.task]]
        if not self._has_timestamps:
            self._prompt.append(spec.no_timestamps_id)

    def __iter__(self) -> Iterator[Segment]:
        """Its segments, as they are computed."""
        model, begin, end = self._model, 0, self._features.shape[1]
        rules = model.rules(timestamps=self._has_timestamps)
        stream = model.tokenizer.stream()
        while begin < end:
            frames = min(end - begin, model.spec.num_frames)
            with model.turn:
                self._listen(begin)
                text = model.write(self._prompt, rules)
            spans, covered = split_window(model.spec, text, frames)
            for span in spans:
                yield self._segment(span, begin * FRAME_S, stream)
            begin += covered or frames

    def whole(self) -> Transcript:
        """Compute all of it."""
        return self.collected(tuple(self))

    def collected(self, segments: tuple[Segment, ...]) -> Transcript:
        """The whole transcript from all of its segments."""
        return Transcript(
            language=self.language,
            task=self.task,
            duration_s=self.duration_s,
            text=self.text(segments).strip(),
            segments=segments,
        )

    def text(self, segments: Sequence[Segment]) -> str:
        """The text of segments together."""
        return self._model.tokenizer.decode(
            [token for each in segments for token in self._words(each.token_ids)]
        )

    def _segment(self, span: Span, offset_s: float, stream: TextStream) -> Segment:
        start, end = (
            min(offset_s + steps * _STEP_S, self.duration_s) for steps in (span.begin, span.end)
        )
        text = "".join(map(stream.push, self._words(span.token_ids)))
        return Segment(start_s=start, end_s=end, text=text, token_ids=span.token_ids)

    def _words(self, token_ids: Sequence[int]) -> Iterator[int]:
        """Tokens without timestamps."""
        first = self._model.spec.first_timestamp_id
        return (token for token in token_ids if token < first)

    def _detect(self) -> str:
        if not self._model.spec.languages:
            return "en"
        with self._model.turn:
            self._listen(0)
            return self._model.detect_language()

    def _listen(self, begin: int) -> None:
        """Encode the window that begins at a frame; frames after the audio are zeros."""
        window_key = (self, begin)
        if self._model.heard == window_key:
            return
        size = self._model.spec.num_frames
        window = self._features[:, begin : begin + size]
        self._model.listen(np.pad(window, ((0, 0), (0, size - window.shape[1]))))
        self._model.heard = window_key
