"""Inputs of visual encoders that depend on an image's patch grid: positions, windows, embeddings.

Time and memory are linear in the patches. An image has `rows` by `columns` patches, P in total, in
merge-block order as in `graph_io.PIXEL_VALUES`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgellm.core.errors import RequestError
from edgellm.core.graph_io import (
    PATCH_POSITIONS,
    POS_EMBED_INDEX,
    POS_EMBED_SHARES,
    POS_EMBED_WEIGHT,
    WINDOW_MASK,
    WINDOW_ROWS,
    WINDOW_SLOTS,
)
from edgellm.core.model_spec import VisionSpec

I64 = NDArray[np.int64]


def grid_inputs(rows: int, columns: int, spec: VisionSpec) -> dict[str, np.ndarray]:
    """All inputs of the graph except pixel values, by graph I/O name; none for tiles.

    Raises:
        RequestError: the grid is empty, or does not divide into blocks of merged patches.
    """
    if spec.image_size:
        return {}
    positions = patch_positions(rows, columns, spec.merge_size)
    # Of the next two kinds these are the only positions
    if spec.antialiases_positions:
        return {POS_EMBED_SHARES: position_shares(positions, rows, columns, spec.position_grid)}
    if spec.has_nearest_positions:
        return {POS_EMBED_INDEX: nearest_positions(positions, rows, columns, spec.position_grid)}
    inputs: dict[str, np.ndarray] = {PATCH_POSITIONS: positions}
    if spec.window_size:
        slots, mask, places = window_arrays(positions, rows, columns, spec.window_size)
        inputs |= {WINDOW_SLOTS: slots, WINDOW_MASK: mask, WINDOW_ROWS: places}
    if spec.position_grid:
        neighbours = exchanged_neighbours if spec.exchanges_positions else position_neighbours
        index, weight = neighbours(positions, rows, columns, spec.position_grid)
        inputs |= {POS_EMBED_INDEX: index, POS_EMBED_WEIGHT: weight}
    return inputs


def patch_positions(rows: int, columns: int, merge_size: int) -> I64:
    """Row and column of each patch, int64 [P, 2].

    Raises:
        RequestError: the grid is empty, or does not divide into blocks of merged patches.
    """
    if rows < 1 or columns < 1 or rows % merge_size or columns % merge_size:
        raise RequestError(
            f"an image of {rows} by {columns} patches does not divide into blocks of "
            f"{merge_size} by {merge_size}"
        )
    blocks = rows // merge_size, merge_size, columns // merge_size, merge_size
    grid = np.moveaxis(np.indices((rows, columns), np.int64), 0, -1)  # [rows, columns, 2]
    return grid.reshape(*blocks, 2).swapaxes(1, 2).reshape(-1, 2)


def window_arrays(
    positions: I64, rows: int, columns: int, size: int
) -> tuple[I64, NDArray[np.bool_], I64]:
    """Windows of `size` by `size` patches; those at the lower and right edge may be smaller.

    Returns:
        The patch in each slot, int64 [W * Z] with Z = size * size and patch 0 as padding; which
        slots hold a patch, bool [W, Z]; the slot of each patch, int64 [P].
    """
    windows_down, windows_across = -(-rows // size), -(-columns // size)
    row, column = positions.T
    window = row // size * windows_across + column // size
    places = window * size**2 + row % size * size + column % size
    slots = np.zeros(windows_down * windows_across * size**2, np.int64)
    mask = np.zeros(len(slots), np.bool_)
    slots[places] = np.arange(len(places))
    mask[places] = True
    return slots, mask.reshape(-1, size**2), places


def position_neighbours(
    positions: I64, rows: int, columns: int, side: int
) -> tuple[I64, NDArray[np.float32]]:
    """Bilinear interpolation of a learned table of `side` by `side` positions, corners aligned.

    Returns:
        Rows of the table int64 [4, P] and their weights float32 [4, P]: upper left, upper right,
        lower left, lower right.
    """
    upper, down = _axis_neighbours(positions[:, 0], rows, side)
    left, right = _axis_neighbours(positions[:, 1], columns, side)
    places = [(at, np.minimum(at + 1, side - 1)) for at in (upper, left)]
    return _corners(places, [(1 - down, down), (1 - right, right)], side)


def exchanged_neighbours(
    positions: I64, rows: int, columns: int, side: int
) -> tuple[I64, NDArray[np.float32]]:
    """Neighbours as of `position_neighbours`, in a table that is resized to `columns` by `rows`.

    Patches read the result row by row, although it has other rows than the image: Muse-Glimmer is
    trained so. Pixels are areas, so corners are not aligned, and zeros are around the table.
    """
    place = positions[:, 0] * columns + positions[:, 1]
    places, shares = [], []
    for at, length in zip(divmod(place, rows), (columns, rows), strict=True):
        # In float32 and in this order, because transformers does so.
        exact = (at.astype(np.float32) + np.float32(0.5)) * np.float32(side) / np.float32(length)
        exact -= np.float32(0.5)
        before = np.floor(exact)
        after, near = exact - before, before.astype(np.int64)
        places.append((np.maximum(near, 0), np.minimum(near + 1, side - 1)))
        shares.append(((1 - after) * (near >= 0), after * (near + 1 < side)))
    return _corners(places, shares, side)


def _corners(
    places: Sequence[tuple[I64, I64]], shares: Sequence[tuple[np.ndarray, np.ndarray]], side: int
) -> tuple[I64, NDArray[np.float32]]:
    """Rows of the table and weights [4, P] by the neighbours of each axis."""
    (upper, lower), (left, farther) = places
    (up, down), (near, right) = shares
    index = np.stack(
        [upper * side + left, upper * side + farther, lower * side + left, lower * side + farther]
    )
    weight = np.stack([up * near, up * right, down * near, down * right])
    return index, weight.astype(np.float32)


def nearest_positions(positions: I64, rows: int, columns: int, side: int) -> I64:
    """Row of a table of `side` by `side` positions for each patch, int64 [1, P].

    A patch has the position that its upper left corner lies in, if the table covers the image.
    """
    down, across = positions[:, 0] * side // rows, positions[:, 1] * side // columns
    return (down * side + across)[None]


def position_shares(positions: I64, rows: int, columns: int, side: int) -> NDArray[np.float32]:
    """Bilinear interpolation with antialiasing of a table of `side` by `side` positions.

    Pixels are areas, so corners are not aligned. A table that is reduced has wider triangles.

    Returns:
        Weights of the table's rows, float32 [P, side * side].
    """
    down = _axis_shares(rows, side)[positions[:, 0]]
    across = _axis_shares(columns, side)[positions[:, 1]]
    return (down[:, :, None] * across[:, None]).reshape(len(positions), -1)


def _axis_shares(length: int, side: int) -> NDArray[np.float32]:
    """Weights float32 [length, side] of an axis; each row has the sum 1."""
    scale = np.float32(side) / np.float32(length)
    centers = (np.arange(length, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
    distances = np.abs(np.arange(side, dtype=np.float32) - centers[:, None])
    shares = np.maximum(1 - distances / max(scale, np.float32(1)), 0)
    return (shares / shares.sum(axis=1, keepdims=True)).astype(np.float32)


def _axis_neighbours(place: I64, length: int, side: int) -> tuple[I64, NDArray[np.float32]]:
    """The table index at or before each patch, and the fraction after it."""
    # In float32 and in this order, because transformers does so.
    exact = place.astype(np.float32) * np.float32(side - 1) / np.float32(max(length - 1, 1))
    before = np.floor(exact)
    return before.astype(np.int64), (exact - before).astype(np.float32)
