"""LFM2-VL: images of any size, or tiles and a thumbnail of large ones.

A large image is cut into a grid of square tiles with the nearest aspect ratio, and a thumbnail is
resized like a small image (LFM2, arXiv 2511.23404; rounding as in transformers).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edgellm.core.errors import LimitError
from edgellm.multimodal.processors import Prepared
from edgellm.multimodal.processors.pixels import (
    HALF,
    PixelRules,
    merged_patches,
    nearest_grid,
    require_class,
)
from edgellm.multimodal.processors.settings import Checkpoint, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Limits of tokens and tiles."""

    patch: int  # pixels
    side: int  # pixels of a token
    min_tokens: int  # of an image that is not cut, or of a thumbnail
    max_tokens: int
    tile_size: int  # pixels
    min_tiles: int
    max_tiles: int  # 1: images are not cut
    tolerance: float  # an image of this many times `max_tokens` is not cut
    has_thumbnail: bool

    @classmethod
    def read(cls, settings: Settings, patch: int, side: int) -> Sizes:
        """Read the settings; raises `UnsupportedModelError` for those that do not fit."""
        found = cls(
            patch=patch,
            side=side,
            min_tokens=settings.positive("min_image_tokens", 64),
            max_tokens=settings.positive("max_image_tokens", 256),
            tile_size=settings.positive("tile_size", 512),
            min_tiles=settings.positive("min_tiles", 2),
            max_tiles=settings.positive("max_tiles", 10),
            tolerance=settings.read("max_pixels_tolerance", float, 2.0),
            has_thumbnail=settings.read("use_thumbnail", bool, True),
        )
        if found.tile_size % side:
            raise settings.fault("tile_size", found.tile_size, f"is no multiple of {side}")
        if found.min_tokens > found.max_tokens:
            problem = f"is more than max_image_tokens = {found.max_tokens}"
            raise settings.fault("min_image_tokens", found.min_tokens, problem)
        if not settings.read("do_image_splitting", bool, True):
            return replace(found, min_tiles=1, max_tiles=1)
        if found.max_tiles > 1 and not 2 <= found.min_tiles <= found.max_tiles:
            problem = f"does not lie between 2 and max_tiles = {found.max_tiles}"
            raise settings.fault("min_tiles", found.min_tiles, problem)
        return found

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile."""
        return (self.tile_size // self.side) ** 2

    def whole(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of tokens of an image that is not cut, or of its thumbnail."""
        side = self.side
        rows, columns = (max(round(extent / side), 1) for extent in (height, width))
        least, maximum = self.min_tokens * side**2, self.max_tokens * side**2
        if rows * columns > self.max_tokens:
            shrink = math.sqrt(height * width / maximum)
            return max(1, int(height / shrink / side)), max(1, int(width / shrink / side))
        if rows * columns < self.min_tokens:
            grow = math.sqrt(least / (height * width))
            return math.ceil(height * grow / side), math.ceil(width * grow / side)
        return rows, columns

    def is_large(self, width: int, height: int) -> bool:
        """Whether an image is cut into tiles."""
        side, maximum = self.side, self.max_tokens * self.side**2 * self.tolerance
        high, wide = (max(round(each / side) * side, self.patch) for each in (height, width))
        return self.max_tiles > 1 and high * wide > maximum


