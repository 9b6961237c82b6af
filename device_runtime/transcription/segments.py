"""Segments of a window's text, cut at its timestamps, and how far the next window advances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from edgellm.core.model_spec import AudioSpec

_STEP_FRAMES = 2  # of a timestamp
FRAME_S = 0.01


class Span(NamedTuple):
    """Tokens of a segment, and its times in steps from the window's begin."""

    begin: int
    end: int
    token_ids: tuple[int, ...]


def split_window(spec: AudioSpec, text: Sequence[int], num_frames: int) -> tuple[list[Span], int]:
    """The segments of a window's text, and the frames that it covers.

    A text that ends with a pair of timestamps was cut by the end of the window: the next window
    begins there. Text after the last pair is left to it, too.

    Args:
        spec: of the model.
        text: tokens of the window without prompt and end.
        num_frames: of audio in the window.
    """
    first = spec.first_timestamp_id
    is_time = [token >= first for token in text]
    cuts = [at + 1 for at in range(len(text) - 1) if is_time[at] and is_time[at + 1]]
    ends_once = is_time[-2:] == [False, True]  # no speech follows
    if not cuts:
        times = [token - first for token in text if token >= first]
        last = times[-1] if times and times[-1] else num_frames // _STEP_FRAMES
        return [Span(0, last, tuple(text))], num_frames
    if ends_once:
        cuts.append(len(text))
    spans = [
        Span(text[begin] - first, text[end - 1] - first, tuple(text[begin:end]))
        for begin, end in zip([0, *cuts], cuts, strict=False)
    ]
    if ends_once:
        return spans, num_frames
    return spans, spans[-1].end * _STEP_FRAMES
