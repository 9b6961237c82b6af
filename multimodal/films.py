"""Films to RGB frames: files through PyAV, of which some frames are kept, or lists of images."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from edgellm.contract import RequestError
from edgellm.multimodal.images import MAX_PIXELS, content_hash, open_image, read_source
from edgellm.multimodal.sources import Video

# Of a film of so many frames, so many in a second, those that are shown.
Pick = Callable[[int, float], Sequence[int]]


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
        total, rate = _length(av, data)
        places = list(pick(total, rate))
        frames = _frames(av, data, places)
    except av.FFmpegError as error:
        raise RequestError(
            f"{name} holds no video that can be read: {error.strerror}", hint="save it as MP4"
        ) from None
    except (IndexError, ZeroDivisionError, TypeError):
        raise RequestError(f"{name} holds no moving picture", hint="give a video file") from None
    if len(frames) < len(places):
        raise RequestError(
            f"{name} ends early: {len(frames)} of {len(places)} frames can be read",
            hint="the copy was cut short; copy or save the video again",
        )
    seconds = tuple(place / rate for place in places)
    return Film(tuple(frames), seconds, len(places) / total * rate, total / rate)


def _length(av: Any, data: bytes) -> tuple[int, float]:
    """Frames of a film, and frames in a second."""
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        if stream.width * stream.height > MAX_PIXELS:
            raise RequestError(f"a video's frames have more than {MAX_PIXELS} pixels")
        rate = float(stream.average_rate or stream.guessed_rate)
        total = stream.frames or sum(1 for _ in container.decode(stream))
    if not total or not rate:
        raise ZeroDivisionError
    return total, rate


def _frames(av: Any, data: bytes, places: Sequence[int]) -> list[Image.Image]:
    wanted, found = set(places), {}
    with av.open(io.BytesIO(data)) as container:
        for place, frame in enumerate(container.decode(video=0)):
            if place in wanted:
                found[place] = frame.to_image()
            if place >= places[-1]:
                break
    return [found[place] for place in places if place in found]
