"""Gemma 3: square images of one size, with pan and scan also their crops.

Pan and scan (arXiv 2503.19786, section 2.1) cuts long images into crops along their longer side;
rounding is as in transformers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image

from edgellm.core.errors import LimitError
from edgellm.multimodal.processors import Prepared
from edgellm.multimodal.processors.pixels import HALF, PixelRules, require_class
from edgellm.multimodal.processors.settings import Checkpoint, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class PanAndScan:
    """When an image is cut, and into how many crops."""

    min_crop_size: int  # pixels
    max_crops: int
    min_ratio: float  # of the longer side to the shorter

    @classmethod
    def read(cls, settings: Settings) -> PanAndScan | None:
        """Read the settings; None: images are not cut. Absent values are those of transformers."""
        found = cls(
            min_crop_size=settings.positive("pan_and_scan_min_crop_size", 256),
            max_crops=settings.positive("pan_and_scan_max_num_crops", 4),
            min_ratio=settings.read("pan_and_scan_min_ratio_to_activate", float, 1.2),
        )
        return found if settings.read("do_pan_and_scan", bool, False) else None

    def boxes(self, width: int, height: int) -> list[tuple[int, int, int, int]]:
        """Left, upper, right and lower edge of each crop; none for images that are not cut."""
        long, short = max(width, height), min(width, height)
        if long / short < self.min_ratio:
            return []
        count = min(long // self.min_crop_size, math.floor(long / short + 0.5))
        count = min(max(count, 2), self.max_crops)
        step = math.ceil(long / count)
        if min(step, short) < self.min_crop_size:
            return []
        begins = range(0, long, step)
        if width >= height:
            return [(begin, 0, min(begin + step, width), height) for begin in begins]
        return [(0, begin, width, min(begin + step, height)) for begin in begins]


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """Pixels [1 + crops, 3, S, S]: the whole image, then its crops."""

    rules: PixelRules
    tile_size: int
    tokens_per_tile: int
    image_token: str  # the placeholder in prompts, which also begins an image
    feature_token: str  # that embeddings replace
    end_token: str
    cut: PanAndScan | None

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> Processor:
        """Build the processor; raises `UnsupportedModelError` for unsupported settings."""
        settings, model, tokens = checkpoint.image, checkpoint.model, checkpoint.tokens
        require_class(settings, "Gemma3ImageProcessor")
        size = settings.section("size")
        tile_size = size.agree("width", size.positive("height", 224))
        size.finish()
        side = model.section("vision_config").side("image_size", 224)
        if tile_size != side:
            raise settings.fault("size", tile_size, f"should be {side}, as in config.json")
        cut = PanAndScan.read(settings)
        rules = PixelRules.read(settings, HALF, HALF, Image.Resampling.BILINEAR)
        tokens_per_tile = model.positive("mm_tokens_per_image", 256)
        for stated in (settings, checkpoint.processor):
            stated.agree("image_seq_length", tokens_per_tile)
        settings.finish()
        checkpoint.processor.finish()
        return cls(
            rules=rules,
            tile_size=tile_size,
            tokens_per_tile=tokens_per_tile,
            image_token=tokens.read("boi_token", str, "<start_of_image>"),
            feature_token=tokens.read("image_token", str, "<image_soft_token>"),
            end_token=tokens.read("eoi_token", str, "<end_of_image>"),
            cut=cut,
        )

    def count(self, size: tuple[int, int], max_tokens: int | None = None) -> int:
        """Image tokens of an image of `size` (width, height)."""
        return (1 + len(self._boxes(size, max_tokens))) * self.tokens_per_tile

    def prepare(self, image: Image.Image, max_tokens: int | None = None) -> Prepared:
        """Pixels and prompt of an RGB image; see `ImageProcessor`.

        An image whose crops have too many tokens is not cut.
        """
        boxes, side = self._boxes(image.size, max_tokens), self.tile_size
        parts = [image, *map(image.crop, boxes)]
        resized = [self.rules.resized(part, side, side) for part in parts]
        pixels = np.stack([self.rules.normalized(part) for part in resized])
        whole = f"\n\n{self.image_token}{self.feature_token * self.tokens_per_tile}"
        whole += f"{self.end_token}\n\n"
        prompt = whole
        if boxes:
            crops = " ".join([whole] * len(boxes))
            prompt = f"Here is the original image {whole} and here are some crops"
            prompt += f" to help you see better {crops}"
        return Prepared(
            pixels=pixels,
            grid=(1, len(parts)),
            num_tokens=len(parts) * self.tokens_per_tile,
            prompt=prompt,
        )

    def _boxes(
        self, size: tuple[int, int], max_tokens: int | None
    ) -> list[tuple[int, int, int, int]]:
        boxes = self.cut.boxes(*size) if self.cut is not None else []
        if max_tokens is None or (1 + len(boxes)) * self.tokens_per_tile <= max_tokens:
            return boxes
        if self.tokens_per_tile > max_tokens:
            raise LimitError(
                f"an image has at least {self.tokens_per_tile} tokens,"
                f" and {max_tokens} are allowed",
                hint="allow more image tokens",
            )
        return []
