"""M-RoPE positions on three axes (time, row, column).

The rule is that of Qwen2-VL (arXiv 2409.12191, section 2.1), also of Qwen2.5-VL to Qwen3.5. Text
tokens have equal positions on all axes. An image has one time, and rows and columns from its start.
The next token follows the image's longer side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgellm.core.errors import RequestError

Grid = tuple[int, int] | tuple[int, int, int, float]


@dataclass(frozen=True, slots=True)
class RotaryPositions:
    """Positions of a prompt, and the offset of generated tokens."""

    prompt: NDArray[np.int64]  # [3, S]: time, row, column
    delta: int  # token i >= S of the sequence has position i + delta on all axes
    # Ids of tokens with positions that depend on tokens after them
    forward_ids: tuple[int, ...] = ()


def rotary_positions(
    token_ids: ArrayLike, image_token_id: int, grids: Sequence[Grid]
) -> RotaryPositions:
    """Positions of a prompt's tokens.

    Args:
        token_ids: integers [S]; an image is a run of one image token for each embedding.
        image_token_id: the image token.
        grids: rows and columns of embeddings (merged patches) of each image, in order. For a
            video: temporal patches, rows, columns, and the interval of temporal patches.

    Raises:
        RequestError: the runs of image tokens do not match the grids.
    """
    is_image = np.asarray(token_ids, np.int64) == image_token_id
    where = np.flatnonzero(is_image)
    whole = [grid if len(grid) == 4 else (1, *grid, 1.0) for grid in grids]
    frames, rows, columns = np.asarray([one[:3] for one in whole], np.int64).reshape(-1, 3).T
    intervals = np.asarray([one[3] for one in whole], np.float32)
    sizes = frames * rows * columns
    ends = np.cumsum(sizes)
    starts = ends - sizes
    run_starts(where, sizes)
    # Position increment of each token; an image increments at its last embedding
    step = np.where(is_image, 0, 1)
    step[where[ends - 1]] = np.maximum(rows, columns)
    begin = np.cumsum(step) - step
    begin[where] = np.repeat(begin[where[starts]], sizes)
    positions = np.tile(begin, (3, 1))
    feature = np.arange(where.size) - np.repeat(starts, sizes)
    frame, feature = np.divmod(feature, np.repeat(rows * columns, sizes))
    row, column = np.divmod(feature, np.repeat(columns, sizes))
    # In float32, as transformers does it.
    time = frame.astype(np.float32) * np.repeat(intervals, sizes)
    positions[0, where] += time.astype(np.int64)
    positions[1, where] += row
    positions[2, where] += column
    # Text after a video follows its rows and columns, and may overlap its last times.
    following = int(positions.max()) + 1 if len(whole) else int(step.sum())
    return RotaryPositions(positions, following - is_image.size)


def run_starts(where: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Index of the first token of each run.

    Args:
        where: indices of image tokens, ascending.
        sizes: image tokens of each run.

    Raises:
        RequestError: they are not in runs of these sizes.
    """
    ends = np.cumsum(sizes)
    starts = ends - sizes
    if where.size != sizes.sum() or np.any(where[ends - 1] - where[starts] != sizes - 1):
        raise RequestError(
            f"the prompt has {where.size} image tokens, its {sizes.size} images need"
            f" {sizes.sum()} in unbroken runs",
            hint="image tokens are reserved for images: leave them out of the text",
        )
    return where[starts]
