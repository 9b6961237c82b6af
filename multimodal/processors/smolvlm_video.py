"""Video rules of SmolVLM2 (arXiv 2504.05299): frames as single tiles, each after its timestamp.

Frame sampling and prompts are those of transformers' `SmolVLMVideoProcessor` and
`SmolVLMProcessor`; resizing is by Pillow, as for images.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import numpy as np

from edgellm.multimodal.processors.pixels import HALF, PixelRules
from edgellm.multimodal.processors.settings import Checkpoint

_SKIPPED_SECONDS = 1  # at both ends of a long video
_USUAL_EDGE, _USUAL_TILE, _USUAL_RATE, _USUAL_FRAMES = 4 * 364, 364, 1.0, 64
_UNITS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilmRules:
    """Video settings of a checkpoint."""

    frame_rate: float  # sampled frames per second
    max_frames: int
    longest_edge: int  # of a frame before it becomes a tile
    placeholder: str  # of a video in the messages
    pixels: PixelRules

    # Chat templates of these models have no videos, or a different format.
    is_text = True

    @classmethod
    def read(
        cls, checkpoint: Checkpoint, pixels: PixelRules, edge: int, tile_size: int
    ) -> FilmRules | None:
        """Read the video settings, from the image file if there is no video file.

        Args:
            checkpoint: its settings.
            pixels: the rules of images.
            edge: of images, in pixels.
            tile_size: of images, in pixels.

        Returns:
            None if the settings have no number of frames.

        Raises:
            UnsupportedModelError: unsupported settings.
        """
        has_file = not checkpoint.video.is_empty
        settings = checkpoint.video if has_file else checkpoint.image
        sampling = settings.section("video_sampling")
        if has_file:
            pixels, edge = _of_its_own(checkpoint, pixels, tile_size)
        if sampling.is_empty and settings.read("num_frames", int, 0) == 0:
            return None
        said, key = (settings, "num_frames") if sampling.is_empty else (sampling, "max_frames")
        rate = said.read("fps", float, _USUAL_RATE)
        if rate <= 0:
            raise said.fault("fps", rate, "is not positive")
        token = checkpoint.tokens.read("video_token", str, "<video>")
        return cls(
            frame_rate=rate,
            max_frames=said.positive(key, _USUAL_FRAMES),
            longest_edge=edge,
            placeholder=token,
            pixels=pixels,
        )

    def pick(self, total: int, rate: float, maximum: int) -> list[int]:
        """Sample at most `maximum` frame indices from `total` frames at `rate` per second."""
        maximum, seconds = min(self.max_frames, maximum), total / rate
        count = max(min(round(self.frame_rate * seconds), maximum), 1)
        first, last = 0, total - 1
        if seconds - 2 * _SKIPPED_SECONDS > maximum * self.frame_rate:
            first, last = int(_SKIPPED_SECONDS * rate), int(total - _SKIPPED_SECONDS * rate)
        last = min(last, total - 1)
        if first >= last:
            first, last = 0, total - 1
        return np.unique(np.linspace(first, last, count, dtype=int)).tolist()

    @staticmethod
    def prompt(frame: str, seconds: tuple[float, ...], duration: float) -> str:
        """The prompt of a video with `frame` for each frame, and `seconds` of frames."""
        shown = "".join(
            f"\nFrame from {int(at // 60):02d}:{int(at % 60):02d}:{frame}" for at in seconds
        )
        return (
            f"You are provided the following series of {in_words(len(seconds))} frames"
            f" from a {timedelta(seconds=int(duration))} [H:MM:SS] video.\n{shown}\n\n"
        )


def in_words(number: int) -> str:
    """A non-negative integer in English words, as in the package num2words."""
    if number < 20:
        return _UNITS[number]
    if number < 100:
        tens, unit = divmod(number, 10)
        return _TENS[tens - 2] + (f"-{_UNITS[unit]}" if unit else "")
    size, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    count, rest = divmod(number, size)
    link = ", " if rest >= 100 else " and "
    return f"{in_words(count)} {name}" + (link + in_words(rest) if rest else "")


def _of_its_own(
    checkpoint: Checkpoint, pixels: PixelRules, tile_size: int
) -> tuple[PixelRules, int]:
    """Pixel rules and longest edge from the video file."""
    settings = checkpoint.video
    settings.expect("video_processor_type", "SmolVLMVideoProcessor")
    for key in ("do_sample_frames", "return_metadata"):  # frames are sampled for every template
        settings.expect(key, True, False)
    found = PixelRules.read(settings, HALF, HALF, pixels.resample)
    size, tile = settings.section("size"), settings.section("max_image_size")
    sampling = settings.section("video_sampling")
    said = sampling.section("video_size").positive("longest_edge", _USUAL_EDGE)
    edge = size.positive("longest_edge", said)
    side = tile.positive("longest_edge", _USUAL_TILE)
    if side != tile_size:
        raise tile.fault("longest_edge", side, f"should be {tile_size}, as for images")
    for section in (size, tile):
        section.finish()
    settings.read("fps", float, 0.0)
    settings.read("num_frames", int, 0)
    settings.read("do_image_splitting", bool, False)  # of images; frames are never split
    settings.finish()
    return found, edge
