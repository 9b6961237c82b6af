"""Batches padded to rectangles: equally many tokens for each slot of the KV cache.

A pass over a part of the batch begins at slot 0, so few different passes occur. A single sequence
uses only its own slot. Shorter sequences are padded at the end.
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
MAX_JOINED = 64  # maximum tokens of a sequence in a batch, padding included
# Cost of a pass by batch size and total tokens, in the caller's unit
Cost = Callable[[int, int], float]
_ROWS_OF_WEIGHTS = 64  # tokens that cost as much as loading all weights, without measurements


@dataclass(frozen=True, slots=True)
class Grid:
    """One padded pass over consecutive slots."""

    first: int  # slot
    parts: tuple[Inputs | None, ...]  # inputs of the slots; None: the slot is idle
    ends: tuple[int, ...]  # positions in each slot before the pass

    @property
    def some(self) -> Inputs:
        """The inputs of one part; all parts have the same names."""
        return next(part for part in self.parts if part is not None)

    @property
    def adapters(self) -> list[int]:
        """The adapters of the parts; 0: none."""
        names = (part or {} for part in self.parts)
        return [int(part[graph_io.ADAPTER][0]) if graph_io.ADAPTER in part else 0 for part in names]

    @property
    def rows(self) -> int:
        """Maximum tokens of a sequence."""
        return max(rows_of(part) for part in self.parts if part is not None)

    @property
    def outputs(self) -> int:
        """Total tokens with logits or candidates."""
        return sum(len(part[graph_io.LOGITS_INDEX]) for part in self.parts if part is not None)

    @property
    def end(self) -> int:
        """The largest of `ends`."""
        return max(self.ends)


def rows_of(inputs: Inputs) -> int:
    """Number of tokens of a sequence in a pass."""
    return inputs[graph_io.INPUT_IDS].shape[1]


def lone(inputs: Inputs, slot: int = 0) -> Grid:
    """A pass of one sequence."""
    return Grid(slot, (inputs,), (int(inputs[graph_io.WRITE_INDEX][0]),))


def assumed_cost(sequences: int, rows: int) -> float:
    """Estimated cost of a pass, in tokens: each pass loads all weights."""
    del sequences
    return _ROWS_OF_WEIGHTS + rows


def arrange(
    parts: Mapping[int, Inputs], ends: Sequence[int], maximum: int, cost: Cost = assumed_cost
) -> list[Grid]:
    """Split a batch into the passes with the minimum total cost.

    Args:
        parts: inputs by slot.
        ends: positions in all slots.
        maximum: number of slots.
        cost: cost of passes.
    """
    classes: dict[int, list[int]] = {}  # slots by rows, padded
    for slot in sorted(parts, key=lambda slot: -rows_of(parts[slot])):
        classes.setdefault(bucket_of(rows_of(parts[slot])), []).append(slot)
    sizes = list(classes)
    best: list[tuple[float, list[list[int]]]] = [(0, [])]  # by number of first classes
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
    """The cost of a group and its passes: one batch, or one pass for each sequence."""
    single = sum(cost(1, rows_of(parts[slot])) for slot in slots)
    batch = batch_of(max(slots) + 1, maximum)
    batched = cost(batch, batch * size)
    if len(slots) == 1 or size > MAX_JOINED or single < batched:
        return single, [[slot] for slot in slots]
    return batched, [slots]


def batch_of(slots: int, maximum: int) -> int:
    """Padded number of slots of a pass: 2, 4, 8 ... or all."""
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
    """A part's outputs of a pass."""

    def __init__(
        self, *, found: Mapping[str, NDArray[Any]], place: int, rows: int, wanted: slice
    ) -> None:
        self._found, self._place, self._rows, self._wanted = found, place, rows, wanted

    def __contains__(self, name: object) -> bool:
        return name in self._found

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name == graph_io.HIDDEN_TAPS:  # of all tokens
            return self._found[name][self._place : self._place + 1, : self._rows]
        return self._found[name][:, self._wanted]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def shares(found: Mapping[str, NDArray[Any]], grid: Grid) -> dict[int, GridShare]:
    """The outputs of each active slot."""
    given: dict[int, GridShare] = {}
    wanted = 0
    for place, part in enumerate(grid.parts):
        if part is not None:
            end = wanted + len(part[graph_io.LOGITS_INDEX])
            given[grid.first + place] = GridShare(
                found=found, place=place, rows=rows_of(part), wanted=slice(wanted, end)
            )
            wanted = end
    return given


def flat_index(grid: Grid, rows: int) -> NDArray[np.int64]:
    """Indices of the output tokens among the concatenated slots, `rows` tokens each."""
    return np.concatenate(
        [
            part[graph_io.LOGITS_INDEX] + place * rows
            for place, part in enumerate(grid.parts)
            if part is not None
        ]
    )
