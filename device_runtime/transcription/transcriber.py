"""Transcribes recordings with a speech model's engine, window by window."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from edgellm.core.checksums import FileCheck
from edgellm.core.errors import EdgeLLMError, RequestError
from edgellm.core.manifest import ENCODER_HASH, LLM_ENGINE, Engine, load_engine
from edgellm.core.model_spec import AudioSpec
from edgellm.device_runtime.arrays import F32
from edgellm.device_runtime.networks.speech import open_speech
from edgellm.device_runtime.speculate.drafters.draft import require_same_tokens
from edgellm.device_runtime.text.tokenizer import ChatTokenizer, TextStream
from edgellm.device_runtime.transcription.drafts import NGRAM, Draft, ModelDraft, NgramDraft
from edgellm.device_runtime.transcription.fair_pool import FairPool
from edgellm.device_runtime.transcription.languages import code_of
from edgellm.device_runtime.transcription.options import (
    NO_TIMES,
    TRANSCRIBE,
    WORD_TIMES,
    TranscriptionOptions,
)
from edgellm.device_runtime.transcription.parts import (
    Audio,
    SpeechParts,
    SpeechStream,
    WholeRecording,
)
from edgellm.device_runtime.transcription.segments import FRAME_S, Span, split_window
from edgellm.device_runtime.transcription.stable_words import StableWords
from edgellm.device_runtime.transcription.window_decoder import Prompt, WindowDecoder
from edgellm.device_runtime.transcription.window_text import WindowText, compression_ratio
from edgellm.device_runtime.transcription.windows import PartWindows, Window
from edgellm.device_runtime.transcription.word_times import Word, split_words
from edgellm.multimodal.audio import SAMPLE_RATE, read_audio
from edgellm.multimodal.log_mel import HOP

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
    # Natural logarithms of the tokens' probabilities after the rules, before temperature; NaN of
    # words that were final while speech went on
    logprobs: tuple[float, ...] = ()
    words: tuple[Word, ...] = ()  # with times of words


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

    Threads may share it: windows of their recordings are computed in turns. The tokens of some
    share passes, which has no effect on their texts.

    Attributes:
        num_windows: that share passes: the engine's batch size, or 1 with a draft model.
    """

    def __init__(
        self, folder: Path | str, draft: Path | str = "", *, verify: bool | None = None
    ) -> None:
        """Load the engine in a folder.

        Args:
            folder: made by llm_build on this machine.
            draft: speculates; the folder of a smaller model's engine, or NGRAM. "": none.
            verify: as of `LLM`.

        Raises:
            EdgeLLMError: it is damaged, of another machine, or not of a speech model; the draft
                has other tokens.
        """
        folder = Path(folder)
        engine = load_engine(folder, LLM_ENGINE)
        with FileCheck(folder, engine.files, verify):
            network, self.tokenizer = open_speech(folder, engine), ChatTokenizer(folder)
        assert engine.decoder.audio is not None
        self.spec: AudioSpec = engine.decoder.audio
        self.vocab_size, capacity = engine.decoder.vocab_size, engine.max_kv_cache_capacity
        # Tokens of earlier text in a prompt
        half = min(engine.decoder.max_positions, capacity) // 2 - 1
        self.max_previous = min(half, engine.max_input_len - _START_TOKENS)
        self._end_ids, drafts = engine.eos_token_ids, _drafts(folder, engine, draft, verify)
        decoders = [
            WindowDecoder(
                network=each,
                spec=self.spec,
                end_ids=engine.eos_token_ids,
                capacity=capacity,
                draft=own,
            )
            for each, own in zip([network, *network.beside()], drafts, strict=False)
        ]
        self.num_windows, self.draft_bins = len(decoders), decoders[0].draft_bins
        self._decoders: FairPool[WindowDecoder] | None = FairPool(decoders)
        self._encoding = threading.Lock()

    def __enter__(self) -> Transcriber:
        """`with Transcriber(...) as model:` closes it at the end."""
        return self

    def __exit__(self, *_: object) -> None:
        """See `close`."""
        self.close()

    def close(self) -> None:
        """Free the memory after the running windows; unfinished transcripts fail."""
        with ExitStack() as stack:
            for _ in range(self.num_windows if self._decoders is not None else 0):
                stack.enter_context(self.window_decoder())
            self._decoders = None

    @contextmanager
    def window_decoder(self) -> Iterator[WindowDecoder]:
        """A decoder for one window, which other threads do not have until the end.

        Raises:
            EdgeLLMError: the transcriber was closed.
        """
        decoders = self._decoders
        if decoders is not None:
            with decoders.taken() as found:
                if self._decoders is not None:
                    yield found
                    return
        raise EdgeLLMError("the transcriber was closed", hint="load the engine again")

    def transcribe(
        self, audio: Path | str | F32, options: TranscriptionOptions | None = None
    ) -> Transcription:
        """Begin a transcript: its segments are computed while it is iterated.

        Args:
            audio: a file, or samples float32 [N] from -1 to 1, mono, at 16 kHz.
            options: None: the defaults.

        Raises:
            RequestError: the file cannot be read; a language or task that the model does not have;
                special tokens in the prompt; with `vad` no speech, or silero-vad is missing.
        """
        options = options or TranscriptionOptions()
        self.require(options)
        samples = read_audio(Path(audio)) if isinstance(audio, Path | str) else audio
        parts = SpeechParts(samples, self.window_size) if options.vad else WholeRecording(samples)
        return Transcription(model=self, audio=parts, options=options)

    def transcribe_stream(
        self,
        chunks: Iterable[F32],
        options: TranscriptionOptions | None = None,
        *,
        on_words: Callable[[str], object] | None = None,
    ) -> Transcription:
        """Begin a transcript of audio that is still being recorded, cut at pauses.

        A segment is computed half a second after the end of its speech.

        Args:
            chunks: samples as `transcribe` takes them, of any length; they may block.
            options: None: the defaults.
            on_words: called while speech goes on, with the text so far of the next segment, which
                begins with it. Speech is then decoded again and again. Not with timestamps.

        Raises:
            RequestError: as `transcribe` with `vad`.
        """
        options = options or TranscriptionOptions()
        is_partial = on_words is not None and options.timestamps == NO_TIMES
        audio = SpeechStream(chunks, self.window_size, is_partial=is_partial)
        return Transcription(model=self, audio=audio, options=options, on_words=on_words)

    @property
    def window_size(self) -> int:
        """Samples of a window."""
        return self.spec.num_frames * HOP

    def require(self, options: TranscriptionOptions) -> None:
        """Raise `RequestError` for a language or task that the model does not have."""
        known = self.spec.languages or {"en": 0}
        language = options.language
        if language is not None and code_of(language) not in known:
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

    def detect_language(self, decoder: WindowDecoder) -> str:
        """The most probable language of the window that a decoder listens to."""
        languages = sorted(self.spec.languages.items(), key=lambda each: each[1])
        return languages[decoder.most_probable([token for _, token in languages])][0]

    def listen(self, decoder: WindowDecoder, window: Window) -> None:
        """Encode a window, one at a time."""
        with self._encoding:
            decoder.listen(window)


