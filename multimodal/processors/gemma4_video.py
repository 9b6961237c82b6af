"""Video rules of Gemma 4: frames as images with a smaller budget of tokens, each after its time.

Sampling and prompts are those of transformers' `Gemma4VideoProcessor` and `Gemma4Processor`;
resizing is by Pillow, as for images.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image

from edgellm.core.errors import LimitError
from edgellm.multimodal.processors.pixels import PixelRules
from edgellm.multimodal.processors.settings import Checkpoint, Settings

_USUAL_FRAMES, _USUAL_BUDGET = 32, 70
_ZEROS, _ONES = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilmRules:
    """Video settings of a checkpoint."""

    num_frames: int | None  # of a video; None: `sampled_rate` counts
    sampled_rate: float  # frames per second
    budget: int  # maximum tokens of a frame
    pixels: PixelRules

    frame_rate = 24.0  # of a list of frames, as in transformers
    placeholder = "<|video|>"  # no file has it
    is_text = False  # templates write the placeholder

    @classmethod
    def read(cls, checkpoint: Checkpoint, check: Callable[[Settings, int], int]) -> FilmRules:
        """Read the video settings, or those of images if there are none.

        Args:
            checkpoint: its settings.
            check: checks patch sizes and the default budget, and returns the budget.

        Raises:
            UnsupportedModelError: unsupported settings.
        """
        has_file = not checkpoint.video.is_empty
        settings = checkpoint.video if has_file else checkpoint.image
        if has_file:
            kind = "Gemma4Unified" if checkpoint.model_type == "gemma4_unified" else "Gemma4"
            settings.expect("video_processor_type", f"{kind}VideoProcessor")
        rate = settings.read("fps", float, 0.0)
        frames = settings.read("num_frames", int, 0 if rate else _USUAL_FRAMES)
        if rate < 0 or frames < 0 or (rate > 0) == (frames > 0):
            raise settings.fault("num_frames", frames, f"does not go with fps = {rate}")
        for key in ("do_sample_frames", "return_metadata"):  # they are too many otherwise
            settings.read(key, bool, True)
        normalizes = settings.read("do_normalize", bool, True)
        found = cls(
            num_frames=frames or None,
            sampled_rate=rate,
            budget=check(settings, _USUAL_BUDGET),
            pixels=PixelRules.read(
                settings, _ZEROS, _ONES, Image.Resampling.BICUBIC, normalizes=normalizes
            ),
        )
        if has_file:
            settings.finish()
        return found

    def pick(self, total: int, rate: float, maximum: int) -> list[int]:
        """Sample at most `maximum` frame indices from `total` frames at `rate` per second."""
        wanted = self.num_frames or max(1, int(total / rate * self.sampled_rate))
        count = max(min(wanted, total, maximum), 1)
        return [place * total // count for place in range(count)]

    def budget_of(self, count: int, maximum: int, max_per_pass: int) -> int:
        """Maximum tokens of each of `count` frames; arguments as in `FilmProcessor.fit_frames`.

        Raises:
            LimitError: more frames than tokens.
        """
        if maximum < count:
            raise LimitError(
                f"a video of {count} frames has at least {count} tokens; {maximum} are allowed",
                hint="show fewer frames, or build with a larger --maxImageTokens",
            )
        return min(self.budget, max_per_pass, maximum // count)

    @staticmethod
    def prompt(frame: str, seconds: tuple[float, ...]) -> str:
        """The prompt of a video with `frame` for each frame, and `seconds` of frames."""
        return " ".join(f"{int(at // 60):02d}:{int(at % 60):02d} {frame}" for at in seconds)
