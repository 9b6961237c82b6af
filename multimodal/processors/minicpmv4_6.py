"""MiniCPM-V 4.6 and 4.7: an image, and slices of it in a higher resolution.

The grid of slices has the aspect ratio nearest to the image's (LLaVA-UHD, arXiv 2403.11703;
rounding as in transformers). Images of a prompt are numbered. In 4.7 their tokens have positions on
a canvas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from edgellm.core.errors import LimitError
from edgellm.multimodal.canvas_positions import Tags, canvas_positions
from edgellm.multimodal.positions import RotaryPositions
from edgellm.multimodal.processors import Prepared
from edgellm.multimodal.processors.pixels import HALF, PixelRules, merged_patches, require_class
from edgellm.multimodal.processors.settings import Checkpoint, Settings

_MERGES = {"16x": 4, "4x": 2}  # patches of a token along each side, by `downsample_mode`
Grid = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Plan:
    """How an image becomes passes of the encoder, in rows and columns."""

    whole: Grid  # of the image's tokens
    slices: Grid = (0, 0)
    slice_tokens: Grid = (0, 0)  # of each slice

    @property
    def num_tokens(self) -> int:
        return math.prod(self.whole) + math.prod(self.slices) * math.prod(self.slice_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """Pixels [P, 3*p*p] of all passes: the whole image, then its slices row by row."""

    rules: PixelRules
    patch_size: int
    merge_size: int  # patches of a token along each side
    resolution: int  # side in pixels of a square with the area of a whole image, or of a slice
    max_slices: int  # 1: images are not cut
    image_token: str
    start_token: str
    end_token: str
    slice_start_token: str
    slice_end_token: str
    number_tokens: tuple[str, str] | None  # around an image's number; None: not numbered
    tags: Tags | None = None  # ids of the tags above on a canvas; None: positions as in text

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> Processor:
        """Build the processor; raises `UnsupportedModelError` for unsupported settings."""
        settings, tokens = checkpoint.image, checkpoint.tokens
        require_class(settings, "MiniCPMV4_6ImageProcessor")
        vision = checkpoint.model.section("vision_config")
        patch_size = settings.agree("patch_size", vision.side("patch_size", 14))
        resolution = settings.positive("scale_resolution", 448)
        max_slices = settings.positive("max_slice_nums", 9)
        cuts = settings.read("slice_mode", bool, True)
        merge_size = _merge_size(settings, checkpoint.model)
        is_numbered = settings.read("use_image_id", bool, True)
        is_numbered = checkpoint.processor.read("use_image_id", bool, is_numbered)
        rules = PixelRules.read(settings, HALF, HALF, Image.Resampling.BICUBIC)
        settings.finish()
        checkpoint.processor.finish()
        numbers = (
            tokens.read("image_id_start_token", str, "<image_id>"),
            tokens.read("image_id_end_token", str, "</image_id>"),
        )
        return cls(
            rules=rules,
            patch_size=patch_size,
            merge_size=merge_size,
            resolution=resolution,
            max_slices=max_slices if cuts else 1,
            image_token=tokens.read("image_token", str, "<|image_pad|>"),
            start_token=tokens.read("image_start_token", str, "<image>"),
            end_token=tokens.read("image_end_token", str, "</image>"),
            slice_start_token=tokens.read("slice_start_token", str, "<slice>"),
            slice_end_token=tokens.read("slice_end_token", str, "</slice>"),
            number_tokens=numbers if is_numbered else None,
            tags=_tags(checkpoint.model) if checkpoint.model_type == "minicpmv4_7" else None,
        )

    @property
    def _side(self) -> int:
        """Side of a token in pixels."""
        return self.patch_size * self.merge_size

    def count(self, size: tuple[int, int], max_tokens: int | None = None) -> int:
        """Image tokens of an image of `size` (width, height)."""
        return self._plan(*size, max_tokens).num_tokens

    def prepare(self, image: Image.Image, max_tokens: int | None = None) -> Prepared:
        """Patches and prompt of an RGB image; see `ImageProcessor`.

        With fewer tokens than the checkpoint allows, an image has fewer slices or is not cut.
        """
        plan = self._plan(image.width, image.height, max_tokens)
        parts = [self._resized(image, plan.whole)]
        (rows, columns), (high, wide) = plan.slices, plan.slice_tokens
        if rows:
            canvas = self._resized(image, (rows * high, columns * wide))
            width, height = wide * self._side, high * self._side
            corners = ((x * width, y * height) for y in range(rows) for x in range(columns))
            parts += [canvas.crop((x, y, x + width, y + height)) for x, y in corners]
        grids = [(part.height // self.patch_size, part.width // self.patch_size) for part in parts]
        return Prepared(
            pixels=np.concatenate([self._patches(part) for part in parts]),
            grid=grids[0],
            num_tokens=plan.num_tokens,
            prompt=self._prompt(plan),
            passes=tuple(grids),
            number_tokens=self.number_tokens,
        )

    def merged(self, grid: Grid) -> Grid:
        """Rows and columns of tokens of a grid of patches; see `PlacesImages`."""
        return grid[0] // self.merge_size, grid[1] // self.merge_size

    def positions(
        self, token_ids: ArrayLike, image_token_id: int, grids: Sequence[Grid]
    ) -> RotaryPositions:
        """M-RoPE positions of a prompt; see `PlacesImages`."""
        assert self.tags is not None
        return canvas_positions(token_ids, image_token_id, grids, self.tags)

    def _resized(self, image: Image.Image, tokens: Grid) -> Image.Image:
        rows, columns = tokens
        return self.rules.resized(image, columns * self._side, rows * self._side)

    def _patches(self, part: Image.Image) -> NDArray[np.float32]:
        planes = self.rules.normalized(part)[None]
        return merged_patches(planes, self.patch_size, self.merge_size)

    def _prompt(self, plan: _Plan) -> str:
        whole = f"{self.start_token}{self.image_token * math.prod(plan.whole)}{self.end_token}"
        tokens = self.image_token * math.prod(plan.slice_tokens)
        part = f"{self.slice_start_token}{tokens}{self.slice_end_token}"
        rows, columns = plan.slices
        return whole + "\n".join([part * columns] * rows)

    def _plan(self, width: int, height: int, max_tokens: int | None) -> _Plan:
        """The checkpoint's plan, or the largest one within `max_tokens`."""
        for maximum in range(self.max_slices, 0, -1):
            plan = self._plan_for(width, height, maximum)
            if max_tokens is None or plan.num_tokens <= max_tokens:
                return plan
        assert max_tokens is not None
        if max_tokens < 1:
            raise LimitError(
                f"an image has at least 1 token, and {max_tokens} are allowed",
                hint="allow more image tokens",
            )
        return _Plan(self._shrunk(width, height, max_tokens))

    def _plan_for(self, width: int, height: int, max_slices: int) -> _Plan:
        """The plan with a number of slices that is limited by `max_slices`."""
        whole = self._filling(width, height, self.resolution)
        slices = _slices(width, height, self.resolution, max_slices)
        if slices is None:
            return _Plan(whole)
        rows, columns = slices
        wide, high = _nearest(width, columns) / columns, _nearest(height, rows) / rows
        return _Plan(whole, slices, self._filling(wide, high, self.resolution))

    def _filling(self, width: float, height: float, resolution: float) -> Grid:
        """Rows and columns of tokens with an area of about `resolution` squared."""
        # Rounded to pixels first, because transformers does so
        ratio = width / height
        high = int(resolution / math.sqrt(ratio))
        wide = int(high * ratio)
        side = self._side
        return _nearest(high, side) // side, _nearest(wide, side) // side

    def _shrunk(self, width: int, height: int, max_tokens: int) -> Grid:
        """Rows and columns of the whole image within `max_tokens`."""
        rows, columns = 1, 1
        for area in range(max_tokens, 0, -1):
            rows, columns = self._filling(width, height, self._side * math.sqrt(area))
            if rows * columns <= max_tokens:
                break
        # A narrow strip is one token wide; limit its length
        return min(rows, max_tokens), min(columns, max_tokens)


