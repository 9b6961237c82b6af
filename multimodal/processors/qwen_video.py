"""Video rules of Qwen2.5-VL and Qwen3-VL: frame sampling, sizes and prompts.

T consecutive frames are one temporal patch, which the encoder processes as an image. Qwen2.5-VL
(arXiv 2502.13923) encodes time in rotary positions, Qwen3-VL (arXiv 2511.21631) as timestamps
between the frames. Rules as in transformers' `Qwen2VLVideoProcessor` and
`Qwen3VLVideoProcessor`; resizing by Pillow, as for images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from PIL import Image

from edgellm.core.errors import LimitError
from edgellm.multimodal.processors.pixels import CLIP_MEAN, CLIP_STD, HALF, PixelRules
from edgellm.multimodal.processors.settings import Checkpoint

_USUAL_FPS = 2.0  # default of Qwen's own tools
_CLASSES = "Qwen2VLVideoProcessor", "Qwen2_5_VLVideoProcessor", "Qwen3VLVideoProcessor"
_OPEN, _CLOSE, _PAD = "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class FilmRules:
    """Video settings of a checkpoint."""

    frame_rate: float  # sampled frames per second
    min_frames: int
    max_frames: int
    min_pixels: int  # of a frame; of all frames if `writes_times`
    max_pixels: int
    max_tokens: int | None  # of a frame if `writes_times`, else of the video; None: no such limit
    writes_times: bool
    tokens_per_second: float  # of rotary positions
    pad: str  # the template's token of a video
    pixels: PixelRules

    is_text = False  # templates write the placeholder

    @classmethod
    def read(
        cls,
        checkpoint: Checkpoint,
        area: tuple[int, int],
        pixels: PixelRules,
        sizes: Mapping[str, int],
    ) -> FilmRules:
        """Read the video settings; the image settings are defaults.

        Args:
            checkpoint: its settings.
            area: the limits of images, in pixels.
            pixels: the rules of images.
            sizes: patch sizes of images, which videos must share.

        Raises:
            UnsupportedModelError: unsupported settings.
        """
        settings, writes_times = checkpoint.video, checkpoint.model_type.startswith("qwen3")
        if not settings.is_empty:
            usual = (HALF, HALF) if writes_times else (CLIP_MEAN, CLIP_STD)
            pixels = PixelRules.read(settings, *usual, Image.Resampling.BICUBIC)
            for key, value in sizes.items():
                settings.agree(key, value)
            settings.expect("video_processor_type", *_CLASSES)
            settings.read("do_sample_frames", bool, True)  # they are too many otherwise
        if writes_times:
            area = 128 * 32 * 32, 32 * 32 * 768
        size = settings.section("size")
        least = size.positive("shortest_edge", area[0])
        maximum = size.positive("longest_edge", area[1])
        settings.expect("num_frames", None)
        is_capped = settings.read("cap_pixels_per_frame", bool, False)
        max_tokens = settings.positive("max_video_tokens", 768 if writes_times else 128000)
        settings.read("return_metadata", bool, False)
        vision = checkpoint.model.section("vision_config")
        found = cls(
            frame_rate=settings.read("fps", float, _USUAL_FPS),
            min_frames=settings.positive("min_frames", 4),
            max_frames=settings.positive("max_frames", 768),
            min_pixels=settings.positive("min_pixels", least),
            max_pixels=settings.positive("max_pixels", maximum),
            max_tokens=max_tokens if is_capped else None,
            writes_times=writes_times,
            tokens_per_second=vision.read("tokens_per_second", float, 4.0),
            pad=checkpoint.tokens.read("video_token", str, _PAD),
            pixels=pixels,
        )
        size.finish()
        settings.finish()
        return found

    @property
    def placeholder(self) -> str:
        """The template's placeholder of a video."""
        return f"{_OPEN}{self.pad}{_CLOSE}" if self.writes_times else self.pad

    def pick(self, total: int, rate: float, together: int) -> list[int]:
        """Sample frame indices from `total` frames at `rate` per second."""
        if self.writes_times:
            count = int(total / rate * self.frame_rate)
            count = min(max(count, self.min_frames), self.max_frames, total)
            return np.linspace(0, total - 1, count).round().astype(int).tolist()
        maximum = min(self.max_frames, total) // together * together
        wanted = min(max(total / rate * self.frame_rate, self.min_frames), maximum, total)
        count = max(math.floor(wanted / together) * together, 1)
        return [int(place) for place in np.arange(0, total, total / count)][:count]

    def area(self, size: tuple[int, int], frames: int, together: int, side: int) -> tuple[int, int]:
        """Rows and columns of tokens of a frame of `size` (width, height)."""
        width, height = size
        if self.writes_times and min(width, height) < side:
            scale = max(side / height, side / width)
            width, height = int(width * scale), int(height * scale)
        rows, columns = round(height / side), round(width / side)
        maximum = self._max_pixels(frames, together, side)
        depth = round(frames / together) * together if self.writes_times else 1
        volume = (frames if self.writes_times else 1) * height * width
        if depth * rows * columns * side**2 > maximum:
            shrink = math.sqrt(volume / maximum)
            rows = max(1, math.floor(height / shrink / side))
            columns = max(1, math.floor(width / shrink / side))
        elif depth * rows * columns * side**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / volume)
            rows, columns = math.ceil(height * grow / side), math.ceil(width * grow / side)
        return rows, columns

    def _max_pixels(self, frames: int, together: int, side: int) -> int:
        """The limit `max_pixels`, reduced by `max_tokens` as in transformers."""
        if self.max_tokens is None:
            return self.max_pixels
        least = int(self.min_pixels * 1.05)
        if self.writes_times:
            of_frame = min(self.max_tokens * side**2, self.max_pixels // frames)
            return max(of_frame, least) * frames
        of_video = int(self.max_tokens * side**2 * 0.9)
        return max(min(self.max_pixels, of_video * together // frames), least)

    def within(self, rows: int, columns: int, maximum: int) -> tuple[int, int]:
        """Shrink a grid to at most `maximum` tokens; raises `LimitError` if that is 0."""
        if maximum < 1:
            raise LimitError(
                "the video has more pairs of frames than image tokens are allowed",
                hint="show a shorter part of it, or build with a larger --maxImageTokens",
            )
        shrink = math.sqrt(rows * columns / maximum)
        if shrink > 1:
            rows, columns = max(1, int(rows / shrink)), max(1, int(columns / shrink))
        return min(rows, maximum), min(columns, maximum)

    def prompt(self, image: str, seconds: list[float], together: int) -> str:
        """The prompt of a video with `image` for each temporal patch, and `seconds` of frames."""
        steps = range(0, len(seconds), together)
        if not self.writes_times:
            return image * len(steps)
        middles = [(seconds[at] + seconds[at + together - 1]) / 2 for at in steps]
        return "".join(f"<{middle:.1f} seconds>{_OPEN}{image}{_CLOSE}" for middle in middles)

    def runs(
        self, frames: int, rows: int, columns: int, rate: float, together: int
    ) -> list[tuple[int, int, int, float]]:
        """Temporal patches, rows, columns and position interval of each run of image tokens."""
        if self.writes_times:
            return [(1, rows, columns, 1.0)] * frames
        return [(frames, rows, columns, self.tokens_per_second * together / rate)]
