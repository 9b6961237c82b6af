"""Canvas M-RoPE of MiniCPM-V 4.7: positions on three axes (time, row, column).

An image and its slices lie on one canvas, whose unit is a token of a slice. Slices tile the canvas;
the tokens of the whole image are spread over it. All have one time. The tags around them lie at
corners of the canvas and of slices. The rule is that of transformers' models/minicpmv4_7.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgellm.multimodal.positions import RotaryPositions, run_starts

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """Token ids of the tags around images and slices, and of the newline after slices."""

    image_start: int
    image_end: int
    slice_start: int
    slice_end: int
    newline: int

    @property
    def ids(self) -> frozenset[int]:
        """All of them."""
        ends = self.image_end, self.slice_end
        return frozenset((self.image_start, self.slice_start, self.newline, *ends))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Consecutive tokens of a whole image, or of a slice."""

    begin: int
    end: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class _Canvas:
    """An image, its slices, and the end of the tags after them."""

    whole: _Run
    slices: tuple[_Run, ...]
    end: int

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of slices; the first row ends where a gap has more than two tags."""
        count = len(self.slices)
        pairs = zip(self.slices, self.slices[1:], strict=False)
        wide = [at for at, (one, other) in enumerate(pairs, 1) if other.begin - one.end > 2]
        columns = wide[0] if wide else count
        return (1, count) if columns and count % columns else (count // max(columns, 1), columns)

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of tokens."""
        if not self.slices:
            return self.whole.rows, self.whole.columns
        (rows, columns), first = self.grid, self.slices[0]
        return rows * first.rows, columns * first.columns


def canvas_positions(
    token_ids: ArrayLike, image_token_id: int, grids: Sequence[tuple[int, int]], tags: Tags
) -> RotaryPositions:
    """Positions of a prompt's tokens.

    Args:
        token_ids: integers [S].
        image_token_id: the image token.
        grids: rows and columns of tokens of each run of image tokens: of an image, then of its
            slices.
        tags: ids of the tags.

    Raises:
        RequestError: the runs of image tokens do not match the grids.
    """
    ids = np.asarray(token_ids, np.int64)
    positions, done, following = np.zeros((3, ids.size), np.int64), 0, 0
    for canvas in _canvases(ids, image_token_id, grids, tags):
        begin = max(canvas.whole.begin - 1, done)
        positions[:, done:begin] = following + np.arange(begin - done)
        following += begin - done
        _place(positions, canvas, following)
        following += max(canvas.size) + 1
        done = canvas.end
    positions[:, done:] = following + np.arange(ids.size - done)
    # A tag before an image has a position that depends on the image
    return RotaryPositions(positions, int(positions.max()) + 1 - ids.size, (tags.image_start,))


def _canvases(
    ids: I64, image_token_id: int, grids: Sequence[tuple[int, int]], tags: Tags
) -> Iterator[_Canvas]:
    """Images with the slices that follow them."""
    sizes = np.asarray([grid[0] * grid[1] for grid in grids], np.int64)
    starts = run_starts(np.flatnonzero(ids == image_token_id), sizes).tolist()
    runs = [
        _Run(begin=begin, end=begin + rows * columns, rows=rows, columns=columns)
        for begin, (rows, columns) in zip(starts, grids, strict=True)
    ]
    firsts = [at for at, run in enumerate(runs) if ids[run.begin - 1] != tags.slice_start]
    firsts = sorted({0, *firsts}) if runs else []
    for first, after in zip(firsts, [*firsts[1:], len(runs)], strict=True):
        whole, *slices = runs[first:after]
        end = (slices or [whole])[-1].end
        while end < ids.size and int(ids[end]) in tags.ids:
            end += 1
        yield _Canvas(whole, tuple(slices), end)


def _place(positions: I64, canvas: _Canvas, origin: int) -> None:
    """Write the positions of an image, its slices and their tags; the canvas is at `origin`."""
    whole, (high, wide) = canvas.whole, canvas.size
    before = max(whole.begin - 1, 0)
    positions[:, before : canvas.end] = origin
    positions[1:, before] = max(origin - 1, 0)
    if whole.end < canvas.end:
        positions[1:, whole.end] += (high, wide)
    rows, columns = _spread(high, whole.rows), _spread(wide, whole.columns)
    positions[1:, whole.begin : whole.end] = origin + _product(rows, columns)
    for at, part in enumerate(canvas.slices):
        row, column = divmod(at, canvas.grid[1])
        corner = np.array([row * canvas.slices[0].rows, column * canvas.slices[0].columns])
        positions[1:, part.begin - 1] = origin + corner
        if part.end < canvas.end:
            positions[1:, part.end] = origin + corner + (part.rows - 1, part.columns - 1)
        inside = _product(np.arange(part.rows), np.arange(part.columns))
        positions[1:, part.begin : part.end] = origin + corner[:, None] + inside
    for at, (one, other) in enumerate(zip(canvas.slices, canvas.slices[1:], strict=False)):
        if other.begin - one.end > 2:  # a newline, right of the row that it ends
            bottom = (at // canvas.grid[1] + 1) * canvas.slices[0].rows - 1
            positions[1, one.end + 1 : other.begin - 1] = origin + bottom
            positions[2, one.end + 1 : other.begin - 1] = origin + wide


def _product(rows: I64, columns: I64) -> I64:
    """Row and column of each token of a grid, [2, N]."""
    return np.stack([np.repeat(rows, len(columns)), np.tile(columns, len(rows))])


def _spread(size: int, count: int) -> I64:
    """`count` positions of an axis of `size`, as `torch.linspace` in float32, rounded."""
    places = np.arange(count)
    step = np.float32(size - 1) / np.float32(max(count - 1, 1))
    down = np.float32(size - 1) - step * (count - 1 - places).astype(np.float32)
    up = step * places.astype(np.float32)
    return np.where(places < max(count // 2, 1), up, down).round().astype(np.int64)
