"""Media of a request: an image by its path or URI, or a video."""

from __future__ import annotations

from dataclasses import dataclass


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


Source = str | Video
