"""Flags of `edgellm transcribe` about the transcript: `TranscriptionOptions`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgellm.core.cli import with_flags

if TYPE_CHECKING:
    from edgellm.device_runtime.transcription.options import TranscriptionOptions


def _flag(group: str, *names: str, help_text: str) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=group)


Language = Annotated[
    str | None,
    _flag(
        "Output",
        "--language",
        help_text="Name the language of the speech, such as de or german. Default: the "
        "model detects it in the first 30 s.",
    ),
]
Task = Annotated[
    str,
    _flag(
        "Output",
        "--task",
        help_text="Write the words that are spoken (transcribe) or their English translation "
        "(translate).",
    ),
]
Timestamps = Annotated[
    bool,
    _flag(
        "Output",
        "--timestamps",
        help_text="Write a line for each segment, with its times, which srt, vtt and json always "
        "have.",
    ),
]
WordTimestamps = Annotated[
    bool,
    _flag(
        "Output",
        "--word_timestamps",
        help_text="Give each word its times: a line or subtitle of its own, or times within those "
        "of vtt, or in json's list of words.",
    ),
]
Prompt = Annotated[
    str,
    _flag(
        "Output",
        "--prompt",
        help_text="Give the model text before the speech, such as names in their spelling. "
        "Default: no text.",
    ),
]
ConditionOnPrevTokens = Annotated[
    bool,
    _flag(
        "Sampling",
        "--condition_on_prev_tokens/--no_condition_on_prev_tokens",
        help_text="Begin each window's prompt with the text so far. Without it, the model repeats "
        "itself less, and may spell names differently.",
    ),
]
Temperature = Annotated[
    float,
    _flag(
        "Sampling",
        "--temperature",
        help_text="Choose tokens at this temperature first; 0 takes the most probable ones.",
    ),
]
TemperatureIncrement = Annotated[
    float,
    _flag(
        "Sampling",
        "--temperature_increment_on_fallback",
        help_text="Raise the temperature by this up to 1 while a window's text is poor; 0 keeps "
        "the first text.",
    ),
]
CompressionRatioThreshold = Annotated[
    float,
    _flag(
        "Sampling",
        "--compression_ratio_threshold",
        help_text="Call a text poor if the compression ratio of its tokens is larger: it repeats "
        "itself.",
    ),
]
LogprobThreshold = Annotated[
    float,
    _flag(
        "Sampling",
        "--logprob_threshold",
        help_text="Call a text poor if the average log-probability of its tokens is smaller.",
    ),
]
NoSpeechThreshold = Annotated[
    float,
    _flag(
        "Sampling",
        "--no_speech_threshold",
        help_text="Leave out windows whose probability of no speech is larger, if their "
        "log-probability is below its threshold, too.",
    ),
]
Seed = Annotated[
    int,
    _flag("Sampling", "--seed", help_text="Make texts at temperatures above 0 repeatable."),
]


Vad = Annotated[
    bool,
    _flag(
        "Output",
        "--vad",
        help_text="Skip silence and cut long audio at pauses, by voice activity detection (Silero "
        "VAD), as --live and --mic always do.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionFlags:
    """The flags."""

    language: Language = None
    task: Task = "transcribe"
    timestamps: Timestamps = False
    word_timestamps: WordTimestamps = False
    prompt: Prompt = ""
    condition_on_prev_tokens: ConditionOnPrevTokens = True
    temperature: Temperature = 0.0
    temperature_increment: TemperatureIncrement = 0.2
    compression_ratio_threshold: CompressionRatioThreshold = 1.35
    logprob_threshold: LogprobThreshold = -1.0
    no_speech_threshold: NoSpeechThreshold = 0.6
    seed: Seed = 0
    vad: Vad = False

    def read(self, *, needs_times: bool) -> TranscriptionOptions:
        """The options; `needs_times`: the output's format has them."""
        from edgellm.device_runtime.transcription import options

        times = options.SEGMENT_TIMES if self.timestamps or needs_times else options.NO_TIMES
        if self.word_timestamps:
            times = options.WORD_TIMES
        return options.TranscriptionOptions(
            language=self.language,
            task=self.task,
            timestamps=times,
            prompt=self.prompt,
            condition_on_prev_tokens=self.condition_on_prev_tokens,
            temperatures=options.rising_temperatures(self.temperature, self.temperature_increment),
            compression_ratio_threshold=self.compression_ratio_threshold,
            logprob_threshold=self.logprob_threshold,
            no_speech_threshold=self.no_speech_threshold,
            seed=self.seed,
            vad=self.vad,
        )


with_transcription_flags = with_flags("transcription_flags", TranscriptionFlags)
