"""Films to RGB frames: files through PyAV, of which some frames are kept, or lists of images."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from PIL import Image

from edgellm.core.errors import RequestError
from edgellm.multimodal.images import MAX_PIXELS, content_hash, open_image, read_source
from edgellm.multimodal.media import Video

# Of a film of so many frames, so many in a second, those that are shown.
Pick = Callable[[int, float], Sequence[int]]


# By whether x and y change places, and which of the two coefficients are negative.
_TURNS = {
    (False, True, False): Image.Transpose.FLIP_LEFT_RIGHT,
    (False, False, True): Image.Transpose.FLIP_TOP_BOTTOM,
    (False, True, True): Image.Transpose.ROTATE_180,
    (True, False, False): Image.Transpose.TRANSPOSE,
    (True, False, True): Image.Transpose.ROTATE_270,
    (True, True, False): Image.Transpose.ROTATE_90,
    (True, True, True): Image.Transpose.TRANSVERSE,
}


@dataclass(frozen=True, slots=True)
class Film:
    """The frames that a model sees, all of one size."""

    frames: tuple[Image.Image, ...]
    seconds: tuple[float, ...]  # when each of them is
    frame_rate: float  # of the frames that are shown, in Hz
    duration: float  # of the whole film, in seconds; a list of frames ends with its last

    def content(self) -> str:
        """SHA-256 (hexadecimal) of pixels and times."""
        times = f"{self.seconds} {self.frame_rate} {self.duration}"
        digest = hashlib.sha256(times.encode())
        for frame in self.frames:
            digest.update(content_hash(frame).encode())
        return digest.hexdigest()


def open_film(video: Video, folder: Path, pick: Pick, usual_rate: float) -> Film:
    """The frames of a film that `pick` chooses; a list of frames is shown as it is.

    Args:
        video: where it is.
        folder: where relative paths begin.
        pick: gives places of frames, ascending.
        usual_rate: frames in a second of a list, which does not say.

    Raises:
        RequestError: nothing there, not a film, PyAV is missing, or frames of several sizes.
    """
    if video.is_file:
        return _decoded(video.frames[0], folder, pick)
    if not video.frames:
        raise RequestError("a video of no frames", hint="give a file, or a list of images")
    frames = tuple(open_image(source, folder) for source in video.frames)
    if len({frame.size for frame in frames}) > 1:
        raise RequestError("the frames of a video have several sizes", hint="make them alike")
    seconds = tuple(index / usual_rate for index in range(len(frames)))
    return Film(frames, seconds, usual_rate, seconds[-1])


def _decoded(source: str, folder: Path, pick: Pick) -> Film:
    if importlib.util.find_spec("av") is None:
        raise RequestError(
            "video files need PyAV",
            hint="in edgellm's folder: pip install '.[video]'; or give a list of frames",
        )
    av: Any = importlib.import_module("av")  # an optional package
    name, data = read_source(source, folder)
    try:
        return _shown(av, name, data, pick)
    except av.FFmpegError as error:
        raise RequestError(
            f"{name} holds no video that can be read: {error.strerror}", hint="save it as MP4"
        ) from None


def _shown(av: Any, name: str, data: bytes, pick: Pick) -> Film:
    timeline = _timeline(av, name, data)
    places = list(pick(timeline.total, timeline.rate))
    frames, seconds = _frames(av, data, places)
    if len(frames) < len(places) and not timeline.is_counted:  # packets that show nothing
        timeline = replace(timeline, total=_count(av, data))
        places = list(pick(timeline.total, timeline.rate))
        frames, seconds = _frames(av, data, places)
    if len(frames) < len(places):
        raise _ends_early(name, len(frames), len(places))
    return Film(
        tuple(frames),
        timeline.times(places, seconds),
        len(places) / timeline.total * timeline.rate,
        timeline.total / timeline.rate,
    )


def _ends_early(name: str, found: int, expected: int) -> RequestError:
    return RequestError(
        f"{name} ends early: {found} of {expected} frames can be read",
        hint="the copy was cut short; copy or save the video again",
    )


@dataclass(frozen=True, slots=True)
class _Timeline:
    """The frames of a film that a player shows, without those that an edit list hides."""

    total: int
    rate: float  # their average, in Hz
    tick: float  # to which times are rounded, in seconds
    is_counted: bool  # by the file's header

    def times(self, places: Sequence[int], seconds: Sequence[float | None]) -> tuple[float, ...]:
        """When frames are: their own times, or those of a constant rate without the rounding."""
        even = [place / self.rate for place in places]
        pairs = list(zip(seconds, even, strict=True))
        if all(at is None or abs(at - other) <= self.tick for at, other in pairs):
            return tuple(even)
        return tuple(other if at is None else at for at, other in pairs)


def _timeline(av: Any, name: str, data: bytes) -> _Timeline:
    """Reads the packets of a film, and decodes none.

    Raises:
        RequestError: no moving picture, frames too large, or less than the header says.
    """
    with av.open(io.BytesIO(data)) as container:
        stream = _stream(container)
        if stream is None or stream.codec_context is None:  # of no codec that is known
            raise RequestError(f"{name} holds no moving picture", hint="give a video file")
        if stream.width * stream.height > MAX_PIXELS:
            raise RequestError(f"a video's frames have more than {MAX_PIXELS} pixels")
        # An empty packet marks the end
        packets = [
            (packet.is_discard, packet.pts, packet.duration or 0)
            for packet in container.demux(stream)
            if packet.size
        ]
        shown = [(pts, length) for is_hidden, pts, length in packets if not is_hidden]
        begin, end = _span([(pts, length) for pts, length in shown if pts is not None])
        # Samples of MP4 are frames, of AVI also their repetitions; an edit list takes frames away
        counted = stream.frames if "mp4" in container.format.name else 0
        longest = max((length for _, length in shown), default=0)
        if len(packets) < counted and end < (stream.duration or 0) - longest:
            raise _ends_early(name, len(shown), counted)
        rate = _rate(stream, len(shown), (end - begin) * stream.time_base)
        if not shown or not rate:
            raise RequestError(f"{name} holds no moving picture", hint="give a video file")
        return _Timeline(len(shown), rate, float(stream.time_base), counted > 0)


def _span(packets: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """When the first frame begins and the last ends, in ticks, of times and lengths."""
    if not packets:
        return 0, 0
    times = sorted(packets)
    usual = median(np.diff([pts for pts, _ in times]).tolist()) if len(times) > 1 else 0
    last, length = times[-1]  # whose length some files do not say
    return times[0][0], last + max(length, int(usual))


def _rate(stream: Any, total: int, seconds: Fraction) -> float:
    """Frames in a second: the header's number, unless the times of the frames contradict it."""
    said = stream.average_rate or stream.guessed_rate
    if seconds > 0 and not (said and abs(total / said - seconds) <= 1 / said):
        return float(total / seconds)
    return float(said or 0)


