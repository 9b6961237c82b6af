"""Formats of transcripts: plain text, subtitles (SRT and WebVTT), JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from edgellm.device_runtime.transcription.languages import NAMES
from edgellm.device_runtime.transcription.transcriber import Segment, Transcript, Transcription
from edgellm.device_runtime.transcription.word_times import Word

Write = Callable[[Transcription | Transcript], Iterator[str]]


def timed_lines(found: Transcription | Transcript) -> Iterator[str]:
    """A line for each segment, or for each word that has times."""
    for each in _cues(found):
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
    for number, each in enumerate(_cues(found), 1):
        begin, end = _clock(each.start_s, ","), _clock(each.end_s, ",")
        yield f"{number}\n{begin} --> {end}\n{each.text.strip()}\n\n"


def vtt(found: Transcription | Transcript) -> Iterator[str]:
    """WebVTT, https://www.w3.org/TR/webvtt1/; times of words are in the cue of their segment."""
    yield "WEBVTT\n\n"
    for each in _spoken(found):
        begin, end = _clock(each.start_s, "."), _clock(each.end_s, ".")
        text = _karaoke(each) if each.words else each.text
        yield f"{begin} --> {end}\n{text.strip().replace('-->', '->')}\n\n"


def _karaoke(segment: Segment) -> str:
    """Words after the times at which they begin, which ascend within those of the cue."""
    parts, latest = list[str](), segment.start_s
    for word in segment.words:
        if latest < word.start_s < segment.end_s:
            latest = word.start_s
            parts.append(f"<{_clock(latest, '.')}>")
        parts.append(word.text)
    return "".join(parts)


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
    words = [
        {"word": word.text.strip(), "start": round(word.start_s, 2), "end": round(word.end_s, 2)}
        for each in found.segments
        for word in each.words
    ]
    return {
        "task": found.task,
        "language": NAMES.get(found.language, found.language),
        "duration": round(found.duration_s, 3),
        "text": found.text,
        "segments": shown,
        **({"words": words} if words else {}),
    }


FORMATS: dict[str, Write] = {"txt": plain_text, "srt": srt, "vtt": vtt, "json": as_json}


def _cues(found: Transcription | Transcript) -> Iterator[Segment | Word]:
    """Words that have times, else segments with text."""
    for each in _spoken(found):
        yield from each.words or (each,)


def _spoken(found: Transcription | Transcript) -> Iterator[Segment]:
    """Segments with text."""
    return (each for each in found if each.text.strip())


def _clock(seconds: float, point: str) -> str:
    """Hours, minutes, seconds and milliseconds."""
    whole = round(seconds * 1000)
    minutes, milliseconds = divmod(whole, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{milliseconds // 1000:02}{point}{milliseconds % 1000:03}"
