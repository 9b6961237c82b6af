"""Image processors: from images to encoder inputs and prompt tokens, one file per model family.

A file exports `Processor`, which `read` builds from a checkpoint's settings.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgellm.core.errors import (
    RequestError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from PIL import Image

    from edgellm.multimodal.positions import Grid, RotaryPositions
    from edgellm.multimodal.video import Film, Resize

_FAMILIES = {
    "cosmos3_edge": "qwen2_vl",
    "gemma3": "gemma3",
    "gemma4": "gemma4",
    "gemma4_unified": "gemma4",
    "idefics3": "idefics3",
    "internvl": "internvl",
    "lfm2_vl": "lfm2_vl",
    "lfm3_vl": "qwen2_vl",
    "minicpmv4_6": "minicpmv4_6",
    "minicpmv4_7": "minicpmv4_6",
    "mistral3": "pixtral",
    "muse_glimmer": "muse_glimmer",
    "qwen2_5_vl": "qwen2_vl",
    "qwen2_vl": "qwen2_vl",
    "qwen3_5": "qwen2_vl",
    "qwen3_5_moe": "qwen2_vl",
    "qwen3_vl": "qwen2_vl",
    "qwen3_vl_moe": "qwen2_vl",
    "smolvlm": "idefics3",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """An image, prepared for encoder and prompt."""

    pixels: NDArray[np.float32]  # Qwen: [P, 3*T*p*p] patches; others: [tiles, 3, S, S]
    grid: tuple[int, int]  # Qwen: rows and columns of patches; others: of tiles
    num_tokens: int  # embeddings from the encoder; each replaces one image token
    prompt: str  # replaces the placeholder: the image tokens, and tags around them
    placeholder: str = ""  # of a video; "": an image's
    # Grids of several passes of the encoder, whose patches are concatenated; (): one pass
    passes: tuple[tuple[int, int], ...] = ()
    # Around the number of the image, or video, among those of a request, before `prompt`
    number_tokens: tuple[str, str] | None = None

    def numbered_prompt(self, number: int) -> str:
        """`prompt` of the image or video with this number, which counts from 0."""
        if self.number_tokens is None:
            return self.prompt
        begin, end = self.number_tokens
        return f"{begin}{number}{end}{self.prompt}"


@dataclass(frozen=True, slots=True)
class PreparedFilm:
    """A video, prepared for the encoder, with a pass for each temporal patch, or its slices."""

    whole: Prepared  # without pixels; its grid is that of each pass, unless `whole.passes` differ
    passes: tuple[NDArray[np.float32], ...]  # pixels of each: [P, 3*T*p*p] or [1, 3, S, S]
    runs: tuple[Grid, ...]  # see `rotary_positions`; () on one axis


class ImageProcessor(Protocol):
    """The image processor of a model family."""

    @property
    def image_token(self) -> str:
        """The template's placeholder, and the token that embeddings replace."""
        ...

    def count(self, size: tuple[int, int], max_tokens: int | None = None) -> int:
        """Image tokens of an image of `size` (width, height); raises as `prepare`."""
        ...

    def prepare(self, image: Image.Image, max_tokens: int | None = None) -> Prepared:
        """Pixels and prompt of an RGB image.

        Args:
            image: mode RGB.
            max_tokens: maximum image tokens; the image is resized, or split into fewer tiles.
                None: the checkpoint's own limits.

        Raises:
            RequestError: the family does not support the shape.
            LimitError: even the smallest size has more tokens.
        """
        ...


@runtime_checkable
class PlacesImages(Protocol):
    """The further methods of families with M-RoPE positions of images."""

    def merged(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of tokens of a grid of patches."""
        ...

    def positions(
        self, token_ids: ArrayLike, image_token_id: int, grids: Sequence[Grid]
    ) -> RotaryPositions:
        """M-RoPE positions of a prompt with image tokens; see `rotary_positions`."""
        ...


class FilmRules(Protocol):
    """The video settings of a model family."""

    @property
    def frame_rate(self) -> float:
        """Sampled frames per second; also the rate of a list of frames."""
        ...

    @property
    def placeholder(self) -> str:
        """The placeholder of a video in a rendered prompt."""
        ...

    @property
    def is_text(self) -> bool:
        """Whether the placeholder is put into the messages, since templates do not write it."""
        ...


class FilmProcessor(Protocol):
    """The further methods of families with video support."""

    @property
    def film(self) -> FilmRules | None:
        """The video settings; None: this checkpoint has no video support."""
        ...

    def pick_frames(self, total: int, rate: float, maximum: int) -> list[int]:
        """Sample frame indices, ascending, from `total` frames at `rate` per second.

        `maximum`: maximum image tokens of the video.
        """
        ...

    def fit_frames(
        self, size: tuple[int, int], count: int, maximum: int, max_per_pass: int
    ) -> Resize:
        """How the frames of a video are resized for `prepare_film`.

        Args:
            size: width and height of the first frame.
            count: number of frames.
            maximum: maximum image tokens of the video.
            max_per_pass: maximum image tokens of a pass.

        Raises:
            RequestError: the family does not support the shape.
            LimitError: even the smallest frames have more tokens.
        """
        ...

    def prepare_film(self, film: Film) -> PreparedFilm:
        """The passes of the encoder over a video of resized frames, and its prompt."""
        ...


def supported() -> list[str]:
    """The supported model types."""
    return sorted(_FAMILIES)


def find(model_type: str) -> ModuleType:
    """The family's module; raises `UnsupportedModelError` with the supported types."""
    if model_type not in _FAMILIES:
        raise UnsupportedModelError(
            f"images of {model_type!r} models are not supported",
            hint=f"supported: {', '.join(supported())}",
        )
    return importlib.import_module(f"{__name__}.{_FAMILIES[model_type]}")


def load(folder: Path) -> ImageProcessor:
    """The image processor of a checkpoint, or of a folder with its processor files.

    Raises:
        BrokenArtifactError: a file is missing or damaged.
        UnsupportedModelError: an unknown family, or unsupported settings.
    """
    from edgellm.multimodal.processors.settings import Checkpoint

    checkpoint = Checkpoint.read(folder)
    return find(checkpoint.model_type).Processor.read(checkpoint)


def expand(prompt: str, image_token: str, images: Sequence[Prepared]) -> str:
    """The rendered prompt with each placeholder replaced by its image's or video's `prompt`.

    Raises:
        RequestError: the placeholders do not match the images in number or kind.
    """
    kinds = {image_token, *(image.placeholder for image in images)} - {""}
    # The longest first: one may be part of another.
    pattern = "|".join(map(re.escape, sorted(kinds, key=len, reverse=True)))
    first, *rest = re.split(f"({pattern})", prompt)
    places, texts = rest[0::2], rest[1::2]
    if places != [image.placeholder or image_token for image in images]:
        raise RequestError(
            f"the prompt has {len(places)} places for images, but {len(images)} images came with"
            " it, or they are in another order",
            hint=f"{image_token} must not stand in the text",
        )
    found, numbers = first, Counter[str]()  # by placeholder
    for image, text in zip(images, texts, strict=True):
        found += image.numbered_prompt(numbers[image.placeholder]) + text
        numbers[image.placeholder] += 1
    return found
