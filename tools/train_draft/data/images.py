"""Images of training conversations, preprocessed as on a device and encoded by the base."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgellm.multimodal import processors
from edgellm.multimodal.images import open_image
from edgellm.multimodal.positions import rotary_positions
from edgellm.multimodal.processors import Prepared


@dataclass(frozen=True, slots=True)
class Picture:
    """An image of a conversation, whose placeholders in the prompt are expanded."""

    source: str  # an absolute path, or a URI
    grid: tuple[int, int]  # Qwen: rows and columns of patches; others: of tiles


def is_encoded(model_type: str) -> bool:
    """Whether drafts train on images of this model; those of others train on text alone."""
    return model_type.startswith("qwen") or model_type in ("idefics3", "internvl", "smolvlm")


class Pictures:
    """Image preprocessing and encoding of a vision-language model."""

    def __init__(self, model: Any, folder: Path) -> None:
        """Read the image processor of the checkpoint in `folder`; `model` is its loaded model.

        Raises:
            UnsupportedModelError: the processor is unsupported.
        """
        self._model = model.model
        self._processor: Any = processors.load(folder)
        self.token_id: int = model.config.image_token_id
        self._is_patched = hasattr(self._processor, "merged")

    def prepare(self, source: str, folder: Path) -> tuple[Picture, Prepared]:
        """Preprocess an image; relative paths are relative to `folder`.

        Raises:
            RequestError: the image cannot be read.
        """
        prepared = self._processor.prepare(open_image(source, folder))
        is_uri = ":" in source.partition("/")[0]
        place = source if is_uri else str((folder / source).absolute())
        return Picture(place, prepared.grid), prepared

    def expand(self, text: str, prepared: list[Prepared]) -> str:
        """Expand each placeholder of a rendered conversation to the length of its image."""
        return processors.expand(text, self._processor.image_token, prepared)

    def positions(self, token_ids: NDArray[np.int64], pictures: tuple[Picture, ...]) -> Tensor:
        """M-RoPE positions of an expanded conversation, int64 [3, S]."""
        grids = [self._processor.merged(picture.grid) for picture in pictures]
        return torch.from_numpy(rotary_positions(token_ids, self.token_id, grids).prompt)

    @torch.inference_mode()
    def encode(self, picture: Picture) -> tuple[Tensor, Tensor]:
        """Return embeddings [N, H], and deepstack embeddings of later layers [L, N, H]."""
        prepared = self._processor.prepare(open_image(picture.source, Path.cwd()))
        pixels = torch.from_numpy(prepared.pixels).to(self._model.device, self._model.dtype)
        if self._is_patched:
            grids = torch.tensor([(1, *picture.grid)], device=pixels.device)
            found = self._model.get_image_features(pixels, grids)
        elif self._model.config.model_type == "internvl":
            found = self._model.get_image_features(pixels)
        else:
            found = self._model.get_image_features(pixels[None])
        embeds = torch.cat([part.flatten(0, -2) for part in found.pooler_output])
        levels = [torch.cat(list(level)) for level in getattr(found, "deepstack_features", ())]
        return embeds, torch.stack(levels) if levels else embeds.new_empty(0, *embeds.shape)
