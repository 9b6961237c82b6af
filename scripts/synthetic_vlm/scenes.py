"""Drawn scenes of three rows of three cells with coloured shapes, and their captions."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

SIDE, ROWS, CELL = 168, 3, 56  # pixels, cells a side, pixels
COLOURS = {
    "red": (214, 40, 40),
    "orange": (244, 140, 24),
    "yellow": (240, 220, 48),
    "green": (44, 160, 72),
    "blue": (44, 84, 216),
    "purple": (140, 52, 172),
}
SHAPES = ("circle", "square", "triangle", "cross")
EMPTY = "empty"
CELLS = (EMPTY, *(f"{colour} {shape}" for colour, shape in itertools.product(COLOURS, SHAPES)))
_EMPTY_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Scene:
    """A picture and its cells."""

    cells: tuple[str, ...]  # nine of `CELLS`, row by row
    image: Image.Image  # RGB, 168 x 168 pixels

    @property
    def caption(self) -> str:
        """`Row 1 : red circle , empty , blue square . Row 2 : ...`."""
        rows = (self.cells[begin : begin + ROWS] for begin in range(0, ROWS**2, ROWS))
        return " ".join(f"Row {at} : {' , '.join(row)} ." for at, row in enumerate(rows, 1))


@dataclass(frozen=True, slots=True)
class Score:
    """The accuracy of a caption."""

    exact: bool  # word by word
    right_cells: int  # of 9


def draw(*seed: int) -> Scene:
    """Draw the scene of a seed; shapes, positions, sizes, tints and background vary."""
    random = np.random.default_rng(seed)
    background = random.integers(224, 256, 3)
    pixels = np.broadcast_to(background, (SIDE, SIDE, 3)) + random.normal(0, 3, (SIDE, SIDE, 1))
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    pen = ImageDraw.Draw(image)
    cells = []
    for row, column in itertools.product(range(ROWS), repeat=2):
        number = int(random.integers(1, len(CELLS)))
        cells.append(EMPTY if random.random() < _EMPTY_SHARE else CELLS[number])
        centre = (np.array([column, row]) + 0.5) * CELL + random.uniform(-5, 5, 2)
        radius = random.uniform(14, 20)
        tint = random.integers(-14, 15, 3)
        if cells[-1] != EMPTY:
            colour, shape = cells[-1].split()
            fill = tuple((np.array(COLOURS[colour]) + tint).clip(0, 255).tolist())
            _draw_shape(pen, shape, centre, radius, fill)
    return Scene(tuple(cells), image)


def _draw_shape(
    pen: ImageDraw.ImageDraw, shape: str, centre: np.ndarray, radius: float, fill: tuple[int, ...]
) -> None:
    x, y = centre
    thin = radius / 3
    if shape == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill)
    elif shape == "square":
        half = radius * math.sqrt(math.pi) / 2  # the circle's area: size reveals nothing
        pen.rectangle((x - half, y - half, x + half, y + half), fill)
    elif shape == "triangle":
        corners = [(x, y - radius), (x + radius, y + radius), (x - radius, y + radius)]
        pen.polygon(corners, fill)
    else:
        pen.rectangle((x - radius, y - thin, x + radius, y + thin), fill)
        pen.rectangle((x - thin, y - radius, x + thin, y + radius), fill)


def score(caption: str, scene: Scene) -> Score:
    """Compare a caption with a scene; spaces and line breaks do not count.

    Missing rows and cells are wrong. Superfluous ones do not count, but the caption is not exact.
    """
    words = " ".join(re.sub(r"([:,.])", r" \1 ", caption).split())
    right = 0
    for row in range(ROWS):
        found = re.search(rf"Row {row + 1} : ([^.:]*)", words)
        cells = [cell.strip() for cell in found[1].split(",")] if found else []
        true = scene.cells[row * ROWS : (row + 1) * ROWS]
        right += sum(one == other for one, other in zip(cells, true, strict=False))
    return Score(words == scene.caption, right)
