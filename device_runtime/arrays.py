"""Array types, image embeddings and adapters that all layers of the runtime share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgellm.core.errors import LimitError

I64 = NDArray[np.int64]
F32 = NDArray[np.float32]
Bool = NDArray[np.bool_]
RowKey = int | str  # what a row stands for: a token, or an image by the hash of its content


@dataclass(frozen=True, slots=True)
class ImageRows:
    """The images of a prompt as a decoder sees them: token id V + n stands for row n."""

    embeds: F32  # [N, H], N >= 1
    deepstack: F32  # [L, N, H]; L may be 0
    # [3, S]: of the prompt's rows, M-RoPE; rows behind it follow the largest. None: as in text.
    positions: I64 | None = None
    keys: Mapping[int, RowKey] = field(kw_only=True)  # of the token ids V + n: row n's image

    def between(self, begin: int, end: int) -> ImageRows:
        """The rows [begin, end) alone, without what is said of the prompt."""
        return ImageRows(self.embeds[begin:end], self.deepstack[:, begin:end], keys={})

    @classmethod
    def none(cls, hidden_size: int, num_deepstack: int) -> ImageRows:
        """Those of a text, which are not looked at."""
        shape = 1, hidden_size
        zeros = np.zeros(shape, np.float32), np.zeros((num_deepstack, *shape), np.float32)
        return cls(*zeros, keys={})


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """A LoRA adapter that a decoder holds."""

    name: str
    slot: int  # in `ADAPTER_TABLE`
    mark: str  # of what it computes: the same for equal weights, and no other's
    is_loaded: bool = True  # False: others have its place


def require_room(capacity: int, write_index: int, rows: int, pass_rows: int = 0) -> None:
    """Refuse rows that do not fit into a KV cache, or into a pass; raises `LimitError`."""
    if write_index + rows > capacity:
        raise LimitError(f"{write_index} + {rows} rows exceed the KV capacity of {capacity}")
    if pass_rows and rows > pass_rows:
        raise LimitError(
            f"a pass of {rows} rows: the cache keeps windows only, with room for {pass_rows}",
            hint="give them in pieces",
        )
