"""Gemma 4's processor: images of any size, scaled to fill a budget of soft tokens.

Sides are whole tokens, the largest within the budget that keep the aspect ratio (transformers'
models/gemma4). The 12B model has no encoder that pools patches: a token is one large patch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from PIL import Image

from edgellm.core.errors import LimitError
from edgellm.multimodal.processors import Prepared
from edgellm.multimodal.processors.pixels import PixelRules, merged_patches, require_class
from edgellm.multimodal.processors.settings import Checkpoint

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

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> Processor:
        """Build the processor; raises `UnsupportedModelError` for unsupported settings."""
        settings, model, tokens = checkpoint.image, checkpoint.model, checkpoint.tokens
        is_unified = checkpoint.model_type == "gemma4_unified"
        require_class(settings, f"Gemma4{'Unified' if is_unified else ''}ImageProcessor")
        vision = model.section("vision_config")
        patch_size = settings.agree("patch_size", vision.side("patch_size", 16))
        merge_size = settings.agree(
            "pooling_kernel_size", vision.positive("pooling_kernel_size", 3)
        )
        budget = settings.positive("max_soft_tokens", 280)
        if budget not in _BUDGETS:
            choices = ", ".join(map(str, _BUDGETS))
            raise settings.fault("max_soft_tokens", budget, f"is none of {choices}")
        most = model.positive("vision_soft_tokens_per_image", 280)
        if budget > most:
            problem = f"is more than vision_soft_tokens_per_image = {most} of config.json"
            raise settings.fault("max_soft_tokens", budget, problem)
        table, default = ("position_embedding_size", 10240)
        if is_unified:
            patch_size, merge_size = patch_size * merge_size, 1
            table, default = ("mm_posemb_size", 1120)
        if budget * merge_size > (positions := vision.positive(table, default)):
            problem = f"needs more than {table} = {positions} of config.json"
            raise settings.fault("max_soft_tokens", budget, problem)
        rules = PixelRules.read(settings, _ZEROS, _ONES, Image.Resampling.BICUBIC, normalizes=False)
        for stated in (settings, checkpoint.processor):
            stated.read("image_seq_length", int, 0)  # of prompts without images
        for key in ("audio_seq_length", "audio_ms_per_token", "feature_extractor"):
            checkpoint.processor.read(key, object, None)
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
        )

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
            pixels=merged_patches(planes[None], self.patch_size, self.merge_size),
            grid=(rows * self.merge_size, columns * self.merge_size),
            num_tokens=rows * columns,
            prompt=f"{self.start_token}{self.image_token * (rows * columns)}{self.end_token}",
        )

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
