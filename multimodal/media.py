"""What a request shows a model: an image by its path or URI, or a film."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Video:
    """A film: one file of it, or its frames in order, each an image."""

    frames: tuple[str, ...]
    is_file: bool  # of which the processor takes the frames that it wants

    @classmethod
    def of(cls, value: str | list[str] | tuple[str, ...]) -> Video:
        """A path or URI is a file, a list has the frames."""
        is_file = isinstance(value, str)
        return cls((value,) if is_file else tuple(value), is_file)


Source = str | Video
