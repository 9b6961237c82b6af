"""What the decoding loop asks of a backend: one pass over some rows with a KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
F32 = NDArray[np.float32]
Bool = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class PassResult:
    """Outputs of one pass; arrays are valid until the session runs again."""

    token_ids: I64  # [R], argmax
    logits: F32  # [R, V]


class Session(Protocol):
    """A loaded engine with one KV cache of `capacity` rows."""

    capacity: int

    def run(
        self,
        token_ids: I64,
        write_index: int,
        logits_index: I64,
        *,
        position_ids: I64 | None = None,
        tree_mask: Bool | None = None,
    ) -> PassResult:
        """Compute S new rows and write their keys and values at `write_index`.

        Args:
            token_ids: int64 [S].
            write_index: rows of the cache that are valid; the new ones follow.
            logits_index: int64 [R], the new rows that get logits.
            position_ids: int64 [S]; None counts on from `write_index`.
            tree_mask: bool [S, S], row i may see new row j; None is causal.

        Raises:
            LimitError: the rows do not fit into the cache.
        """
        ...
