"""Qwen2-VL to Qwen3.5, LFM3-VL and Cosmos3-Edge: images of any size, split into patches.

Sides are rounded to multiples of a merged patch, and the area to the checkpoint's limits (Qwen2-VL,
arXiv 2409.12191, section 2.1; rounding as in transformers' `smart_resize`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from edgellm.core.errors import (
    LimitError,
    RequestError,
)
from edgellm.multimodal.positions import Grid, RotaryPositions, rotary_positions
from edgellm.multimodal.processors import Prepared, PreparedFilm
from edgellm.multimodal.processors.pixels import (
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    PixelRules,
    merged_patches,
    require_class,
)
from edgellm.multimodal.processors.qwen_video import FilmRules
from edgellm.multimodal.processors.settings import Checkpoint, Settings
from edgellm.multimodal.video import Film, Resize

IMAGE_TOKEN = "<|image_pad|>"  # default
MAX_ASPECT_RATIO = 200
_QWEN = "Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor", "Qwen3VLImageProcessor"
_COSMOS = ("Cosmos3EdgeImageProcessor",)
_AREA = 56 * 56, 28 * 28 * 1280  # defaults of the smallest and largest number of pixels


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """Pixels [P, 3*T*p*p]; patches that are merged into one token are consecutive."""

    rules: PixelRules
    patch_size: int
    merge_size: int  # patches of one token, along each side
    temporal_patch_size: int  # T: an image is a video of T equal frames
    min_pixels: int
    max_pixels: int
    image_token: str
    film: FilmRules | None = None  # None: no video support
    enlarges_strips: bool = False  # to one token along their short side, before all else

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> Processor:
        """Build the processor; raises `UnsupportedModelError` for unsupported settings."""
        settings, model_type = checkpoint.image, checkpoint.model_type
        is_cosmos = model_type == "cosmos3_edge"
        require_class(settings, *(_COSMOS if is_cosmos else _QWEN))
        vision = checkpoint.model.section("vision_config")
        usual = 16 if model_type.startswith(("qwen3", "lfm3", "cosmos3")) else 14
        patch_size = settings.agree("patch_size", vision.side("patch_size", usual))
        merge_size = settings.agree("merge_size", vision.positive("spatial_merge_size", 2))
        together = vision.side("temporal_patch_size", 1 if is_cosmos else 2)
        frames = settings.agree("temporal_patch_size", together)
        min_pixels, max_pixels = _area(settings, (256**2, 4096**2) if is_cosmos else _AREA)
        usual_pixels = (HALF, HALF) if is_cosmos else (CLIP_MEAN, CLIP_STD)
        rules = PixelRules.read(settings, *usual_pixels, Image.Resampling.BICUBIC)
        settings.finish()
        checkpoint.processor.finish()
        token = checkpoint.tokens.read("image_token", str, IMAGE_TOKEN)
        area = min_pixels, max_pixels
        has_films = model_type not in ("qwen2_vl", "lfm3_vl", "cosmos3_edge")
        sizes = {"patch_size": patch_size, "merge_size": merge_size, "temporal_patch_size": frames}
        film = FilmRules.read(checkpoint, area, rules, sizes) if has_films else None
        return cls(
            rules=rules,
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            image_token=token,
            film=film,
            enlarges_strips=is_cosmos,
            **sizes,
        )

    def merged(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of tokens of a grid of patches; see `PlacesImages`."""
        return grid[0] // self.merge_size, grid[1] // self.merge_size

    def positions(
        self, token_ids: ArrayLike, image_token_id: int, grids: Sequence[Grid]
    ) -> RotaryPositions:
        """M-RoPE positions of a prompt; see `PlacesImages`."""
        return rotary_positions(token_ids, image_token_id, grids)

    def count(self, size: tuple[int, int], max_tokens: int | None = None) -> int:
        """Image tokens of an image of `size` (width, height)."""
        rows, columns = self._tokens(*size, max_tokens)
        return rows * columns

    def prepare(self, image: Image.Image, max_tokens: int | None = None) -> Prepared:
        """Patches and prompt of an RGB image; see `ImageProcessor`."""
        rows, columns = self._tokens(image.width, image.height, max_tokens)
        side = self.patch_size * self.merge_size
        planes = self.rules.normalized(self.rules.resized(image, columns * side, rows * side))
        return Prepared(
            pixels=self._patches(planes[None]),
            grid=(rows * self.merge_size, columns * self.merge_size),
            num_tokens=rows * columns,
            prompt=self.image_token * (rows * columns),
        )

    def pick_frames(self, total: int, rate: float, maximum: int) -> list[int]:
        """Frame indices, see `FilmProcessor`; more frames are resized to smaller ones."""
        del maximum
        assert self.film is not None
        return self.film.pick(total, rate, self.temporal_patch_size)

    def fit_frames(
        self, size: tuple[int, int], count: int, maximum: int, max_per_pass: int
    ) -> Resize:
        """How frames are resized; see `FilmProcessor`."""
        assert self.film is not None
        rules, together = self.film, self.temporal_patch_size
        side, steps = self.patch_size * self.merge_size, -(-count // together)
        _refuse_strip(*size)
        rows, columns = rules.area(size, count, together, side)
        rows, columns = rules.within(rows, columns, min(max_per_pass, maximum // steps))
        return lambda frame: rules.pixels.resized(frame, columns * side, rows * side)

    def prepare_film(self, film: Film) -> PreparedFilm:
        """The passes of the encoder over a video, and its prompt; see `FilmProcessor`."""
        assert self.film is not None
        rules, together = self.film, self.temporal_patch_size
        side, last = self.patch_size * self.merge_size, len(film.frames) - 1
        steps = range(0, len(film.frames), together)
        columns, rows = (extent // side for extent in film.frames[0].size)
        groups = [[min(at + place, last) for place in range(together)] for at in steps]
        passes = tuple(
            self._patches(np.stack([rules.pixels.normalized(film.frames[at]) for at in group]))
            for group in groups
        )
        seconds = [film.seconds[at] for group in groups for at in group]
        count = rows * columns
        prompt = rules.prompt(self.image_token * count, seconds, together)
        grid = rows * self.merge_size, columns * self.merge_size
        whole = Prepared(
            pixels=np.zeros(0, np.float32),
            grid=grid,
            num_tokens=count * len(steps),
            prompt=prompt,
            placeholder=rules.placeholder,
        )
        runs = rules.runs(len(steps), rows, columns, film.frame_rate, together)
        return PreparedFilm(whole, passes, tuple(runs))

    def _tokens(self, width: int, height: int, max_tokens: int | None) -> tuple[int, int]:
        """Rows and columns of tokens."""
        _refuse_strip(width, height)
        if max_tokens is not None and max_tokens < 1:
            raise LimitError(
                f"an image has at least 1 token, and {max_tokens} are allowed",
                hint="allow more image tokens",
            )
        side = self.patch_size * self.merge_size
        if self.enlarges_strips and min(width, height) < side:
            scale = max(side / height, side / width)
            width, height = int(width * scale), int(height * scale)
        rows, columns = round(height / side), round(width / side)
        area = rows * columns * side**2
        if area > self.max_pixels:
            rows, columns = _shrunk(width, height, self.max_pixels, side)
        elif area < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * grow / side), math.ceil(width * grow / side)
        if max_tokens is None or rows * columns <= max_tokens:
            return rows, columns
        rows, columns = _shrunk(width, height, max_tokens * side**2, side)
        # A narrow strip is one token wide; limit its length
        return min(rows, max_tokens), min(columns, max_tokens)

    def _patches(self, planes: NDArray[np.float32]) -> NDArray[np.float32]:
        return merged_patches(planes, self.patch_size, self.merge_size, self.temporal_patch_size)


def _refuse_strip(width: int, height: int) -> None:
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise RequestError(
            f"an image of {width} x {height} pixels is longer than {MAX_ASPECT_RATIO} times"
            " its short side",
            hint="crop it",
        )


def _area(settings: Settings, usual: tuple[int, int]) -> tuple[int, int]:
    """The smallest and the largest number of pixels; all spellings mean areas, not edges."""
    size = settings.section("size")
    least = size.positive("shortest_edge", size.positive("min_pixels", usual[0]))
    maximum = size.positive("longest_edge", size.positive("max_pixels", usual[1]))
    size.finish()
    least = settings.positive("min_pixels", least)
    maximum = settings.positive("max_pixels", maximum)
    if least > maximum:
        raise settings.fault("min_pixels", least, f"is more than max_pixels = {maximum}")
    return least, maximum


def _shrunk(width: int, height: int, max_pixels: int, side: int) -> tuple[int, int]:
    """Rows and columns of an area of at most `max_pixels`, but at least one of each."""
    shrink = math.sqrt((height * width) / max_pixels)
    rows = max(1, math.floor(height / shrink / side))
    columns = max(1, math.floor(width / shrink / side))
    return rows, columns
