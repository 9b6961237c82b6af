"""Muse-Glimmer: images and frames of any size, as the grid of tokens nearest to their shape.

A grid has at most as many tokens as the checkpoint allows (transformers' models/muse_glimmer).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import numpy as np
from PIL import Image

from edgellm.core.errors import LimitError
from edgellm.multimodal.processors import Prepared, PreparedFilm
from edgellm.multimodal.processors.muse_glimmer_video import FilmRules
from edgellm.multimodal.processors.pixels import HALF, PixelRules, merged_patches, require_class
from edgellm.multimodal.processors.settings import Checkpoint
from edgellm.multimodal.video import Film, Resize

_START, _END = "<|image_start|>", "<|image_end|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """Pixels [P, 3*T*p*p]; patches that are merged into one token are consecutive."""

    rules: PixelRules
    patch_size: int
    merge_size: int  # patches of one token, along each side
    temporal_patch_size: int  # T: an image is a video of T equal frames
    max_tokens: int  # of an image
    film: FilmRules

    image_token = "<|patch|>"

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> Processor:
        """Build the processor; raises `UnsupportedModelError` for unsupported settings."""
        settings = checkpoint.image
        require_class(settings, "MuseGlimmerImageProcessor")
        vision = checkpoint.model.section("vision_config")
        sizes = {
            "patch_size": settings.agree("patch_size", vision.positive("patch_size", 14)),
            "merge_size": settings.agree("merge_size", vision.positive("merge_size", 2)),
            "temporal_patch_size": settings.agree(
                "temporal_patch_size", vision.positive("patch_temporal", 2)
            ),
        }
        max_tokens = settings.positive("max_image_tokens", 4096)
        settings.expect("size", None)
        rules = PixelRules.read(settings, HALF, HALF, Image.Resampling.LANCZOS)
        settings.finish()
        checkpoint.processor.finish()
        film = FilmRules.read(checkpoint.video, rules, sizes)
        return cls(rules=rules, max_tokens=max_tokens, film=film, **sizes)

    def count(self, size: tuple[int, int], max_tokens: int | None = None) -> int:
        """Image tokens of an image of `size` (width, height)."""
        rows, columns = self._tokens(*size, max_tokens)
        return rows * columns

    def prepare(self, image: Image.Image, max_tokens: int | None = None) -> Prepared:
        """Patches and prompt of an RGB image; see `ImageProcessor`."""
        rows, columns = self._tokens(image.width, image.height, max_tokens)
        planes = self.rules.normalized(self.rules.resized(image, *self._pixels(rows, columns)))
        return Prepared(
            pixels=self._patches(planes[None]),
            grid=(rows * self.merge_size, columns * self.merge_size),
            num_tokens=rows * columns,
            prompt=f"{_START}{self.image_token * (rows * columns)}{_END}",
        )

    def pick_frames(self, total: int, rate: float, maximum: int) -> list[int]:
        """Frame indices, see `FilmProcessor`; more frames are resized to smaller ones."""
        del maximum
        return self.film.pick(total, rate, self.temporal_patch_size)

    def fit_frames(
        self, size: tuple[int, int], count: int, maximum: int, max_per_pass: int
    ) -> Resize:
        """How frames are resized; see `FilmProcessor`."""
        limit = min(max_per_pass, maximum // -(-count // self.temporal_patch_size))
        if limit < 1:
            raise LimitError(
                "the video has more pairs of frames than image tokens are allowed",
                hint="show a shorter part of it, or build with a larger --maxImageTokens",
            )
        sides = self._pixels(*self._within(*size, self.film.max_tokens, limit))
        return lambda frame: self.film.pixels.resized(frame, *sides)

    def prepare_film(self, film: Film) -> PreparedFilm:
        """The passes of the encoder over a video, and its prompt; see `FilmProcessor`."""
        rules, together, last = self.film, self.temporal_patch_size, len(film.frames) - 1
        steps = range(0, len(film.frames), together)
        passes = []
        for first in steps:
            group = (film.frames[min(first + place, last)] for place in range(together))
            passes.append(
                self._patches(np.stack([rules.pixels.normalized(each) for each in group]))
            )
        columns, rows = (extent // self.patch_size for extent in film.frames[0].size)
        count = rows * columns // self.merge_size**2
        whole = Prepared(
            pixels=np.zeros(0, np.float32),
            grid=(rows, columns),
            num_tokens=count * len(steps),
            prompt=rules.prompt(self.image_token * count, [film.seconds[at] for at in steps]),
            placeholder=rules.placeholder,
        )
        return PreparedFilm(whole, tuple(passes), ())

    def _patches(self, planes: np.ndarray) -> np.ndarray:
        """Patches of frames [1 or T, 3, height, width]."""
        return merged_patches(
            planes, self.patch_size, self.merge_size, frames=self.temporal_patch_size
        )

    def _pixels(self, rows: int, columns: int) -> tuple[int, int]:
        """Width and height of a grid of tokens."""
        side = self.patch_size * self.merge_size
        return columns * side, rows * side

    def _tokens(self, width: int, height: int, max_tokens: int | None) -> tuple[int, int]:
        """Rows and columns of tokens of an image."""
        if max_tokens is not None and max_tokens < 1:
            raise LimitError(
                f"an image has at least 1 token, and {max_tokens} are allowed",
                hint="allow more image tokens",
            )
        return self._within(width, height, self.max_tokens, max_tokens)

    def _within(self, width: int, height: int, own: int, limit: int | None) -> tuple[int, int]:
        """Rows and columns within the checkpoint's `own` maximum, and within `limit`."""
        side = self.patch_size * self.merge_size
        rows, columns = nearest_tokens(width, height, side, own)
        if limit is None or rows * columns <= limit:
            return rows, columns
        rows, columns = nearest_tokens(width, height, side, limit)
        return min(rows, limit), min(columns, limit)  # a narrow strip may be longer


def nearest_tokens(width: int, height: int, side: int, maximum: int) -> tuple[int, int]:
    """Rows and columns of at most `maximum` tokens whose ratio is nearest to that of an image.

    Args:
        width: of the image.
        height: of the image.
        side: of a token, in pixels.
        maximum: tokens; a strip that is narrower than a token may have more.
    """
    # In floats and in this order, because transformers does so
    rows, columns = height / side, width / side
    ratio = columns / rows
    if rows * columns > maximum:
        rows = (maximum / ratio) ** 0.5
        columns = rows * ratio
    # Of equally near grids a set's first one, as in transformers
    grids = set(
        product(
            (math.floor(rows), math.ceil(rows)),
            (math.floor(columns), math.ceil(columns)),
        )
    )
    fitting = [grid for grid in grids if min(grid) >= 1 and math.prod(grid) <= maximum]
    if not fitting:
        return max(1, round(rows)), max(1, round(columns))
    return min(fitting, key=lambda grid: abs(grid[0] / grid[1] - height / width))
