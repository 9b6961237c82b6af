"""Timing passes on this machine; a tree is sized by what they cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

MEASURED_ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXT_ROWS = 512
CANDIDATES = 10  # of a row
_REPEATS = 7


def fastest_ms(run: Callable[[], object], repeats: int = _REPEATS) -> float:
    """Time of the fastest call after one that is not counted: what else runs only adds to it."""
    return fastest_each_ms({"": run}, repeats)[""]


def fastest_each_ms(
    runs: Mapping[str, Callable[[], object]],
    repeats: int = _REPEATS,
    before: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """The same of several, in turns: what else runs then slows all of them, and none all the time.

    Args:
        runs: calls by name.
        repeats: timed calls of each.
        before: is called before each, untimed.
    """
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for name, run in [*runs.items()] * repeats:
        before()
        start = time.perf_counter()
        run()
        samples[name].append((time.perf_counter() - start) * 1e3)
    return {name: round(min(times), 4) for name, times in samples.items()}


def measured_rows(capacity: int, most_rows: int) -> tuple[int, list[int]]:
    """A context that half fills a cache at most, and rows of the passes to measure behind it.

    Args:
        capacity: rows of the cache.
        most_rows: of a pass; 0: any number.
    """
    context = min(CONTEXT_ROWS, capacity // 2)
    most = min(capacity - context, most_rows or capacity)
    return context, [rows for rows in MEASURED_ROWS if rows <= most]
