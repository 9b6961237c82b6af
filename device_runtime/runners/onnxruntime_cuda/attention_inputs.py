"""Attention inputs of graphs for CUDA: cache slots and full masks from the host.

They replace `write_index` and `tree_mask`. So no node computes shapes, which ONNX Runtime would
place on the CPU.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io

VISIBLE = "visible"  # bool [B, 1, S, T]; token i attends to slot j of the cache
VISIBLE_IN_WINDOW = "visible_in_window"  # the same for sliding-window layers
SLOTS = "slots"  # int64 [B, num_kv_heads, S, 3]; batch, head and slot of each new token
LAST_ROW = "last_row"  # int32 [B]; the slot of the last new token
ROW_NUMBERS = "row_numbers"  # int64 [B, S]; indices of the concatenated tokens
LIVE_ROWS = "live_rows"  # int32 []; T, or an upper bound of the positions after the pass
HOST_INPUTS = (graph_io.TOP_K, LIVE_ROWS)  # inputs that kernels read from host memory
ROWS_GRAPH = "rows.onnx"  # moves positions of a cache
CAUSAL_SUFFIX = ".causal"  # of the graph for causal passes, if any
ADAPTED_SUFFIX = ".adapted"  # of the graphs for passes with adapters, if any
KEPT = "kept"  # int64 [K]; input of `ROWS_GRAPH`: the source positions for SLOTS


def slot_indices(num_kv_heads: int, rows: int, batch: int = 1) -> NDArray[np.int64]:
    """`SLOTS`, int64 [batch, num_kv_heads, rows, 3], with slots of 0."""
    indices = np.zeros((batch, num_kv_heads, rows, 3), np.int64)
    indices[..., 0] = np.arange(batch)[:, None, None]
    indices[..., 1] = np.arange(num_kv_heads)[:, None]
    return indices


def fill_visible(
    out: NDArray[np.bool_],
    write_index: int,
    positions: NDArray[np.int64],
    mask: NDArray[np.bool_] | None,
    window: int | None,
) -> None:
    """Write an attention mask.

    Args:
        out: bool [S', T]; the first S rows are tokens; padding attends to itself.
        write_index: number of slots before the new tokens.
        positions: int64 [S], of the new tokens.
        mask: bool [S, M], of the last M slots up to the new tokens'; None: causal.
        window: size of the sliding window, the token itself included; None: unlimited.
    """
    rows, width = len(positions), out.shape[1]
    end, real = write_index + rows, out[:rows]
    mask = np.tri(rows, dtype=np.bool_) if mask is None else mask
    first = end - mask.shape[1]
    real[:, :first], real[:, first:end], real[:, end:] = True, mask, False
    if window is not None:
        slots = np.arange(width)
        slots[write_index:end] = positions
        real &= slots > positions[:, None] - window
    out[rows:] = False
    np.fill_diagonal(out[rows:, end:], val=True)
