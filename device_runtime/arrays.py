"""Array types, image embeddings and adapters, shared by all layers of the runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.core.errors import LimitError

I64 = NDArray[np.int64]
F32 = NDArray[np.float32]
Bool = NDArray[np.bool_]
RowKey = int | str  # prefix cache key of a position: a token id, or the hash of an image


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRows:
    """Image embeddings of a prompt: token id V + n is embedding n."""

    embeds: F32  # [N, H], N >= 1
    deepstack: F32  # [L, N, H]; L may be 0
    # [3, S]: M-RoPE positions of the prompt; later ones follow the largest. None: as in text.
    positions: I64 | None = None
    keys: Mapping[int, RowKey]  # by token id V + n, and of tags with positions by an image
    # Of the prompt: first and after the last of image tokens that attend to each other, so that
    # one pass has all of them.
    spans: tuple[tuple[int, int], ...] = ()

    def between(self, begin: int, end: int) -> ImageRows:
        """Embeddings [begin, end) only, without positions and keys."""
        return ImageRows(
            embeds=self.embeds[begin:end], deepstack=self.deepstack[:, begin:end], keys={}
        )

    @classmethod
    def none(cls, hidden_size: int, num_deepstack: int) -> ImageRows:
        """A placeholder for text, which is not used."""
        shape = 1, hidden_size
        deepstack = np.zeros((num_deepstack, *shape), np.float32)
        return cls(embeds=np.zeros(shape, np.float32), deepstack=deepstack, keys={})


@dataclass(slots=True, eq=False, kw_only=True)
class LoadedAdapter:
    """A LoRA adapter loaded in a decoder."""

    name: str
    slot: int  # in `ADAPTER_TABLE`
    mark: str  # hash of its weights
    is_loaded: bool = True  # False after unloading


def require_room(capacity: int, write_index: int, rows: int, pass_rows: int = 0) -> None:
    """Reject tokens that exceed the KV cache, or a pass; raises `LimitError`."""
    if write_index + rows > capacity:
        raise LimitError(f"{write_index} + {rows} tokens exceed the KV capacity of {capacity}")
    if pass_rows and rows > pass_rows:
        raise LimitError(
            f"a pass of {rows} tokens exceeds the {pass_rows} of a cache with windows",
            hint="pass them in chunks",
        )
