"""Resizing and normalization, bit-identical to transformers' image processors on Pillow."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edgellm.multimodal.processors.settings import Settings

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True, slots=True)
class PixelRules:
    """Resizing filter and normalization of a checkpoint."""

    resample: Image.Resampling
    table: NDArray[np.float32]  # [3, 256]: the normalized value of each byte, channel by channel

    @classmethod
    def read(
        cls,
        settings: Settings,
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
        resample: Image.Resampling,
        *,
        normalizes: bool = True,
    ) -> PixelRules:
        """Read the settings that all families share; the arguments are the family's defaults.

        Normalization may be disabled if `normalizes` is False.

        Raises:
            UnsupportedModelError: a step is disabled, or a value is invalid.
        """
        for step in ("do_resize", "do_rescale", *(["do_normalize"] if normalizes else [])):
            settings.expect(step, True)
        normalizes = settings.read("do_normalize", bool, normalizes)
        settings.expect("do_center_crop", False)
        code = settings.read("resample", int, int(resample))
        if code not in list(Image.Resampling):
            raise settings.fault("resample", code, "is not a filter of Pillow")
        scale = settings.read("rescale_factor", float, 1 / 255)
        means = np.array(settings.channels("image_mean", mean), np.float32)
        stds = np.array(settings.channels("image_std", std), np.float32)
        if not np.all(stds > 0):
            raise settings.fault("image_std", stds.tolist(), "is not positive")
        scaled = (np.arange(256) * scale).astype(np.float32)
        table = (scaled - means[:, None]) / stds[:, None] if normalizes else np.tile(scaled, (3, 1))
        return cls(Image.Resampling(code), table)

    def resized(self, image: Image.Image, width: int, height: int) -> Image.Image:
        """The image with the checkpoint's filter, in bytes."""
        return image.resize((width, height), self.resample)

    def normalized(self, image: Image.Image) -> NDArray[np.float32]:
        """An RGB image as [3, height, width]."""
        pixels = np.asarray(image)
        planes = np.empty((3, *pixels.shape[:2]), np.float32)
        for channel in range(3):
            planes[channel] = self.table[channel][pixels[..., channel]]
        return planes

    def tiles(self, canvas: Image.Image, side: int, whole: Image.Image) -> NDArray[np.float32]:
        """Tiles [tiles, 3, side, side] of an RGB canvas of whole tiles, row by row.

        If there are several, `whole`, resized to one tile, follows them.
        """
        rows, columns = canvas.height // side, canvas.width // side
        tiles = np.empty((num_tiles((rows, columns)), 3, side, side), np.float32)
        parts = self.normalized(canvas).reshape(3, rows, side, columns, side)
        grid = tiles[: rows * columns].reshape(rows, columns, 3, side, side)
        grid[...] = parts.transpose(1, 3, 0, 2, 4)
        if len(tiles) > rows * columns:
            tiles[-1] = self.normalized(self.resized(whole, side, side))
        return tiles


def merged_patches(
    planes: NDArray[np.float32], patch_size: int, merge_size: int, frames: int = 1
) -> NDArray[np.float32]:
    """Patches [P, 3 * frames * p * p], token by token, patch by patch inside one.

    Args:
        planes: [frames or 1, 3, height, width]; one is repeated for all frames.
        patch_size: p, in pixels.
        merge_size: patches along a side of a token; sides are whole tokens.
        frames: of a patch.
    """
    p, m = patch_size, merge_size
    given, rows, columns = len(planes), planes.shape[2] // (p * m), planes.shape[3] // (p * m)
    parts = planes.reshape(given, 3, rows, m, p, columns, m, p)
    patches = np.empty((rows, columns, m, m, 3, frames, p, p), np.float32)
    patches[...] = parts.transpose(2, 5, 3, 6, 1, 0, 4, 7)
    return patches.reshape(rows * columns * m * m, -1)


def nearest_grid(
    size: tuple[int, int], tile_size: int, least: int, maximum: int
) -> tuple[int, int]:
    """Rows and columns of `least` to `maximum` tiles with the aspect ratio nearest to an image's.

    Args:
        size: width and height of the image.
        tile_size: in pixels.
        least: tiles.
        maximum: tiles.
    """
    width, height = size
    best, best_distance = (1, 1), float("inf")
    for columns, rows in _arrangements(least, maximum):
        distance = abs(width / height - columns / rows)
        # Of equal ratios the larger grid, unless it more than doubles the image
        larger = width * height > 0.5 * tile_size**2 * columns * rows
        if distance < best_distance or (distance == best_distance and larger):
            best, best_distance = (rows, columns), distance
    return best


def _arrangements(least: int, maximum: int) -> list[tuple[int, int]]:
    """(columns, rows) of `least` to `maximum` tiles: few tiles first, then few columns."""
    sides = range(1, maximum + 1)
    found = [(c, r) for c in sides for r in sides if least <= c * r <= maximum]
    return sorted(found, key=lambda arrangement: arrangement[0] * arrangement[1])


def num_tiles(grid: tuple[int, int]) -> int:
    """Tiles of a grid, with the thumbnail if there are several."""
    return grid[0] * grid[1] + (1 if grid != (1, 1) else 0)


def require_class(settings: Settings, *names: str) -> None:
    """Reject settings of another image processor.

    Raises:
        UnsupportedModelError: `image_processor_type` is none of `names`, in any backend.
    """
    backends = ("", "Fast", "Pil")
    settings.expect("image_processor_type", *(f"{name}{end}" for name in names for end in backends))
