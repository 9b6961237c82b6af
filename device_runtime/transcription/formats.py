"""Formats of transcripts: plain text, subtitles (SRT and WebVTT), JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from edgellm.device_runtime.transcription.transcriber import Segment, Transcript, Transcription

Write = Callable[[Transcription | Transcript], Iterator[str]]


def timed_lines(found: Transcription | Transcript) -> Iterator[str]:
    """A line for each segment, with its times."""
    for each in _spoken(found):
        begin, end = _clock(each.start_s, "."), _clock(each.end_s, ".")
        yield f"[{begin} --> {end}] {each.text.strip()}\n"


def lines(found: Transcription | Transcript) -> Iterator[str]:
    """A line for each segment, without its times."""
    for each in _spoken(found):
        yield f"{each.text.strip()}\n"


def plain_text(found: Transcription | Transcript) -> Iterator[str]:
    """The text alone."""
    is_first = True
    for each in found:
        yield each.text.lstrip() if is_first else each.text
        is_first = is_first and not each.text.strip()
    yield "\n"


def srt(found: Transcription | Transcript) -> Iterator[str]:
    """SubRip: numbered cues."""
    for number, each in enumerate(_spoken(found), 1):
        begin, end = _clock(each.start_s, ","), _clock(each.end_s, ",")
        yield f"{number}\n{begin} --> {end}\n{each.text.strip()}\n\n"


def vtt(found: Transcription | Transcript) -> Iterator[str]:
    """WebVTT, https://www.w3.org/TR/webvtt1/."""
    yield "WEBVTT\n\n"
    for each in _spoken(found):
        begin, end = _clock(each.start_s, "."), _clock(each.end_s, ".")
        yield f"{begin} --> {end}\n{each.text.strip().replace('-->', '->')}\n\n"


def as_json(found: Transcription | Transcript) -> Iterator[str]:
    """One object, see `facts`."""
    yield json.dumps(facts(found.whole()), ensure_ascii=False, indent=2) + "\n"


def facts(found: Transcript) -> dict[str, Any]:
    """The fields of OpenAI's `verbose_json`."""
    shown = [
        {
            "id": index,
            "seek": each.seek,
            "start": round(each.start_s, 2),
            "end": round(each.end_s, 2),
            "text": each.text,
            "tokens": [*each.token_ids],
            "temperature": each.temperature,
            "avg_logprob": each.avg_logprob,
            "compression_ratio": each.compression_ratio,
            "no_speech_prob": each.no_speech_prob,
        }
        for index, each in enumerate(found.segments)
    ]
    return {
        "task": found.task,
        "language": found.language,
        "duration": round(found.duration_s, 3),
        "text": found.text,
        "segments": shown,
    }


FORMATS: dict[str, Write] = {"txt": plain_text, "srt": srt, "vtt": vtt, "json": as_json}


def _spoken(found: Transcription | Transcript) -> Iterator[Segment]:
    """Segments with text."""
    return (each for each in found if each.text.strip())


def _clock(seconds: float, point: str) -> str:
    """Hours, minutes, seconds and milliseconds."""
    whole = round(seconds * 1000)
    minutes, milliseconds = divmod(whole, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{milliseconds // 1000:02}{point}{milliseconds % 1000:03}"