class Transcription:
    """The transcript of one recording.

    Attributes:
        language: code of the speech, "en" of English-only models; "" until it is detected in the
            first window.
        task: of the options.
        before_pass: called before forward passes; what it raises ends the transcript.
    """

    def __init__(
        self,
        *,
        model: Transcriber,
        audio: Audio,
        options: TranscriptionOptions,
        on_words: Callable[[str], object] | None = None,
    ) -> None:
        """Compute nothing yet; raises as `Transcriber.transcribe`."""
        model.require(options)
        self._model, self._audio, self._options = model, audio, options
        self._prompt_ids = model.prompt_ids(options.prompt)
        self.task, self.language = options.task, code_of(options.language or "")
        self.before_pass: Callable[[], object] = _no_check
        self._on_words = on_words

    @property
    def duration_s(self) -> float:
        """Duration of the recording; of a stream, of what came so far."""
        return self._audio.num_samples / SAMPLE_RATE

    def __iter__(self) -> Iterator[Segment]:
        """Its segments, as they are computed."""
        stream, bytes_of = self._model.tokenizer.stream(), self._model.tokenizer.token_bytes
        so_far, may_condition = [*self._prompt_ids], self._options.condition_on_prev_tokens
        words = StableWords(bytes_of)  # of the next part
        for part in self._audio.parts():
            windows = PartWindows(part, self._model.spec, self._model.draft_bins)
            for window in windows:
                previous = so_far if may_condition else self._prompt_ids
                if not part.is_complete:
                    self._hear(window, previous, words)
                    break
                with self._model.window_decoder() as decoder:
                    found, times = self._decode(decoder, window, previous, words.token_ids)
                may_condition = (
                    self._options.condition_on_prev_tokens and found.temperature < _CONDITIONS_BELOW
                )
                is_heard, words = bool(words.token_ids), StableWords(bytes_of)
                if found.is_silent(self._options) and not is_heard:
                    windows.advance(window.num_frames)
                    continue
                spans, covered = split_window(self._model.spec, found.token_ids, window.num_frames)
                for span in spans:
                    so_far += span.token_ids
                yield from self._segments(spans, found, window, times, stream)
                windows.advance(covered or window.num_frames)

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

    def _hear(self, window: Window, previous: Sequence[int], words: StableWords) -> None:
        """Decode speech that goes on, and show its words that became final.

        A poor or silent text, which a complete window would not keep, is left out.
        """
        assert self._on_words is not None
        options, model, language = self._options, self._model, self.language
        with model.window_decoder() as decoder:
            found, _ = self._decode(
                decoder, window, previous, words.token_ids, options.temperatures[:1]
            )
        is_kept = not (found.is_silent(options) or found.is_poor(options, model.vocab_size))
        count = len(found.token_ids) - (not found.end)  # the capacity has room for a token more
        if is_kept and words.add([*self._words(found.token_ids[:count])], self.language):
            self._on_words(model.tokenizer.decode(words.token_ids).strip())
        elif not words.token_ids:
            self.language = language  # it is detected again, in more audio

    def _decode(
        self,
        decoder: WindowDecoder,
        window: Window,
        previous: Sequence[int],
        prefix: Sequence[int],
        temperatures: Sequence[float] = (),
    ) -> tuple[WindowText, list[float]]:
        """The text of a window at the first temperature with a text that is not poor.

        Also the seconds in the window at which its tokens end; [] if words have no times.
        """
        options, model = self._options, self._model
        self.before_pass()
        model.listen(decoder, window)
        if not self.language:
            self.language = model.detect_language(decoder) if model.spec.languages else "en"
        has_timestamps = options.timestamps != NO_TIMES or window.is_of_several
        prompt = self._prompt(previous, has_timestamps=has_timestamps)
        aligns, found = options.timestamps == WORD_TIMES, None
        for temperature in temperatures or options.temperatures:
            found = decoder.decode(
                prompt,
                timestamps=has_timestamps,
                temperature=temperature,
                seed=options.seed + window.seek,
                aligns=aligns,
                before_pass=self.before_pass,
                prefix=prefix,
            )
            if found.is_silent(options) or not found.is_poor(options, model.vocab_size):
                break
        assert found is not None  # there are temperatures
        if not aligns or found.is_silent(options):
            return found, []
        positions = decoder.align(prompt, found, window.num_positions)
        return found, [position * _STEP_S for position in positions]

    def _prompt(self, previous: Sequence[int], *, has_timestamps: bool) -> Prompt:
        spec = self._model.spec
        kept, start = previous[-self._model.max_previous :], [spec.start_id]
        if spec.languages:
            start += [spec.languages[self.language], spec.tasks[self.task]]
        if not has_timestamps:
            start.append(spec.no_timestamps_id)
        return Prompt((spec.previous_id, *kept) if previous else (), tuple(start))

    def _segments(
        self,
        spans: Sequence[Span],
        found: WindowText,
        window: Window,
        times: Sequence[float],
        stream: TextStream,
    ) -> Iterator[Segment]:
        """The segments of a window."""
        whole = self._model.tokenizer.decode([*self._words(found.token_ids)]).strip()
        ratio = compression_ratio(whole.encode())
        first, ends = 0, [0.0, *times]
        for span in spans:
            yield Segment(
                start_s=window.time_s(span.begin * _STEP_S, ends=False),
                end_s=window.time_s(span.end * _STEP_S, ends=True),
                text="".join(map(stream.push, self._words(span.token_ids))),
                token_ids=span.token_ids,
                seek=window.seek,
                temperature=found.temperature,
                avg_logprob=found.avg_logprob,
                compression_ratio=ratio,
                no_speech_prob=found.no_speech_prob,
                logprobs=found.logprobs[first : first + len(span.token_ids)],
                words=self._timed_words(window, span.token_ids, ends[first:]) if times else (),
            )
            first += len(span.token_ids)

    def _timed_words(
        self, window: Window, token_ids: Sequence[int], ends: Sequence[float]
    ) -> tuple[Word, ...]:
        """Words of a segment; `ends` of the token before it, and of each of its own."""
        first = self._model.spec.first_timestamp_id
        places = [at for at, token in enumerate(token_ids) if token < first]
        pieces = [self._model.tokenizer.token_bytes(token_ids[at]) for at in places]
        return tuple(
            Word(
                text=text,
                start_s=window.time_s(ends[places[begin]], ends=False),
                end_s=window.time_s(ends[places[end - 1] + 1], ends=True),
            )
            for text, begin, end in split_words(pieces, self.language)
        )

    def _words(self, token_ids: Sequence[int]) -> Iterator[int]:
        """Tokens without timestamps."""
        first = self._model.spec.first_timestamp_id
        return (token for token in token_ids if token < first)


def _drafts(
    folder: Path, engine: Engine, draft: Path | str, verify: bool | None
) -> Iterable[Draft | None]:
    """Drafts of windows of a batch; a model drafts for one."""
    if not draft:
        return itertools.repeat(None)
    if draft == NGRAM:
        return iter(NgramDraft, None)
    path = Path(draft)
    found, audio = load_engine(path, LLM_ENGINE), engine.decoder.audio
    encoders = [each.provenance.get(ENCODER_HASH) for each in (engine, found)]
    shares_encoder = encoders[0] is not None and encoders[0] == encoders[1]
    with FileCheck(path, found.files, verify):
        network = open_speech(path, found, has_encoder=not shares_encoder)
    own = found.decoder.audio
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
    return [ModelDraft(network, min(found.eos_token_ids))]


def _no_check() -> None:
    """Never raises."""
