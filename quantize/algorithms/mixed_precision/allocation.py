"""Which linear layers get how many bits: the least divergence that a size can have.

Each unit (linear layers that read the same tensor) takes one of several forms. What a form costs in
KL divergence was estimated beforehand, and the costs of all units are taken to add up.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Form:
    """One way to store a unit."""

    name: str
    bits: float  # of the whole unit
    divergence: float  # nats a token that it adds


@dataclass(frozen=True, slots=True)
class Unit:
    """What takes one form as a whole."""

    layer: int
    names: tuple[str, ...]  # of its linear layers
    weights: int
    forms: tuple[Form, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """All units with a form each."""

    bits_per_weight: float
    divergence: float  # as estimated
    forms: tuple[str, ...]  # of the units


def curve(units: Sequence[Unit]) -> list[Point]:
    """From the smallest to the best: each step buys the most divergence for its bits."""
    ladders = [_ladder(unit.forms) for unit in units]
    steps = [
        ((low.divergence - high.divergence) / (high.bits - low.bits), index, place)
        for index, ladder in enumerate(ladders)
        for place, (low, high) in enumerate(itertools.pairwise(ladder))
    ]
    total = sum(unit.weights for unit in units)
    places = [0] * len(units)
    points = [_point(ladders, places, total)]
    # Gains fall along a ladder: its steps come in order.
    for _, index, place in sorted(steps, key=lambda step: (-step[0], step[1], step[2])):
        places[index] = place + 1
        points.append(_point(ladders, places, total))
    return points


def choose_point(points: Sequence[Point], bits: float | None, divergence: float | None) -> Point:
    """The best point of at most so many bits a weight, or the smallest within a divergence."""
    if bits is not None:
        fitting = [point for point in points if point.bits_per_weight <= bits]
        return fitting[-1] if fitting else points[0]
    assert divergence is not None
    return next((point for point in points if point.divergence <= divergence), points[-1])


def _ladder(forms: Sequence[Form]) -> list[Form]:
    """The lower convex hull: forms that no mixture of two others beats, from small to large."""
    found: list[Form] = []
    for form in sorted(forms, key=lambda each: (each.bits, each.divergence)):
        if found and form.divergence >= found[-1].divergence:
            continue
        while len(found) > 1 and _gain(found[-1], form) >= _gain(found[-2], found[-1]):
            found.pop()
        found.append(form)
    return found


def _gain(low: Form, high: Form) -> float:
    return (low.divergence - high.divergence) / (high.bits - low.bits)


def _point(ladders: list[list[Form]], places: list[int], total: int) -> Point:
    chosen = [ladder[place] for ladder, place in zip(ladders, places, strict=True)]
    return Point(
        sum(form.bits for form in chosen) / total,
        sum(form.divergence for form in chosen),
        tuple(form.name for form in chosen),
    )
