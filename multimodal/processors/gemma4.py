"""Gemma 4's processor: images and frames of any size, scaled to fill a budget of soft tokens.

Sides are whole tokens, the largest within the budget that keep the aspect ratio (transformers'
models/gemma4). The 12B model has no encoder that pools patches: a token is one large patch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edgellm.core.errors import LimitError
from edgellm.multimodal.processors import Prepared, PreparedFilm
from edgellm.multimodal.processors.gemma4_video import FilmRules
from edgellm.multimodal.processors.pixels import PixelRules, merged_patches, require_class
from edgellm.multimodal.processors.settings import Checkpoint, Settings
from edgellm.multimodal.video import Film, Resize

_BUDGETS = (70, 140, 280, 560, 1120)  # that the model was trained with
_ZEROS, _ONES = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """Pixels [P, 3*p*p]; patches that are pooled into one token are consecutive."""

    rules: PixelRules
    patch_size: int
    merge_size: int  # patches of one token, along each side
    budget: int  # maximum tokens of an image
    image_token: str
    start_token: str
    end_token: str
    film: FilmRules

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> Processor:
        """Build the processor; raises `UnsupportedModelError` for unsupported settings."""
        settings, tokens = checkpoint.image, checkpoint.tokens
        is_unified = checkpoint.model_type == "gemma4_unified"
        require_class(settings, f"Gemma4{'Unified' if is_unified else ''}ImageProcessor")
        patch_size, merge_size, check = _sizes(checkpoint.model, is_unified=is_unified)
        budget = check(settings, 280)
        rules = PixelRules.read(settings, _ZEROS, _ONES, Image.Resampling.BICUBIC, normalizes=False)
        for stated in (settings, checkpoint.processor):
            stated.read("image_seq_length", int, 0)  # of prompts without images
        for key in ("audio_seq_length", "audio_ms_per_token", "feature_extractor"):
            checkpoint.processor.read(key, object, None)
        film = FilmRules.read(checkpoint, check)
        settings.finish()
        checkpoint.processor.finish()
        return cls(
            rules=rules,
            patch_size=patch_size,
            merge_size=merge_size,
            budget=budget,
            image_token=tokens.read("image_token", str, "<|image|>"),
            start_token=tokens.read("boi_token", str, "<|image>"),
            end_token=tokens.read("eoi_token", str, "<image|>"),
            film=film,
        )

    def count(self, size: tuple[int, int], max_tokens: int | None = None) -> int:
        """Image tokens of an image of `size` (width, height)."""
        rows, columns = self._tokens(*size, max_tokens)
        return rows * columns

    def prepare(self, image: Image.Image, max_tokens: int | None = None) -> Prepared:
        """Patches and prompt of an RGB image; see `ImageProcessor`."""
        rows, columns = self._tokens(image.width, image.height, max_tokens)
        side = self.patch_size * self.merge_size
        return Prepared(
            pixels=self._patches(
                self.rules, self.rules.resized(image, columns * side, rows * side)
            ),
            grid=(rows * self.merge_size, columns * self.merge_size),
            num_tokens=rows * columns,
            prompt=self._prompt(rows * columns),
        )

    def pick_frames(self, total: int, rate: float, maximum: int) -> list[int]:
        """Frame indices, see `FilmProcessor`; many frames have fewer tokens each."""
        return self.film.pick(total, rate, maximum)

    def fit_frames(
        self, size: tuple[int, int], count: int, maximum: int, max_per_pass: int
    ) -> Resize:
        """How frames are resized; see `FilmProcessor`."""
        rows, columns = self._grid(*size, self.film.budget_of(count, maximum, max_per_pass))
        side, pixels = self.patch_size * self.merge_size, self.film.pixels
        return lambda frame: pixels.resized(frame, columns * side, rows * side)

    def prepare_film(self, film: Film) -> PreparedFilm:
        """The encoder's pass over each frame, and the prompt; see `FilmProcessor`."""
        columns, rows = (extent // self.patch_size for extent in film.frames[0].size)
        count = rows * columns // self.merge_size**2
        whole = Prepared(
            pixels=np.zeros(0, np.float32),
            grid=(rows, columns),
            num_tokens=count * len(film.frames),
            prompt=self.film.prompt(self._prompt(count), film.seconds),
            placeholder=self.film.placeholder,
        )
        passes = tuple(self._patches(self.film.pixels, frame) for frame in film.frames)
        return PreparedFilm(whole, passes, ())

    def _patches(self, rules: PixelRules, image: Image.Image) -> NDArray[np.float32]:
        planes = rules.normalized(image)
        return merged_patches(planes[None], self.patch_size, self.merge_size)

    def _prompt(self, count: int) -> str:
        return f"{self.start_token}{self.image_token * count}{self.end_token}"

    def _tokens(self, width: int, height: int, max_tokens: int | None) -> tuple[int, int]:
        """Rows and columns of tokens within the budget and `max_tokens`."""
        rows, columns = self._grid(width, height, self.budget)
        if max_tokens is None or rows * columns <= max_tokens:
            return rows, columns
        if max_tokens < 1:
            raise LimitError(
                f"an image has at least 1 token, and {max_tokens} are allowed",
                hint="allow more image tokens",
            )
        return self._grid(width, height, max_tokens)

    def _grid(self, width: int, height: int, budget: int) -> tuple[int, int]:
        """Rows and columns of the largest image with `budget` tokens."""
        # In floats and in this order, because transformers does so
        area = budget * self.merge_size**2 * self.patch_size**2
        factor, side = math.sqrt(area / (height * width)), self.patch_size * self.merge_size
        rows, columns = math.floor(factor * height / side), math.floor(factor * width / side)
        if not rows and not columns:  # a budget of one token, less a rounding
            return 1, 1
        if not rows:
            return 1, min(width // height, budget)
        if not columns:
            return min(height // width, budget), 1
        return rows, columns


def _sizes(model: Settings, *, is_unified: bool) -> tuple[int, int, Callable[[Settings, int], int]]:
    """Patch size, patches along a side of a token, and a check of settings, see `FilmRules.read`.

    Both are those of config.json.
    """
    vision = model.section("vision_config")
    small, merged = vision.side("patch_size", 16), vision.positive("pooling_kernel_size", 3)
    patch_size, merge_size = (small * merged, 1) if is_unified else (small, merged)
    most = model.positive("vision_soft_tokens_per_image", 280)
    table, usual = ("mm_posemb_size", 1120) if is_unified else ("position_embedding_size", 10240)
    positions = vision.positive(table, usual)

    def check(settings: Settings, default: int) -> int:
        settings.agree("patch_size", small)
        settings.agree("pooling_kernel_size", merged)
        budget = settings.positive("max_soft_tokens", default)
        if budget not in _BUDGETS:
            problem = f"is none of {', '.join(map(str, _BUDGETS))}"
        elif budget > most:
            problem = f"is more than vision_soft_tokens_per_image = {most} of config.json"
        elif budget * merge_size > positions:
            problem = f"needs more than {table} = {positions} of config.json"
        else:
            return budget
        raise settings.fault("max_soft_tokens", budget, problem)

    return patch_size, merge_size, check
