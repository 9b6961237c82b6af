"""Passes of several sequences as rectangles: as many rows for each, which lie in slots.

A pass over a part of the batch begins at slot 0, so that few passes recur; a lone sequence is one
over its own slot. Rows that a slot has no use for are padding behind those that are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.device_runtime.runners.onnxruntime_cuda.size_buckets import bucket_of

Inputs = Mapping[str, NDArray[Any]]
MAX_JOINED = 64  # rows of a sequence that shares a pass with others, padding included
# What a pass of so many sequences costs, by the rows of all: the measure is the caller's
Cost = Callable[[int, int], float]
_ROWS_OF_WEIGHTS = 64  # that take the time of reading all weights, where nothing was measured


@dataclass(frozen=True, slots=True)
class Grid:
    """One pass."""

    first: int  # slot
    parts: tuple[Inputs | None, ...]  # of the slots from it on; None: nothing is asked of one
    ends: tuple[int, ...]  # rows that are there in each, of those with parts before the pass

    @property
    def some(self) -> Inputs:
        """Inputs of one of them, whose names all have."""
        return next(part for part in self.parts if part is not None)

    @property
    def adapters(self) -> list[int]:
        """Of the parts; 0: none."""
        names = (part or {} for part in self.parts)
        return [int(part[graph_io.ADAPTER][0]) if graph_io.ADAPTER in part else 0 for part in names]

    @property
    def rows(self) -> int:
        """Of the sequence with most."""
        return max(rows_of(part) for part in self.parts if part is not None)

    @property
    def outputs(self) -> int:
        """Rows that are to get logits or candidates, of all."""
        return sum(len(part[graph_io.LOGITS_INDEX]) for part in self.parts if part is not None)

    @property
    def end(self) -> int:
        """The largest of `ends`."""
        return max(self.ends)


def rows_of(inputs: Inputs) -> int:
    """Of a sequence in a pass."""
    return inputs[graph_io.INPUT_IDS].shape[1]


def lone(inputs: Inputs, slot: int = 0) -> Grid:
    """A pass of one sequence."""
    return Grid(slot, (inputs,), (int(inputs[graph_io.WRITE_INDEX][0]),))


def assumed_cost(sequences: int, rows: int) -> float:
    """Of a pass, in rows: all read the weights."""
    del sequences
    return _ROWS_OF_WEIGHTS + rows


def arrange(
    parts: Mapping[int, Inputs], ends: Sequence[int], maximum: int, cost: Cost = assumed_cost
) -> list[Grid]:
    """The passes that take the least time together.

    Args:
        parts: inputs by slot.
        ends: rows that are there in all slots.
        maximum: slots.
        cost: of passes.
    """
    classes: dict[int, list[int]] = {}  # slots by rows, padded
    for slot in sorted(parts, key=lambda slot: -rows_of(parts[slot])):
        classes.setdefault(bucket_of(rows_of(parts[slot])), []).append(slot)
    sizes = list(classes)
    best: list[tuple[float, list[list[int]]]] = [(0, [])]  # of the first classes
    for end in range(1, len(sizes) + 1):
        found: list[tuple[float, list[list[int]]]] = []
        for begin in range(end):
            slots = [slot for size in sizes[begin:end] for slot in classes[size]]
            taken, groups = _cheapest(slots, parts, sizes[begin], maximum, cost)
            found.append((best[begin][0] + taken, best[begin][1] + groups))
        best.append(min(found, key=lambda each: each[0]))
    return [_grid(slots, parts, ends, maximum) for slots in best[-1][1]]


def _cheapest(
    slots: list[int], parts: Mapping[int, Inputs], size: int, maximum: int, cost: Cost
) -> tuple[float, list[list[int]]]:
    """What a group costs, together in one pass or each in its own."""
    apart = sum(cost(1, rows_of(parts[slot])) for slot in slots)
    batch = batch_of(max(slots) + 1, maximum)
    together = cost(batch, batch * size)
    if len(slots) == 1 or size > MAX_JOINED or apart < together:
        return apart, [[slot] for slot in slots]
    return together, [slots]


def batch_of(slots: int, maximum: int) -> int:
    """Slots of a pass that needs the first so many: 2, 4, 8 ... or all."""
    return min(bucket_of(slots), maximum)


def _grid(slots: list[int], parts: Mapping[int, Inputs], ends: Sequence[int], maximum: int) -> Grid:
    if len(slots) == 1:
        return lone(parts[slots[0]], slots[0])
    chosen = range(batch_of(max(slots) + 1, maximum))
    asked = [parts[slot] if slot in slots else None for slot in chosen]
    before = [
        ends[slot] if part is None else int(part[graph_io.WRITE_INDEX][0])
        for slot, part in zip(chosen, asked, strict=True)
    ]
    return Grid(0, tuple(asked), tuple(before))


class GridShare(Mapping[str, NDArray[Any]]):
    """What a part gets of a pass."""

    def __init__(
        self, found: Mapping[str, NDArray[Any]], place: int, rows: int, wanted: slice
    ) -> None:
        self._found, self._place, self._rows, self._wanted = found, place, rows, wanted

    def __contains__(self, name: object) -> bool:
        return name in self._found

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name == graph_io.HIDDEN_TAPS:  # of all rows
            return self._found[name][self._place : self._place + 1, : self._rows]
        return self._found[name][:, self._wanted]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def shares(found: Mapping[str, NDArray[Any]], grid: Grid) -> dict[int, GridShare]:
    """What each slot that was asked gets."""
    given: dict[int, GridShare] = {}
    wanted = 0
    for place, part in enumerate(grid.parts):
        if part is not None:
            end = wanted + len(part[graph_io.LOGITS_INDEX])
            given[grid.first + place] = GridShare(found, place, rows_of(part), slice(wanted, end))
            wanted = end
    return given


def flat_index(grid: Grid, rows: int) -> NDArray[np.int64]:
    """The rows that are wanted, all slots' rows behind each other, `rows` of each."""
    return np.concatenate(
        [
            part[graph_io.LOGITS_INDEX] + place * rows
            for place, part in enumerate(grid.parts)
            if part is not None
        ]
    )
