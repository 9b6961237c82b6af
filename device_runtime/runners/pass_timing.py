"""Times forward passes on this machine within a budget; the times choose tree sizes.

Sizes are timed once in ascending order while the budget lasts; the rest of it goes to repeats.
Untimed sizes are extrapolated and have the type `EstimatedMs`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise

MEASURED_ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXT_ROWS = 512
CANDIDATES = 10  # of a token
BUDGET_S = 5.0  # for all timing of a build
_CALLS = 8  # maximum per size; the first is usually a warm-up
_STABLE_CALLS, _STABLE = 3, 0.02  # minimum calls, and relative difference of the two fastest
_SAME = 1.25  # slopes with a smaller ratio count as equal
_MARGIN = 1.25  # safety factor on the predicted time of a larger call


class EstimatedMs(float):
    """Milliseconds that were extrapolated from passes of fewer tokens, not measured."""

    __slots__ = ()


class Budget:
    """A time budget of measurements; the clock starts with the object."""

    def __init__(self, seconds: float = BUDGET_S) -> None:
        self._end_s = time.perf_counter() + seconds

    @property
    def left_s(self) -> float:
        """Remaining seconds."""
        return max(self._end_s - time.perf_counter(), 0.0)

    def part(self, share: float) -> Budget:
        """A budget of a share of the remaining time; unused time remains in this one."""
        return Budget(self.left_s * share)


def fastest_each_ms(
    runs: Mapping[str, Callable[[], object]],
    budget: Budget | None = None,
    before: Callable[[], object] = lambda: None,
    tokens: Callable[[str], int] = int,
) -> dict[str, float]:
    """Time of the fastest call of each size, since other load only adds to a time.

    Repeats are interleaved, so other load slows all sizes alike.

    Args:
        runs: calls by name.
        budget: None: a new one. The smallest call runs once in any case.
        before: called before each call, untimed.
        tokens: number of tokens that a named call computes.

    Returns:
        Milliseconds by name, in ascending order of tokens. Calls that exceed the budget are
        missing.
    """
    budget = budget or Budget()
    samples: dict[str, list[float]] = {}
    took_s: dict[str, float] = {}  # the latest call, `before` included

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

    The slope of the last two sizes, if the slope before is equal and tokens take most of the time.
    Otherwise weight loads hide the cost of tokens, and the result is the upper bound: the time per
    token of the largest pass. So a large tree is never estimated too cheap.
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
    """Milliseconds of passes by tokens; sizes that exceed the budget are estimated."""
    wanted = [*rows]
    runs = {str(each): (lambda each=each: run(each)) for each in wanted}
    return with_estimates(fastest_each_ms(runs, budget, before), wanted)


def estimated_sizes(cost_ms: Mapping[str, Mapping[str, float]]) -> dict[str, list[int]]:
    """Estimated, not measured sizes by kind of pass."""
    found = {
        kind: [int(size) for size, ms in costs.items() if isinstance(ms, EstimatedMs)]
        for kind, costs in cost_ms.items()
    }
    return {kind: sizes for kind, sizes in found.items() if sizes}


def measured_rows(capacity: int, max_rows: int) -> tuple[int, list[int]]:
    """A context length of at most half a cache, and sizes of the passes to measure after it.

    Args:
        capacity: positions of the cache.
        max_rows: maximum tokens of a pass; 0: unlimited.
    """
    context = min(CONTEXT_ROWS, capacity // 2)
    maximum = min(capacity - context, max_rows or capacity)
    return context, [rows for rows in MEASURED_ROWS if rows <= maximum]
