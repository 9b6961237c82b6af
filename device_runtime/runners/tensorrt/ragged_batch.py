"""Passes of several sequences over one cache: their rows stand one after the other.

A table gives kernels the place of each sequence, in the pass and in the cache; see
`kernels/triton/cache.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.device_runtime.kernels.triton.catalog import SEQUENCES
from edgellm.device_runtime.runners.batch_costs import SharedCosts
from edgellm.device_runtime.runners.outputs import Outputs

Inputs = Mapping[str, NDArray[Any]]
FIELDS = 5  # of a sequence: first row, rows, its row 0 in the cache, rows there, mask columns
SHAPE = SEQUENCES, FIELDS  # of `graph_io.SEQUENCES`, as these kernels take it
_MAX_TREES = 128  # rows of all trees of a pass, where one tree has fewer
_ASSUMED = 1.0  # cost of any pass: reading the weights
_BEHIND = graph_io.INPUT_IDS, graph_io.POSITION_IDS


def shared_rows(tree_rows: int, num_sequences: int) -> int:
    """Rows of a pass that get logits or candidates at most, where sequences share passes."""
    return max(tree_rows, num_sequences, min(num_sequences * tree_rows, _MAX_TREES))


def rows_of(inputs: Inputs) -> int:
    """Of a sequence in a pass."""
    return inputs[graph_io.INPUT_IDS].shape[1]


def groups(
    parts: Sequence[Inputs], max_rows: int, max_requested: int, costs: SharedCosts | None = None
) -> list[slice]:
    """The passes of parts that cost the least together.

    Args:
        parts: in their order, which passes keep.
        max_rows: of a pass.
        max_requested: of its rows.
        costs: of forward passes; None: not measured, then as few passes as possible.
    """
    sizes = tuple((rows_of(part), len(part[graph_io.LOGITS_INDEX])) for part in parts)
    return _cheapest(sizes, max_rows, max_requested, costs)


@functools.lru_cache(maxsize=1024)  # most passes are of as many rows as the one before
def _cheapest(
    sizes: tuple[tuple[int, int], ...],
    max_rows: int,
    max_requested: int,
    costs: SharedCosts | None,
) -> list[slice]:
    best: list[tuple[float, int]] = [(0.0, 0)]  # of the first parts, and where their last begins
    for end in range(1, len(sizes) + 1):
        rows = wanted = 0
        ways: list[tuple[float, int]] = []
        for begin in reversed(range(end)):
            rows, wanted = rows + sizes[begin][0], wanted + sizes[begin][1]
            if ways and (rows > max_rows or wanted > max_requested):
                break
            cost = _ASSUMED if costs is None else costs.of(end - begin, rows)
            ways.append((best[begin][0] + cost, begin))
        best.append(min(ways))
    found: list[slice] = []
    end = len(sizes)
    while end:
        found.append(slice(best[end][1], end))
        end = best[end][1]
    return found[::-1]


def joined(parts: Sequence[Inputs], bases: Sequence[int]) -> dict[str, NDArray[Any]]:
    """Inputs of one pass for all parts.

    Args:
        parts: by contract name; rows without a mask see all before them.
        bases: the cache's row that is row 0 of each.
    """
    sequences, first = np.zeros(SHAPE, np.int64), 0
    columns = max(_columns(part) for part in parts)
    mask = np.zeros((sum(map(rows_of, parts)), max(columns, 1)), np.bool_)
    wanted: list[NDArray[np.int64]] = []
    for at, (part, base) in enumerate(zip(parts, bases, strict=True)):
        rows, wide = rows_of(part), _columns(part)
        sequences[at] = first, rows, base, part[graph_io.WRITE_INDEX][0], wide
        if wide:
            mask[first : first + rows, :wide] = part[graph_io.TREE_MASK]
        wanted.append(part[graph_io.LOGITS_INDEX] + first)
        first += rows
    found = {
        name: np.concatenate([part[name] for part in parts], axis=1)
        for name in _BEHIND
        if name in parts[0]
    }
    found |= {graph_io.SEQUENCES: sequences, graph_io.TREE_MASK: mask}
    found[graph_io.LOGITS_INDEX] = np.concatenate(wanted)
    if graph_io.ADAPTER in parts[0]:
        own = [part[graph_io.ADAPTER][0] for part in parts]
        found[graph_io.ADAPTER_ROWS] = np.repeat(own, [rows_of(part) for part in parts])
    if graph_io.DRAFT_HIDDEN in parts[0]:  # rows that stay on the device are joined in one way
        hidden = np.concatenate([part[graph_io.DRAFT_HIDDEN][0] for part in parts])
        found[graph_io.DRAFT_HIDDEN] = hidden[None]
    if graph_io.TOP_K in parts[0]:
        found[graph_io.TOP_K] = np.max([part[graph_io.TOP_K] for part in parts], axis=0)
    return found


def _columns(part: Inputs) -> int:
    return part[graph_io.TREE_MASK].shape[1] if graph_io.TREE_MASK in part else 0


class Share(Mapping[str, NDArray[Any]]):
    """What a part gets of a pass."""

    def __init__(self, found: Outputs, rows: slice, wanted: slice) -> None:
        self._found, self._rows, self._wanted = found, rows, wanted

    def __contains__(self, name: object) -> bool:
        return name in self._found

    def __getitem__(self, name: str) -> NDArray[Any]:
        own = self._rows if name == graph_io.HIDDEN_TAPS else self._wanted
        return self._found[name][0][own][None]  # rows that stay on the device take no two keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def shares(found: Outputs, parts: Sequence[Inputs]) -> list[Outputs]:
    """The outputs of a pass for all parts, one for each."""
    given: list[Outputs] = []
    rows = wanted = 0
    for part in parts:
        next_rows, next_wanted = rows + rows_of(part), wanted + len(part[graph_io.LOGITS_INDEX])
        given.append(Share(found, slice(rows, next_rows), slice(wanted, next_wanted)))
        rows, wanted = next_rows, next_wanted
    return given
