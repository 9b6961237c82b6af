"""Decodes videos to RGB frames: sampled frames of files, through PyAV, or lists of images."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from PIL import Image

from edgellm.core.commands.extras import install
from edgellm.core.errors import RequestError
from edgellm.multimodal.images import MAX_PIXELS, content_hash, open_image
from edgellm.multimodal.media import Video, open_container
from edgellm.multimodal.source_files import read_source

# Frame sampler: from the number of frames and the frame rate to frame indices.
Pick = Callable[[int, float], Sequence[int]]
Resize = Callable[[Image.Image], Image.Image]
# From the size of the first frame (width, height) and the number of frames to their resizing.
Fit = Callable[[tuple[int, int], int], Resize]


# By whether x and y are swapped, and by the signs of the two coefficients.
_TURNS = {
    (False, True, False): Image.Transpose.FLIP_LEFT_RIGHT,
    (False, False, True): Image.Transpose.FLIP_TOP_BOTTOM,
    (False, True, True): Image.Transpose.ROTATE_180,
    (True, False, False): Image.Transpose.TRANSPOSE,
    (True, False, True): Image.Transpose.ROTATE_270,
    (True, True, False): Image.Transpose.ROTATE_90,
    (True, True, True): Image.Transpose.TRANSVERSE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Film:
    """The sampled frames of a video, as an encoder takes them."""

    frames: tuple[Image.Image, ...]
    seconds: tuple[float, ...]  # time of each frame
    frame_rate: float  # of the sampled frames, in Hz
    duration: float  # of the whole video, in seconds; of a list of frames, time of the last
    resize: Resize | None = None  # how frames were made

    def content(self) -> str:
        """SHA-256 (hexadecimal) of pixels and times."""
        times = f"{self.seconds} {self.frame_rate} {self.duration}"
        digest = hashlib.sha256(times.encode())
        for frame in self.frames:
            digest.update(content_hash(frame).encode())
        return digest.hexdigest()


def open_film(
    video: Video, folder: Path, pick: Pick, usual_rate: float, fit: Fit | None = None
) -> Film:
    """Decode the frames of a video that `pick` selects; lists of frames are used completely.

    Each frame is resized before the next is decoded: 768 frames of 1080p have 4.8 GB.

    Args:
        video: the file or frames.
        folder: the base of relative paths.
        pick: selects frame indices, ascending.
        usual_rate: frames per second of a list.
        fit: how frames are resized; None: they stay as they are. It may raise errors.

    Raises:
        RequestError: missing, not a video, PyAV is not installed, or frames differ in size.
    """
    if video.is_file:
        return _decoded(video.frames[0], folder, pick, fit or _as_they_are)
    if not video.frames:
        raise RequestError("a video of no frames", hint="give a file, or a list of images")
    fitted = _Fitted(fit or _as_they_are, len(video.frames))
    for source in video.frames:
        fitted.add(open_image(source, folder))
    if len(fitted.sizes) > 1:
        raise RequestError("the frames of a video have several sizes", hint="make them alike")
    seconds = tuple(index / usual_rate for index in range(len(video.frames)))
    return Film(
        frames=tuple(fitted.frames),
        seconds=seconds,
        frame_rate=usual_rate,
        duration=seconds[-1],
        resize=fitted.resize,
    )


def _as_they_are(size: tuple[int, int], count: int) -> Resize:
    del size, count
    return lambda frame: frame


class _Fitted:
    """Frames that are resized one after another."""

    def __init__(self, fit: Fit, count: int) -> None:
        """Args: `fit`, and `count`, the number of frames."""
        self.frames: list[Image.Image] = []
        self.sizes: set[tuple[int, int]] = set()  # before resizing
        self.resize: Resize | None = None
        self._fit, self._count = fit, count

    def add(self, frame: Image.Image) -> None:
        """Resize the next frame."""
        if self.resize is None:
            self.resize = self._fit(frame.size, self._count)
        self.sizes.add(frame.size)
        self.frames.append(self.resize(frame))


def _decoded(source: str, folder: Path, pick: Pick, fit: Fit) -> Film:
    if importlib.util.find_spec("av") is None:
        raise RequestError(
            "video files need PyAV",
            hint=f"{install('video')}; or give a list of frames",
        )
    av: Any = importlib.import_module("av")  # an optional package
    name, data = read_source(source, folder)
    try:
        return _shown(av, name, data, pick, fit)
    except av.FFmpegError as error:
        raise RequestError(
            f"{name} holds no video that can be read: {error.strerror}", hint="save it as MP4"
        ) from None


def _shown(av: Any, name: str, data: bytes, pick: Pick, fit: Fit) -> Film:
    timeline = _timeline(av, name, data)
    places = list(pick(timeline.total, timeline.rate))
    fitted, seconds = _frames(av, data, places, fit)
    if len(fitted.frames) < len(places) and not timeline.is_counted:  # packets without frames
        timeline = replace(timeline, total=_count(av, data))
        if not timeline.total:
            raise _no_picture(name)
        places = list(pick(timeline.total, timeline.rate))
        fitted, seconds = _frames(av, data, places, fit)
    if len(fitted.frames) < len(places):
        raise _ends_early(name, len(fitted.frames), len(places))
    times = timeline.times(places, seconds)
    if any(later < earlier for earlier, later in pairwise(times)):
        raise RequestError(
            f"{name} is damaged: the times of its frames do not ascend",
            hint="copy or save the video again",
        )
    return Film(
        frames=tuple(fitted.frames),
        seconds=times,
        frame_rate=len(places) / timeline.total * timeline.rate,
        duration=timeline.total / timeline.rate,
        resize=fitted.resize,
    )


def _no_picture(name: str) -> RequestError:
    return RequestError(f"{name} holds no moving picture", hint="give a video file")


def _ends_early(name: str, found: int, expected: int) -> RequestError:
    return RequestError(
        f"{name} ends early: {found} of {expected} frames can be read",
        hint="the copy was cut short; copy or save the video again",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timeline:
    """The visible frames of a video, without those that an edit list hides."""

    total: int
    rate: float  # average, in Hz
    tick: float  # resolution of times, in seconds
    is_counted: bool  # whether the header has the number of frames

    def times(self, places: Sequence[int], seconds: Sequence[float | None]) -> tuple[float, ...]:
        """Times of frames: exact ones if the rate is constant, otherwise the rounded ones."""
        even = [place / self.rate for place in places]
        pairs = list(zip(seconds, even, strict=True))
        if all(at is None or abs(at - other) <= self.tick for at, other in pairs):
            return tuple(even)
        return tuple(other if at is None else at for at, other in pairs)


def _timeline(av: Any, name: str, data: bytes) -> _Timeline:
    """Read the packets of a video without decoding.

    Raises:
        RequestError: no video stream, frames too large, or fewer frames than in the header.
    """
    with _opened(av, data) as container:
        stream = _stream(container)
        if stream is None or stream.codec_context is None:  # unknown codec
            raise _no_picture(name)
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
        # MP4 counts frames, AVI also repetitions; an edit list hides frames
        counted = stream.frames if "mp4" in container.format.name else 0
        longest = max((length for _, length in shown), default=0)
        if len(packets) < counted and end < (stream.duration or 0) - longest:
            raise _ends_early(name, len(shown), counted)
        rate = _rate(stream, len(shown), (end - begin) * stream.time_base)
        if not shown or not rate:
            raise _no_picture(name)
        return _Timeline(
            total=len(shown), rate=rate, tick=float(stream.time_base), is_counted=counted > 0
        )


def _span(packets: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Start of the first frame and end of the last, in ticks."""
    if not packets:
        return 0, 0
    times = sorted(packets)
    usual = median(np.diff([pts for pts, _ in times]).tolist()) if len(times) > 1 else 0
    last, length = times[-1]  # some files lack the last length
    return times[0][0], last + max(length, int(usual))


