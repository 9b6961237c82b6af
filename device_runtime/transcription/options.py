"""Options of a transcript, which the command, servers and the Python interface share."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgellm.core.errors import RequestError, suggestion
from edgellm.device_runtime.validation import is_number, is_whole, require_kind

TRANSCRIBE, TRANSLATE = TASKS = "transcribe", "translate"
NO_TIMES, SEGMENT_TIMES, WORD_TIMES = TIMESTAMPS = "none", "segment", "word"
TEMPERATURE_STEP = 0.2


def rising_temperatures(first: float, step: float | None = TEMPERATURE_STEP) -> tuple[float, ...]:
    """Temperatures from the first one to 1, as openai/whisper tries them; no step: one of them."""
    if step is None or step <= 0:
        return (first,)
    count = int((1 - first) / step + 1e-6) + 1
    return tuple(round(first + index * step, 6) for index in range(max(count, 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionOptions:
    """Language, task, times, prompts and quality of a transcript.

    A window's text is computed at the first temperature. Further ones follow while its quality is
    below a threshold. A threshold of None is not applied.
    """

    language: str | None = None  # of the speech, such as "de" or "german"; None: detected
    task: str = TRANSCRIBE  # or TRANSLATE, to English
    timestamps: str = NO_TIMES  # or times of segments or words; long recordings have those of
    # segments, since windows begin at them
    prompt: str = ""  # text before the speech: names, spelling, style
    condition_on_prev_tokens: bool = True  # the text so far is part of the next window's prompt
    temperatures: tuple[float, ...] = rising_temperatures(0.0)  # 0: greedy
    compression_ratio_threshold: float | None = 1.35  # of token bytes; larger ones are repetitions
    logprob_threshold: float | None = -1.0  # of the average log-probability; below it: too unsure
    no_speech_threshold: float | None = 0.6  # above it, an unsure window is silence, without text
    seed: int = 0  # of temperatures above 0
    vad: bool = False  # cut at pauses and skip silence, by voice activity detection

    def __post_init__(self) -> None:
        """Reject wrong values; raises `RequestError`."""
        for name, value, known in (
            ("task", self.task, TASKS),
            ("timestamps", self.timestamps, TIMESTAMPS),
        ):
            if value not in known:
                hint = suggestion(str(value), known) or f"give one of {', '.join(known)}"
                raise RequestError(f"{name} {value!r} is unknown", hint=hint)
        require_kind("prompt", self.prompt, str, "a text")
        if not self.temperatures:
            raise RequestError("temperatures are empty", hint="give one or more, such as (0.0,)")
        for value in self.temperatures:
            _require("temperatures", value, least=0)
        for name in ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold"):
            if (value := getattr(self, name)) is not None:
                _require(name, value, least=-math.inf)
        require_kind("vad", self.vad, bool, "true or false")
        if not is_whole(self.seed) or self.seed < 0:
            raise RequestError(
                f"seed {self.seed!r} is no seed", hint="give a whole number from 0 on"
            )


def _require(name: str, value: object, *, least: float) -> None:
    """Reject all but finite numbers from `least` on."""
    if not is_number(value) or not (least <= value < math.inf):  # type: ignore[operator]
        hint = "give a number" if least < 0 else f"give numbers from {least:g} on"
        raise RequestError(f"{name}: {value!r} is out of range", hint=hint)
