"""Video rules of Muse-Glimmer: frames sampled evenly, a time before each temporal patch.

Rules as in transformers' `MuseGlimmerVideoProcessor` and `MuseGlimmerProcessor`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from edgellm.multimodal.processors.pixels import HALF, PixelRules
from edgellm.multimodal.processors.settings import Settings

_START, _SEPARATOR, _END = "<|vid_start|>", "<|vid_frame_separator|>", "<|vid_end|>"
_TIME = "Time: {timestamp:.1f}s"


@dataclass(frozen=True, slots=True, kw_only=True)
class FilmRules:
    """Video settings of a checkpoint."""

    frame_rate: float  # sampled frames per second
    max_frames: int
    max_tokens: int  # of a frame
    pixels: PixelRules

    placeholder = "<|video|>"
    is_text = False  # templates write the placeholder

    @classmethod
    def read(cls, settings: Settings, pixels: PixelRules, sizes: Mapping[str, int]) -> FilmRules:
        """Read the video settings.

        Args:
            settings: of videos; may be empty.
            pixels: the rules of images, for empty settings.
            sizes: patch sizes of images, which videos must share.

        Raises:
            UnsupportedModelError: unsupported settings.
        """
        if not settings.is_empty:
            pixels = PixelRules.read(settings, HALF, HALF, Image.Resampling.LANCZOS)
        for key, value in sizes.items():
            settings.agree(key, value)
        settings.expect("video_processor_type", "MuseGlimmerVideoProcessor")
        settings.expect("frame_timestamp_format", _TIME)
        settings.expect("size", None)
        for key in ("do_sample_frames", "return_metadata"):  # frames are too many otherwise
            settings.read(key, bool, False)
        rate = settings.read("fps", float, 2.0)
        if rate <= 0:
            raise settings.fault("fps", rate, "is not positive")
        found = cls(
            frame_rate=rate,
            max_frames=settings.positive("num_frames", 96),
            max_tokens=settings.positive("max_video_frame_tokens", 144),
            pixels=pixels,
        )
        settings.finish()
        return found

    def pick(self, total: int, rate: float, together: int) -> list[int]:
        """Sample frame indices of whole temporal patches from `total` frames at `rate` a second."""
        count = min(int(total * self.frame_rate / rate), self.max_frames, total)
        count = min(max(together, count // together * together), total)
        if count == 1:
            return [0]
        # Rounded as torch.linspace rounds: in float32, from both ends to the middle
        at, last = np.arange(count, dtype=np.float32), np.float32(total - 1)
        step = last / np.float32(count - 1)
        places = np.where(at < count // 2, at * step, last - (np.float32(count - 1) - at) * step)
        return places.astype(np.int64).tolist()

    @staticmethod
    def prompt(frame: str, seconds: Sequence[float]) -> str:
        """The prompt of a video with `frame` for each temporal patch, and `seconds` of these."""
        shown = _SEPARATOR.join(_TIME.format(timestamp=at) + frame for at in seconds)
        return f"{_START}{shown}{_END}"