def _rate(stream: Any, total: int, seconds: Fraction) -> float:
    """Frames per second: the header's rate, unless the times of the frames contradict it."""
    declared = stream.average_rate or stream.guessed_rate
    if seconds > 0 and not (declared and abs(total / declared - seconds) <= 1 / declared):
        return float(total / seconds)
    return float(declared or 0)


def _opened(av: Any, data: bytes) -> Any:
    return open_container(av, io.BytesIO(data))


def _stream(container: Any) -> Any:
    """The video stream of a file, not its cover image."""
    return container.streams.best("video")


def _count(av: Any, data: bytes) -> int:
    with _opened(av, data) as container:
        return sum(1 for _ in container.decode(_stream(container)))


def _frames(
    av: Any, data: bytes, places: Sequence[int], fit: Fit
) -> tuple[_Fitted, list[float | None]]:
    """Frames at ascending indices, and their times relative to the first frame."""
    fitted = _Fitted(fit, len(places))
    seconds: list[float | None] = []
    wanted, begin = set(places), None
    with _opened(av, data) as container:
        stream = _stream(container)
        for place, frame in enumerate(container.decode(stream)):
            begin = frame.pts if begin is None else begin
            if place in wanted:
                fitted.add(_upright(frame))
                ticks = None if frame.pts is None else frame.pts - begin
                seconds.append(None if ticks is None else float(ticks * stream.time_base))
            if place >= places[-1]:
                break
    return fitted, seconds


def _upright(frame: Any) -> Image.Image:
    """A frame rotated and mirrored by the display matrix.

    The matrix (ISO/IEC 14496-12) maps x and y to a x + c y and b x + d y; phones write it. Other
    angles are rounded to the nearest right angle.
    """
    image = frame.to_image()
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return image
    a, b, _, c, d = np.frombuffer(matrix, "=i4")[:5].astype(float)
    is_swapped = abs(b) + abs(c) > abs(a) + abs(d)
    signs = (b < 0, c < 0) if is_swapped else (a < 0, d < 0)
    turn = _TURNS.get((is_swapped, *signs))
    return image if turn is None else image.transpose(turn)
