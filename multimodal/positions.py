"""Positions on three axes (time, row, column) for decoders with multimodal rotary embeddings.

The rule of Qwen2-VL (arXiv 2409.12191, section 2.1), which Qwen2.5-VL and Qwen3-VL keep for images:
text counts on all axes at once; a picture stands still in time and counts its rows and columns from
where it begins; what follows goes on behind its longer side.
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
    """Where the tokens of a prompt stand, and those that are generated after it."""

    prompt: NDArray[np.int64]  # [3, S]: time, row, column
    delta: int  # generated token i of the sequence, i >= S, stands at i + delta on all axes


def rotary_positions(
    token_ids: ArrayLike, image_token_id: int, grids: Sequence[Grid]
) -> RotaryPositions:
    """Positions of a prompt's tokens.

    Args:
        token_ids: integers [S]; a picture is a run of as many image tokens as it has features.
        image_token_id: the token that stands for one feature.
        grids: rows and columns of features (patches after merging) of each picture, in order; of
            a film patches in time, rows, columns, and how far two such patches are apart.

    Raises:
        RequestError: the image tokens are not the runs that the grids ask for.
    """
    is_image = np.asarray(token_ids, np.int64) == image_token_id
    where = np.flatnonzero(is_image)
    whole = [grid if len(grid) == 4 else (1, *grid, 1.0) for grid in grids]
    frames, rows, columns = np.asarray([one[:3] for one in whole], np.int64).reshape(-1, 3).T
    intervals = np.asarray([one[3] for one in whole], np.float32)
    sizes = frames * rows * columns
    ends = np.cumsum(sizes)
    starts = ends - sizes
    if where.size != sizes.sum() or np.any(where[ends - 1] - where[starts] != sizes - 1):
        raise RequestError(
            f"the prompt has {where.size} image tokens, its {sizes.size} images need"
            f" {sizes.sum()} in unbroken runs",
            hint="image tokens stand for pictures only: leave them out of the text",
        )
    # How far each token moves what follows it: a picture does so with its last feature
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
    # What follows a film goes on behind its rows and columns, and may stand beside its last times.
    following = int(positions.max()) + 1 if len(whole) else int(step.sum())
    return RotaryPositions(positions, following - is_image.size)