@dataclass(frozen=True, slots=True)
class _Plan:
    """How an image becomes passes of the encoder."""

    whole: tuple[int, int]  # rows and columns of tokens of the image or its thumbnail
    tiles: tuple[int, int] = (1, 1)  # rows and columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """Pixels [P, 3*p*p] of all passes: tiles row by row, then the thumbnail."""

    rules: PixelRules
    patch_size: int
    merge_size: int  # patches of one token, along each side
    sizes: Sizes
    image_token: str
    start_token: str
    end_token: str
    thumbnail_token: str

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> Processor:
        """Build the processor; raises `UnsupportedModelError` for unsupported settings."""
        settings, model, tokens = checkpoint.image, checkpoint.model, checkpoint.tokens
        require_class(settings, "Lfm2VlImageProcessor")
        vision = model.section("vision_config")
        patch_size = settings.agree("encoder_patch_size", vision.side("patch_size", 16))
        merge_size = settings.agree("downsample_factor", model.positive("downsample_factor", 2))
        sizes = Sizes.read(settings, patch_size, patch_size * merge_size)
        for key in ("size", "max_num_patches"):  # of padding, and of another step
            settings.read(key, object, None)
        rules = PixelRules.read(settings, HALF, HALF, Image.Resampling.BILINEAR)
        settings.finish()
        checkpoint.processor.expect("use_image_special_tokens", True)
        checkpoint.processor.finish()
        return cls(
            rules=rules,
            patch_size=patch_size,
            merge_size=merge_size,
            sizes=sizes,
            image_token=tokens.read("image_token", str, "<image>"),
            start_token=tokens.read("image_start_token", str, "<|image_start|>"),
            end_token=tokens.read("image_end_token", str, "<|image_end|>"),
            thumbnail_token=tokens.read("image_thumbnail_token", str, "<|img_thumbnail|>"),
        )

    def count(self, size: tuple[int, int], max_tokens: int | None = None) -> int:
        """Image tokens of an image of `size` (width, height)."""
        return self._count(self._plan(*size, max_tokens))

    def prepare(self, image: Image.Image, max_tokens: int | None = None) -> Prepared:
        """Patches and prompt of an RGB image; see `ImageProcessor`.

        With fewer tokens than the checkpoint allows, an image has fewer tiles or is not cut.
        """
        plan, sizes = self._plan(image.width, image.height, max_tokens), self.sizes
        (rows, columns), edge, parts = plan.tiles, sizes.tile_size, list[Image.Image]()
        if plan.tiles != (1, 1):
            canvas = self.rules.resized(image, columns * edge, rows * edge)
            boxes = ((x * edge, y * edge) for y in range(rows) for x in range(columns))
            parts = [canvas.crop((x, y, x + edge, y + edge)) for x, y in boxes]
        if not parts or sizes.has_thumbnail:
            high, wide = (each * sizes.side for each in plan.whole)
            parts.append(self.rules.resized(image, wide, high))
        patches = [self._patches(part) for part in parts]
        grids = [(part.height // self.patch_size, part.width // self.patch_size) for part in parts]
        return Prepared(
            pixels=np.concatenate(patches),
            grid=grids[0],
            num_tokens=self._count(plan),
            prompt=self._prompt(plan),
            passes=tuple(grids),
        )

    def _patches(self, part: Image.Image) -> NDArray[np.float32]:
        planes = self.rules.normalized(part)[None]
        return merged_patches(planes, self.patch_size, self.merge_size)

    def _count(self, plan: _Plan) -> int:
        whole, (rows, columns) = math.prod(plan.whole), plan.tiles
        if plan.tiles == (1, 1):
            return whole
        return rows * columns * self.sizes.tile_tokens + (whole if self.sizes.has_thumbnail else 0)

    def _prompt(self, plan: _Plan) -> str:
        whole, tile = math.prod(plan.whole), self.image_token * self.sizes.tile_tokens
        (rows, columns), parts = plan.tiles, list[str]()
        if plan.tiles == (1, 1):
            parts = [self.image_token * whole]
        else:
            places = [(row + 1, column + 1) for row in range(rows) for column in range(columns)]
            parts = [f"<|img_row_{row}_col_{column}|>{tile}" for row, column in places]
            if self.sizes.has_thumbnail:
                parts.append(self.thumbnail_token + self.image_token * whole)
        return "".join([self.start_token, *parts, self.end_token])

    def _plan(self, width: int, height: int, max_tokens: int | None) -> _Plan:
        """The checkpoint's plan, or the largest one within `max_tokens`."""
        sizes = self.sizes
        whole = sizes.whole(width, height)
        if sizes.is_large(width, height):
            for maximum in range(sizes.max_tiles, sizes.min_tiles - 1, -1):
                tiles = nearest_grid((width, height), sizes.tile_size, sizes.min_tiles, maximum)
                plan = _Plan(whole, tiles)
                if max_tokens is None or self._count(plan) <= max_tokens:
                    return plan
        if max_tokens is None or math.prod(whole) <= max_tokens:
            return _Plan(whole)
        if max_tokens < 1:
            raise LimitError(
                f"an image has at least 1 token, and {max_tokens} are allowed",
                hint="allow more image tokens",
            )
        rows, columns = replace(sizes, min_tokens=1, max_tokens=max_tokens).whole(width, height)
        # A narrow strip is one token wide; limit its length
        return _Plan((min(rows, max_tokens), min(columns, max_tokens)))