def _stream(container: Any) -> Any:
    """The film of a file, rather than the picture of its cover."""
    return container.streams.best("video")


def _count(av: Any, data: bytes) -> int:
    with av.open(io.BytesIO(data)) as container:
        return sum(1 for _ in container.decode(_stream(container)))


def _frames(
    av: Any, data: bytes, places: Sequence[int]
) -> tuple[list[Image.Image], list[float | None]]:
    """Frames at ascending places, and when they are shown, from the first one of the film."""
    frames: list[Image.Image] = []
    seconds: list[float | None] = []
    wanted, begin = set(places), None
    with av.open(io.BytesIO(data)) as container:
        stream = _stream(container)
        for place, frame in enumerate(container.decode(stream)):
            begin = frame.pts if begin is None else begin
            if place in wanted:
                frames.append(_upright(frame))
                ticks = None if frame.pts is None else frame.pts - begin
                seconds.append(None if ticks is None else float(ticks * stream.time_base))
            if place >= places[-1]:
                break
    return frames, seconds


def _upright(frame: Any) -> Image.Image:
    """The picture as a player shows it: turned and mirrored by the display matrix.

    The matrix (ISO/IEC 14496-12) takes x and y to a x + c y and b x + d y; phones write it.
    Of other angles than right ones, the nearest is taken.
    """
    image = frame.to_image()
    for item in frame.side_data:
        if item.type.name == "DISPLAYMATRIX":
            a, b, _, c, d = np.frombuffer(item, "=i4")[:5].astype(float)
            is_swapped = abs(b) + abs(c) > abs(a) + abs(d)
            signs = (b < 0, c < 0) if is_swapped else (a < 0, d < 0)
            turn = _TURNS.get((is_swapped, *signs))
            return image if turn is None else image.transpose(turn)
    return image
