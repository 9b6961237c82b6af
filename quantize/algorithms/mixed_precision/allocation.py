"""Allocates bits to linear layers: the least KL divergence for a size.

Each unit (linear layers with one form) takes one of several forms. The sum of their estimated KL
divergences is minimized.
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
    divergence: float  # added by it, nats a token


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Linear layers that share a form."""

    layer: int
    names: tuple[str, ...]  # of its linear layers
    weights: int
    forms: tuple[Form, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """An allocation: a form for each unit."""

    bits_per_weight: float
    divergence: float  # as estimated
    forms: tuple[str, ...]  # of the units


def curve(units: Sequence[Unit]) -> list[Point]:
    """Return allocations from the smallest on: each step reduces divergence most for its bits."""
    ladders = [_ladder(unit.forms) for unit in units]
    steps = [
        ((low.divergence - high.divergence) / (high.bits - low.bits), index, place)
        for index, ladder in enumerate(ladders)
        for place, (low, high) in enumerate(itertools.pairwise(ladder))
    ]
    total = sum(unit.weights for unit in units)
    places = [0] * len(units)
    points = [_point(ladders, places, total)]
    # Gains decrease along a ladder, so its steps come in order.
    for _, index, place in sorted(steps, key=lambda step: (-step[0], step[1], step[2])):
        places[index] = place + 1
        points.append(_point(ladders, places, total))
    return points


def choose_point(points: Sequence[Point], bits: float | None, divergence: float | None) -> Point:
    """Return the best point of at most `bits` a weight, or the smallest within `divergence`."""
    if bits is not None:
        fitting = [point for point in points if point.bits_per_weight <= bits]
        return fitting[-1] if fitting else points[0]
    assert divergence is not None
    return next((point for point in points if point.divergence <= divergence), points[-1])


def _ladder(forms: Sequence[Form]) -> list[Form]:
    """Return the lower convex hull of forms, from small to large."""
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
