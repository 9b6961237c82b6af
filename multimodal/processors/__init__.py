"""From a picture to what encoder and prompt need of it: one file per family of models.

A file exports `Processor`, which `read` builds from a checkpoint's settings.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from edgellm.core.errors import (
    RequestError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from PIL import Image

    from edgellm.multimodal.video import Film

_FAMILIES = {
    "idefics3": "idefics3",
    "internvl": "internvl",
    "qwen2_5_vl": "qwen2_vl",
    "qwen2_vl": "qwen2_vl",
    "qwen3_vl": "qwen2_vl",
    "smolvlm": "idefics3",
}


@dataclass(frozen=True, slots=True)
class Prepared:
    """One picture, ready for the encoder and for the prompt."""

    pixels: NDArray[np.float32]  # Qwen: [P, 3*T*p*p] patches; others: [tiles, 3, S, S]
    grid: tuple[int, int]  # Qwen: rows and columns of patches; others: of tiles
    num_tokens: int  # features of the encoder, each in the place of one image token
    prompt: str  # what stands for the placeholder: the image tokens, and tags around them
    placeholder: str = ""  # of a film; "": an image's


@dataclass(frozen=True, slots=True)
class PreparedFilm:
    """A film, ready for the encoder, which sees one patch in time after the other."""

    whole: Prepared  # without pixels; its grid is that of each pass
    passes: tuple[NDArray[np.float32], ...]  # pixels of each: [P, 3*T*p*p] or [1, 3, S, S]
    runs: tuple[tuple[int, int, int, float], ...]  # see `rotary_positions`; () on one axis


class ImageProcessor(Protocol):
    """How a family prepares its pictures."""

    @property
    def image_token(self) -> str:
        """The template's placeholder, which is also the token that features replace."""
        ...

    def count(self, size: tuple[int, int], max_tokens: int | None = None) -> int:
        """Image tokens of a picture of `size` (width, height); raises what `prepare` raises."""
        ...

    def prepare(self, image: Image.Image, max_tokens: int | None = None) -> Prepared:
        """Pixels and prompt of an RGB picture.

        Args:
            image: mode RGB.
            max_tokens: the picture is made smaller, or cut into fewer tiles, until it has no more
                image tokens. None: the checkpoint's own limits.

        Raises:
            RequestError: a shape that the family cannot take.
            LimitError: even the smallest picture has more tokens.
        """
        ...


class FilmRules(Protocol):
    """What is asked of a family's rules of films."""

    @property
    def frame_rate(self) -> float:
        """Frames that are shown of a second; of a list of frames, where each is."""
        ...

    @property
    def placeholder(self) -> str:
        """What stands for a film in a rendered prompt."""
        ...

    @property
    def is_text(self) -> bool:
        """Whether the placeholder is put into the messages: templates do not write it."""
        ...


class FilmProcessor(Protocol):
    """What a family that takes films has besides."""

    @property
    def film(self) -> FilmRules | None:
        """None: this checkpoint takes none."""
        ...

    def pick_frames(self, total: int, rate: float, maximum: int) -> list[int]:
        """Places, ascending, of the frames that are shown of `total`, `rate` in a second.

        `maximum`: image tokens that the film may have.
        """
        ...

    def prepare_film(self, film: Film, maximum: int, max_per_pass: int) -> PreparedFilm:
        """The passes of the encoder over a film, and its prompt.

        Args:
            film: its frames.
            maximum: image tokens of all of it.
            max_per_pass: of one pass.

        Raises:
            RequestError: a shape that the family cannot take.
            LimitError: even the smallest frames have more tokens.
        """
        ...


def supported() -> list[str]:
    """The model types whose pictures can be prepared."""
    return sorted(_FAMILIES)


def find(model_type: str) -> ModuleType:
    """The family's module; raises `UnsupportedModelError` naming those that there are."""
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
        UnsupportedModelError: an unknown family, or settings that are not understood.
    """
    from edgellm.multimodal.processors.settings import Checkpoint

    checkpoint = Checkpoint.read(folder)
    return find(checkpoint.model_type).Processor.read(checkpoint)


def expand(prompt: str, image_token: str, images: Sequence[Prepared]) -> str:
    """The rendered prompt with each placeholder replaced by its picture's or film's `prompt`.

    Raises:
        RequestError: there are more or fewer placeholders than pictures, or of other kinds.
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
    return first + "".join(image.prompt + text for image, text in zip(images, texts, strict=True))