def _merge_size(settings: Settings, model: Settings) -> int:
    """Patches of a token along each side; raises `UnsupportedModelError` for unknown modes."""
    model.expect("downsample_mode", *_MERGES)
    wanted = model.read("downsample_mode", str, "16x")
    found = settings.read("downsample_mode", str, "16x")
    if found != wanted:
        raise settings.fault("downsample_mode", found, f"should be {wanted!r}, as in config.json")
    return _MERGES[found]


def _tags(model: Settings) -> Tags:
    """Ids of the tags; raises `UnsupportedModelError` if config.json lacks one."""
    return Tags(
        image_start=model.read("image_start_id", int),
        image_end=model.read("image_end_id", int),
        slice_start=model.read("slice_start_id", int),
        slice_end=model.read("slice_end_id", int),
        newline=model.read("newline_id", int),
    )


def _nearest(length: float, divisor: int) -> int:
    """The nearest positive multiple of `divisor`."""
    return max(round(length / divisor) * divisor, divisor)


def _slices(width: int, height: int, resolution: int, maximum: int) -> Grid | None:
    """Rows and columns of slices; None: the image is not cut.

    A slice has about `resolution` squared pixels of the image. Grids of one slice more or less are
    allowed, if they have the image's aspect ratio more nearly.
    """
    wanted = min(math.ceil(width * height / (resolution * resolution)), maximum)
    if wanted <= 1:
        return None
    ratio, best, best_distance = math.log(width / height), (1, 1), math.inf
    for count in (wanted - 1, wanted, wanted + 1):
        if not 1 < count <= maximum:
            continue
        for rows in (each for each in range(1, count + 1) if count % each == 0):
            grid = rows, count // rows
            distance = abs(ratio - math.log(grid[1] / rows))
            # Of equal distances that with more rows
            if distance < best_distance or (distance == best_distance and rows > best[0]):
                best, best_distance = grid, distance
    return best
