"""What a session reads before it answers."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.device_runtime.engine.prefix_cache import row_keys
from edgellm.device_runtime.sessions import ImageRows, RowKey


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a session reads: token ids, those of image rows from the vocabulary's size on."""

    token_ids: list[int]
    images: ImageRows | None = None  # None: text only

    @property
    def keys(self) -> list[RowKey]:
        """What the rows stand for; equal token ids of two prompts may be rows of other images."""
        return row_keys(self.token_ids, self.images.keys if self.images is not None else {})
