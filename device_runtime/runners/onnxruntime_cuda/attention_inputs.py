"""What graphs for CUDA take instead of `write_index` and `tree_mask`: where rows go, what they see.

So no node computes sizes, which ONNX Runtime would place on the CPU.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io

VISIBLE = "visible"  # bool [B, 1, S, T]; row i may see slot j of the cache
VISIBLE_IN_WINDOW = "visible_in_window"  # the same for layers with a window
SLOTS = "slots"  # int64 [B, num_kv_heads, S, 3]; batch, head and slot of each new row
LAST_ROW = "last_row"  # int32 [B]; the slot of the last new row
ROW_NUMBERS = "row_numbers"  # int64 [B, S]; of rows of all sequences, one behind the other
LIVE_ROWS = "live_rows"  # int32 []; T, or no less than the rows that are there behind the pass
HOST_INPUTS = (graph_io.TOP_K, LIVE_ROWS)  # that kernels read in the host's memory
ROWS_GRAPH = "rows.onnx"  # moves rows of a cache
CAUSAL_SUFFIX = ".causal"  # of the graph for passes without a mask, where there is one
ADAPTED_SUFFIX = ".adapted"  # of those for passes with adapters, where there are some
KEPT = "kept"  # int64 [K]; its input beside SLOTS: whose rows go there


def slot_indices(num_kv_heads: int, rows: int, batch: int = 1) -> NDArray[np.int64]:
    """Where rows go, int64 [batch, num_kv_heads, rows, 3]; the slots are still to be filled in."""
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
    """Write what rows see.

    Args:
        out: bool [S', T], its first S rows are real; one of padding sees itself.
        write_index: slots before the new rows.
        positions: int64 [S], of the new rows.
        mask: bool [S, M], rules the last M slots up to the new rows'; None is causal.
        window: of positions that a row sees, its own included; None: all.
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
