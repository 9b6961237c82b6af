"""Costs of batched passes by batch size and tokens: measured points, interpolated."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from edgellm.core.graph_roles import shared_kind, shared_kinds
from edgellm.device_runtime.runners.pass_timing import (
    MEASURED_ROWS,
    Budget,
    fastest_each_ms,
    with_estimates,
)

F64 = NDArray[np.float64]
_MAX_MEASURED = 512  # tokens of a batch; larger batches are extrapolated linearly


class SharedCosts:
    """Milliseconds of batched passes in which sequences have about equally many tokens."""

    def __init__(self, measured: Mapping[int, Mapping[str, float]]) -> None:
        """Args: `measured`, by batch size, then by tokens of each sequence."""
        self._measured = [
            (count, _ascending({int(rows): ms for rows, ms in measured[count].items()}))
            for count in sorted(measured)
        ]
        self._tables: dict[int, F64] = {}

    @classmethod
    def find(cls, kind: str, cost_ms: Mapping[str, Mapping[str, float]]) -> SharedCosts | None:
        """The costs of a kind of pass among measured ones; None: not measured."""
        kinds = shared_kinds(kind, cost_ms)
        return cls({count: cost_ms[name] for count, name in kinds.items()}) if kinds else None

    def of(self, sequences: int, rows: int) -> float:
        """Cost of a pass with `sequences`, which have `rows` tokens in total."""
        table = self.by_rows(sequences)
        last = len(table) - 1
        beyond = max(rows - last, 0) * float(table[last] - table[last - 1])
        return float(table[min(rows, last)]) + beyond

    def by_rows(self, sequences: int) -> F64:
        """Costs of passes with `sequences`, by total tokens (index)."""
        if sequences not in self._tables:
            each = np.arange(_MAX_MEASURED + 1) / sequences
            counts = [count for count, _ in self._measured]
            tables = np.array([_line(*points, each) for _, points in self._measured])
            tables = np.maximum.accumulate(tables)  # more sequences never take less
            if len(counts) > 1:
                at = min(bisect.bisect_right(counts, sequences), len(counts) - 1)
                first, step = tables[at - 1], tables[at] - tables[at - 1]
                part = (sequences - counts[at - 1]) / (counts[at] - counts[at - 1])
                self._tables[sequences] = first + part * step
            else:
                self._tables[sequences] = tables[0]
        return self._tables[sequences]


def measure_shared(
    kind: str,
    maximum: int,
    room: tuple[int, int],
    run: Callable[[int, int], object],
    budget: Budget | None = None,
) -> dict[str, dict[str, float]]:
    """Measure passes of 1, 2, 4 ... `maximum` sequences, by kind and tokens of each.

    If the budget ends early, numbers of tokens are estimated and batch sizes are omitted.

    Args:
        kind: the kind of passes with one sequence.
        maximum: maximum batch size.
        room: maximum tokens of a sequence, and of all.
        run: runs a pass with a batch size and tokens of each sequence.
        budget: None: a new one.
    """
    runs = {
        f"{count} {rows}": partial(run, count, rows)
        for count in _counts(maximum)
        for rows in MEASURED_ROWS
        if rows == 1 or (rows <= room[0] and count * rows <= min(room[1], _MAX_MEASURED))
    }
    found: dict[str, dict[str, float]] = {}
    for name, ms in fastest_each_ms(runs, budget, tokens=_tokens).items():
        count, rows = name.split()
        found.setdefault(count, {})[rows] = ms
    wanted = {count: [int(n.split()[1]) for n in runs if n.split()[0] == count] for count in found}
    return {
        shared_kind(kind, int(count)): with_estimates(times, wanted[count])
        for count, times in found.items()
    }


def _tokens(name: str) -> int:
    """Total tokens of a pass."""
    count, rows = name.split()
    return int(count) * int(rows)


def _counts(maximum: int) -> Iterator[int]:
    count = 1
    while count < maximum:
        yield count
        count *= 2
    yield maximum


def _ascending(measured: Mapping[int, float]) -> tuple[list[int], F64]:
    """Tokens and times, made monotone: noise only adds to a measurement."""
    rows = sorted(measured)
    return rows, np.minimum.accumulate([measured[each] for each in reversed(rows)])[::-1]


def _line(places: list[int], values: F64, at: F64 | NDArray[np.int64]) -> F64:
    """Linear interpolation; after the last point with the last slope."""
    if len(places) == 1:
        return np.full(len(at), values[0])
    slope = (values[-1] - values[-2]) / (places[-1] - places[-2])
    return np.interp(at, places, values) + np.maximum(at - places[-1], 0) * slope
