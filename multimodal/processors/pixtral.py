"""Pixtral's processor, of Mistral 3: images of any size, with tokens between rows.

Images longer than a limit are scaled down, then sides are rounded up to whole tokens (Pixtral,
arXiv 2410.07073, section 2.1; rounding as in transformers).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from PIL import Image

from edgellm.core.errors import LimitError
from edgellm.multimodal.processors import Prepared
from edgellm.multimodal.processors.pixels import (
    CLIP_MEAN,
    CLIP_STD,
    PixelRules,
    merged_patches,
    require_class,
)
from edgellm.multimodal.processors.settings import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """Pixels [P, 3*p*p]; patches that are merged into one token are consecutive."""

    rules: PixelRules
    patch_size: int
    merge_size: int  # patches of one token, along each side
    longest_edge: int  # pixels
    image_token: str
    break_token: str  # after a row of tokens
    end_token: str  # after the last row

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> Processor:
        """Build the processor; raises `UnsupportedModelError` for unsupported settings."""
        settings, whole, model = checkpoint.image, checkpoint.processor, checkpoint.model
        require_class(settings, "PixtralImageProcessor")
        vision = model.section("vision_config")
        patch_size = whole.agree("patch_size", vision.side("patch_size", 16))
        merge_size = whole.agree("spatial_merge_size", model.positive("spatial_merge_size", 2))
        settings.read("patch_size", object, None)  # replaced by the other file's
        size = settings.section("size")
        longest_edge = size.positive("longest_edge", 1024)
        size.finish()
        rules = PixelRules.read(settings, CLIP_MEAN, CLIP_STD, Image.Resampling.BICUBIC)
        settings.finish()
        tokens = {
            name: whole.read(f"image_{name}token", str, usual)
            for name, usual in (("", "[IMG]"), ("break_", "[IMG_BREAK]"), ("end_", "[IMG_END]"))
        }
        whole.finish()
        return cls(
            rules=rules,
            patch_size=patch_size,
            merge_size=merge_size,
            longest_edge=longest_edge,
            image_token=tokens[""],
            break_token=tokens["break_"],
            end_token=tokens["end_"],
        )

    def count(self, size: tuple[int, int], max_tokens: int | None = None) -> int:
        """Image tokens of an image of `size` (width, height), without those between rows."""
        rows, columns = self._tokens(*size, max_tokens)
        return rows * columns

    def prepare(self, image: Image.Image, max_tokens: int | None = None) -> Prepared:
        """Patches and prompt of an RGB image; see `ImageProcessor`."""
        rows, columns = self._tokens(image.width, image.height, max_tokens)
        side = self.patch_size * self.merge_size
        planes = self.rules.normalized(self.rules.resized(image, columns * side, rows * side))
        lines = [self.image_token * columns] * rows
        return Prepared(
            pixels=merged_patches(planes[None], self.patch_size, self.merge_size),
            grid=(rows * self.merge_size, columns * self.merge_size),
            num_tokens=rows * columns,
            prompt=self.break_token.join(lines) + self.end_token,
        )

    def _tokens(self, width: int, height: int, max_tokens: int | None) -> tuple[int, int]:
        """Rows and columns of tokens: those of the longest edge within `max_tokens`."""
        side = self.patch_size * self.merge_size
        for edge in self._edges(max(width, height), side):
            ratio = max(height / edge, width / edge, 1)
            rows = math.ceil(max(math.floor(height / ratio), 1) / side)
            columns = math.ceil(max(math.floor(width / ratio), 1) / side)
            if max_tokens is None or rows * columns <= max_tokens:
                return rows, columns
        raise LimitError(
            f"an image has at least 1 token, and {max_tokens} are allowed",
            hint="allow more image tokens",
        )

    def _edges(self, longest: int, side: int) -> Iterator[int]:
        """Lengths of the longer edge: the checkpoint's, then fewer and fewer whole tokens."""
        yield self.longest_edge
        yield from range((min(self.longest_edge, longest) - 1) // side * side, 0, -side)
        yield 1
