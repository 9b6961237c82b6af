"""Idefics3 and SmolVLM: a grid of tiles, each labelled in the prompt, and a thumbnail.

The longer edge is resized to a fixed length, then the sides to multiples of a tile (Idefics3,
arXiv 2408.12637, section 3.1; rounding as in transformers).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image

from edgellm.core.errors import LimitError
from edgellm.multimodal.processors import Prepared, PreparedFilm
from edgellm.multimodal.processors.pixels import HALF, PixelRules, num_tiles, require_class
from edgellm.multimodal.processors.settings import Checkpoint
from edgellm.multimodal.processors.smolvlm_video import FilmRules
from edgellm.multimodal.video import Film, Resize

MAX_EDGE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """Pixels [tiles, 3, S, S]: the tiles row by row, then the thumbnail if there are several."""

    rules: PixelRules
    longest_edge: int
    tile_size: int
    splits: bool
    tokens_per_tile: int
    image_token: str
    fence_token: str
    whole_token: str
    film: FilmRules | None = None  # None: no video support

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> Processor:
        """Build the processor; raises `UnsupportedModelError` for unsupported settings."""
        settings, model, tokens = checkpoint.image, checkpoint.model, checkpoint.tokens
        require_class(settings, "Idefics3ImageProcessor", "SmolVLMImageProcessor")
        size, tile = settings.section("size"), settings.section("max_image_size")
        longest_edge = size.positive("longest_edge", 4 * 364)
        tile_size = tile.positive("longest_edge", 364)
        size.finish()
        tile.finish()
        splits = settings.read("do_image_splitting", bool, True)
        rules = PixelRules.read(settings, HALF, HALF, Image.Resampling.LANCZOS)
        settings.finish()
        tokens_per_tile = checkpoint.processor.positive("image_seq_len", 169)
        checkpoint.processor.finish()
        patches = tile_size // model.section("vision_config").side("patch_size", 32)
        if patches**2 // model.positive("scale_factor", 2) ** 2 != tokens_per_tile:
            raise checkpoint.processor.fault(
                "image_seq_len", tokens_per_tile, f"does not fit tiles of {tile_size} pixels"
            )
        has_films = checkpoint.model_type == "smolvlm"
        film = FilmRules.read(checkpoint, rules, longest_edge, tile_size) if has_films else None
        return cls(
            rules=rules,
            longest_edge=longest_edge,
            tile_size=tile_size,
            splits=splits,
            tokens_per_tile=tokens_per_tile,
            image_token=tokens.read("image_token", str, "<image>"),
            fence_token=tokens.read("fake_image_token", str, "<fake_token_around_image>"),
            whole_token=tokens.read("global_image_token", str, "<global-img>"),
            film=film,
        )

    def count(self, size: tuple[int, int], max_tokens: int | None = None) -> int:
        """Image tokens of an image of `size` (width, height)."""
        return num_tiles(self._plan(*size, max_tokens).grid) * self.tokens_per_tile

    def prepare(self, image: Image.Image, max_tokens: int | None = None) -> Prepared:
        """Tiles and prompt of an RGB image; see `ImageProcessor`."""
        plan = self._plan(image.width, image.height, max_tokens)
        (rows, columns), side = plan.grid, self.tile_size
        # Each step rounds to bytes, so none can be skipped
        fitted = self.rules.resized(image, *plan.fitted)
        canvas = self.rules.resized(fitted, columns * side, rows * side)
        pixels = self.rules.tiles(canvas, side, whole=canvas)
        num_tokens = len(pixels) * self.tokens_per_tile
        return Prepared(
            pixels=pixels, grid=plan.grid, num_tokens=num_tokens, prompt=self._prompt(rows, columns)
        )

    def pick_frames(self, total: int, rate: float, maximum: int) -> list[int]:
        """Frame indices, see `FilmProcessor`; their number is limited by `maximum` tokens."""
        assert self.film is not None
        return self.film.pick(total, rate, maximum // self.tokens_per_tile)

    def fit_frames(
        self, size: tuple[int, int], count: int, maximum: int, max_per_pass: int
    ) -> Resize:
        """How frames become tiles; see `FilmProcessor`."""
        del size
        assert self.film is not None
        tokens = count * self.tokens_per_tile
        if tokens > maximum or self.tokens_per_tile > max_per_pass:
            raise LimitError(
                f"a video of {count} frames has {tokens} tokens; {maximum} are allowed",
                hint="show fewer frames, or build with a larger --maxImageTokens",
            )
        pixels, edge, side = self.film.pixels, min(self.film.longest_edge, MAX_EDGE), self.tile_size

        def resize(frame: Image.Image) -> Image.Image:
            fitted = pixels.resized(frame, *_fitted(*frame.size, edge, even=True))
            return pixels.resized(fitted, side, side)

        return resize

    def prepare_film(self, film: Film) -> PreparedFilm:
        """One tile for each frame, and the prompt; see `FilmProcessor`."""
        assert self.film is not None
        count, rules = len(film.frames) * self.tokens_per_tile, self.film
        passes = [rules.pixels.tiles(tile, self.tile_size, whole=tile) for tile in film.frames]
        prompt = rules.prompt(self._prompt(1, 1), film.seconds, film.duration)
        nothing = np.zeros(0, np.float32)
        whole = Prepared(
            pixels=nothing,
            grid=(1, 1),
            num_tokens=count,
            prompt=prompt,
            placeholder=rules.placeholder,
        )
        return PreparedFilm(whole, tuple(passes), ())

    def _prompt(self, rows: int, columns: int) -> str:
        features = self.image_token * self.tokens_per_tile
        whole = f"{self.fence_token}{self.whole_token}{features}{self.fence_token}"
        if rows * columns == 1:
            return whole
        lines = [
            "".join(
                f"{self.fence_token}<row_{row + 1}_col_{column + 1}>{features}"
                for column in range(columns)
            )
            for row in range(rows)
        ]
        return "\n".join([*lines, "", whole])

    def _plan(self, width: int, height: int, max_tokens: int | None) -> _Plan:
        """The largest plan within `max_tokens`; the checkpoint's own comes first."""
        allowed = None if max_tokens is None else max_tokens // self.tokens_per_tile
        for edge in self._edges():
            plan = self._plan_for(width, height, edge)
            if allowed is None or num_tiles(plan.grid) <= allowed:
                return plan
        raise LimitError(
            f"an image has at least {self.tokens_per_tile} tokens, and {max_tokens} are allowed",
            hint="allow more image tokens",
        )

    def _edges(self) -> Iterator[int]:
        """Lengths of the longer edge: the checkpoint's, then fewer and fewer whole tiles."""
        yield self.longest_edge
        if self.splits:
            tiles = (min(self.longest_edge, MAX_EDGE) - 1) // self.tile_size
            yield from range(tiles * self.tile_size, 0, -self.tile_size)

    def _plan_for(self, width: int, height: int, edge: int) -> _Plan:
        fitted = _fitted(width, height, edge, even=True)
        if max(fitted) > MAX_EDGE:
            fitted = _fitted(*fitted, MAX_EDGE, even=False)
        if not self.splits:
            return _Plan(fitted, (1, 1))
        long_side = -(-max(fitted) // self.tile_size) * self.tile_size
        columns, rows = (
            -(-side // self.tile_size) for side in _fitted(*fitted, long_side, even=False)
        )
        return _Plan(fitted, (rows, columns))


@dataclass(frozen=True, slots=True)
class _Plan:
    """The resizing of an image to tiles."""

    fitted: tuple[int, int]  # width and height before rounding to multiples of a tile
    grid: tuple[int, int]  # rows and columns


def _fitted(width: int, height: int, edge: int, *, even: bool) -> tuple[int, int]:
    """Width and height with the longer side `edge`; the other rounded down, or up to even."""
    ratio = width / height
    short = int(edge / ratio) if width >= height else int(edge * ratio)
    short = max(short + short % 2 if even else short, 1)
    return (edge, short) if width >= height else (short, edge)
