"""Timing forward passes on this machine within some seconds; a tree is sized by what they cost.

Sizes are timed in ascending order, each once while the seconds last; what is left goes to
repeats. Sizes that were not timed are extrapolated, and marked by their type.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise

MEASURED_ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXT_ROWS = 512
CANDIDATES = 10  # of a row
BUDGET_S = 5.0  # of all timing of a build
_CALLS = 8  # of one size at most, the first of which is a warm-up as a rule
_STABLE_CALLS, _STABLE = 3, 0.02  # calls, and how near the two fastest are to each other
_SAME = 1.25  # slopes that differ by less are one
_MARGIN = 1.25  # a call may take longer than one of fewer tokens foretells


class EstimatedMs(float):
    """Milliseconds that were extrapolated from passes of fewer tokens, not measured."""

    __slots__ = ()


class Budget:
    """Seconds that measurements may take together; the clock runs from the start."""

    def __init__(self, seconds: float = BUDGET_S) -> None:
        self._end_s = time.perf_counter() + seconds

    @property
    def left_s(self) -> float:
        """What is left."""
        return max(self._end_s - time.perf_counter(), 0.0)

    def part(self, share: float) -> Budget:
        """A share of what is left; what it does not use stays."""
        return Budget(self.left_s * share)


def fastest_each_ms(
    runs: Mapping[str, Callable[[], object]],
    budget: Budget | None = None,
    before: Callable[[], object] = lambda: None,
    tokens: Callable[[str], int] = int,
) -> dict[str, float]:
    """Time of the fastest call of each: what else runs only adds to it.

    Calls are repeated in turns: what else runs then slows all of them, and none all the time.

    Args:
        runs: calls by name.
        budget: None: one of its own. The smallest call is made once whatever it says.
        before: is called before each, untimed.
        tokens: that a call of a name computes.

    Returns:
        Milliseconds by name, in ascending order of tokens; larger calls that the budget does not
        allow are missing.
    """
    budget = budget or Budget()
    samples: dict[str, list[float]] = {}
    took_s: dict[str, float] = {}  # the latest call, with what goes before it

    def call(name: str) -> None:
        begun = time.perf_counter()
        before()
        start = time.perf_counter()
        runs[name]()
        end = time.perf_counter()
        samples.setdefault(name, []).append((end - start) * 1e3)
        took_s[name] = end - begun

    smaller = ""
    for name in sorted(runs, key=tokens):
        growth = tokens(name) / tokens(smaller) if smaller else 0.0
        if smaller and _MARGIN * growth * took_s[smaller] > budget.left_s:
            break
        call(name)
        smaller = name
    for _ in range(_CALLS - 1):
        for name in [each for each, found in samples.items() if not _is_stable(found)]:
            if _MARGIN * took_s[name] <= budget.left_s:
                call(name)
    return {name: round(min(found), 4) for name, found in samples.items()}


def _is_stable(samples: list[float]) -> bool:
    if len(samples) < _STABLE_CALLS:
        return False
    first, second = sorted(samples)[:2]
    return second - first <= _STABLE * first


def with_estimates(measured: Mapping[str, float], wanted: Iterable[int]) -> dict[str, float]:
    """Milliseconds of all wanted numbers of tokens, ascending; `EstimatedMs` beyond the measured.

    More tokens never take less: what seems to was disturbed, which only adds.

    Args:
        measured: by tokens, at least one.
        wanted: tokens; those between measured ones were measured.
    """
    sizes = sorted(map(int, measured))
    times = [min(measured[str(each)] for each in sizes[at:]) for at in range(len(sizes))]
    last, slope = sizes[-1], _slope(sizes, times)
    found = {str(size): ms for size, ms in zip(sizes, times, strict=True)}
    for size in sorted(each for each in wanted if each > last):
        found[str(size)] = EstimatedMs(round(times[-1] + slope * (size - last), 4))
    return found


def _slope(sizes: list[int], times: list[float]) -> float:
    """Milliseconds that a further token adds.

    That of the last two sizes where it was so before, and tokens take most of the time. Else
    reading weights hides what tokens cost, and it is the maximum that they can: each as much as one
    of the largest pass. So a large tree never seems cheaper than it is.
    """
    maximum = times[-1] / sizes[-1]
    points = list(zip(sizes, times, strict=True))[-3:]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(points)]
    if len(slopes) < 2 or 2 * slopes[1] * sizes[-1] < times[-1] or slopes[1] > _SAME * slopes[0]:
        return maximum
    return slopes[1]


def timed_by_rows(
    run: Callable[[int], object],
    rows: Iterable[int],
    budget: Budget | None = None,
    before: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Milliseconds of passes by their rows; what the budget does not allow is estimated."""
    wanted = [*rows]
    runs = {str(each): (lambda each=each: run(each)) for each in wanted}
    return with_estimates(fastest_each_ms(runs, budget, before), wanted)


def estimated_sizes(cost_ms: Mapping[str, Mapping[str, float]]) -> dict[str, list[int]]:
    """What was not measured: sizes by kind of pass."""
    found = {
        kind: [int(size) for size, ms in costs.items() if isinstance(ms, EstimatedMs)]
        for kind, costs in cost_ms.items()
    }
    return {kind: sizes for kind, sizes in found.items() if sizes}


def measured_rows(capacity: int, max_rows: int) -> tuple[int, list[int]]:
    """A context that half fills a cache at most, and rows of the passes to measure behind it.

    Args:
        capacity: rows of the cache.
        max_rows: of a pass; 0: any number.
    """
    context = min(CONTEXT_ROWS, capacity // 2)
    maximum = min(capacity - context, max_rows or capacity)
    return context, [rows for rows in MEASURED_ROWS if rows <= maximum]
