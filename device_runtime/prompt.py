"""What a session reads before it answers."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.device_runtime.session import ImageRows


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a session reads: token ids, those of image rows from the vocabulary's size on."""

    token_ids: list[int]
    images: ImageRows | None = None  # None: text only
