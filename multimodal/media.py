"""Media of a request: an image by its path or URI, a video, audio; containers of FFmpeg."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, BinaryIO


@dataclass(frozen=True, slots=True)
class Video:
    """A video: a file, or its frames in order, each an image."""

    frames: tuple[str, ...]
    is_file: bool  # a video file, from which the processor samples frames

    @classmethod
    def of(cls, value: str | list[str] | tuple[str, ...]) -> Video:
        """Args: `value`, the path or URI of a file, or a list of frames."""
        is_file = isinstance(value, str)
        return cls((value,) if is_file else tuple(value), is_file)


@dataclass(frozen=True, slots=True)
class Audio:
    """An audio clip: the path or URI of a file."""

    source: str


Picture = str | Video
Source = Picture | Audio


def open_container(av: Any, file: BinaryIO) -> Any:
    """A container of PyAV, the module `av`; texts of the file that are not UTF-8 do not matter."""
    # PyAV 19 always opens such files, and has no option for it.
    options = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}
    return av.open(file, **options)
