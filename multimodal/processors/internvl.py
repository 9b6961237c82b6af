"""InternVL in transformers' format: tiles of one size, and a thumbnail.

The grid of tiles has the aspect ratio nearest to the image's (InternVL 1.5, arXiv 2404.16821,
section 3.3).
"""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image

from edgellm.core.errors import LimitError
from edgellm.multimodal.processors import Prepared
from edgellm.multimodal.processors.pixels import (
    CLIP_MEAN,
    CLIP_STD,
    PixelRules,
    nearest_grid,
    num_tiles,
    require_class,
)
from edgellm.multimodal.processors.settings import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """Pixels [tiles, 3, S, S]: the tiles row by row, then the thumbnail if there are several."""

    rules: PixelRules
    tile_size: int
    min_tiles: int
    max_tiles: int  # without the thumbnail
    tokens_per_tile: int
    image_token: str
    start_token: str
    end_token: str

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> Processor:
        """Build the processor; raises `UnsupportedModelError` for unsupported settings."""
        settings, model, tokens = checkpoint.image, checkpoint.model, checkpoint.tokens
        require_class(settings, "GotOcr2ImageProcessor")
        size = settings.section("size")
        tile_size = size.agree("width", size.positive("height", 448))
        size.finish()
        # The model's processor always splits images, independent of its image processor
        settings.read("crop_to_patches", bool, False)
        least, maximum = settings.positive("min_patches", 1), settings.positive("max_patches", 12)
        if least > maximum:
            raise settings.fault("min_patches", least, f"is more than max_patches = {maximum}")
        rules = PixelRules.read(settings, CLIP_MEAN, CLIP_STD, Image.Resampling.BICUBIC)
        settings.finish()
        tokens_per_tile = checkpoint.processor.positive("image_seq_length", 256)
        checkpoint.processor.finish()
        patches = tile_size // model.section("vision_config").side("patch_size", 14)
        ratio = model.read("downsample_ratio", float, 0.5)
        if int(patches**2 * ratio**2) != tokens_per_tile:
            raise checkpoint.processor.fault(
                "image_seq_length", tokens_per_tile, f"does not fit tiles of {tile_size} pixels"
            )
        return cls(
            rules=rules,
            tile_size=tile_size,
            min_tiles=least,
            max_tiles=maximum,
            tokens_per_tile=tokens_per_tile,
            image_token=tokens.read("context_image_token", str, "<IMG_CONTEXT>"),
            start_token=tokens.read("start_image_token", str, "<img>"),
            end_token=tokens.read("end_image_token", str, "</img>"),
        )

    def count(self, size: tuple[int, int], max_tokens: int | None = None) -> int:
        """Image tokens of an image of `size` (width, height)."""
        return num_tiles(self._grid(*size, max_tokens)) * self.tokens_per_tile

    def prepare(self, image: Image.Image, max_tokens: int | None = None) -> Prepared:
        """Tiles and prompt of an RGB image; see `ImageProcessor`."""
        rows, columns = self._grid(image.width, image.height, max_tokens)
        side = self.tile_size
        canvas = self.rules.resized(image, columns * side, rows * side)
        pixels = self.rules.tiles(canvas, side, whole=image)
        num_tokens = len(pixels) * self.tokens_per_tile
        prompt = f"{self.start_token}{self.image_token * num_tokens}{self.end_token}"
        return Prepared(pixels=pixels, grid=(rows, columns), num_tokens=num_tokens, prompt=prompt)

    def _grid(self, width: int, height: int, max_tokens: int | None) -> tuple[int, int]:
        """Rows and columns of tiles with the aspect ratio nearest to the image's."""
        maximum = self.max_tiles
        if max_tokens is not None:
            allowed = max_tokens // self.tokens_per_tile
            if allowed < 1:
                raise LimitError(
                    f"an image has at least {self.tokens_per_tile} tokens,"
                    f" and {max_tokens} are allowed",
                    hint="allow more image tokens",
                )
            maximum = min(maximum, max(1, allowed - 1))
        least = min(self.min_tiles, maximum)
        return nearest_grid((width, height), self.tile_size, least, maximum)
