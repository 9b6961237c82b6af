"""Confidence intervals by bootstrap over questions (Efron 1979), paired by question."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import msgspec
import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
RESAMPLES, LEVEL, _SEED = 4000, 0.95, 0


class Interval(msgspec.Struct, frozen=True):
    """An estimate and its percentile interval; None instead of NaN."""

    value: float
    low: float | None = None
    high: float | None = None


def bootstrap(
    columns: Sequence[Sequence[float]], statistic: Callable[[F64], F64]
) -> Interval | None:
    """Return a statistic over all questions with its 95 % interval; None if it is undefined.

    Args:
        columns: values per question, [C][N].
        statistic: function of sums over questions [C, R] to values [R].
    """
    table = np.asarray(columns, np.float64)
    if not table.size:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(table.sum(1)[:, None])[0])
        if not math.isfinite(value):
            return None
        count = table.shape[1]
        if count < 2:
            return Interval(value)
        drawn = np.random.default_rng(_SEED).multinomial(
            count, np.full(count, 1 / count), RESAMPLES
        )
        values = statistic(table @ drawn.T)
    values = values[np.isfinite(values)]
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(value, float(low), float(high))


def mean_of(values: Sequence[float]) -> Interval | None:
    """Return the mean over questions."""
    return bootstrap([values, [1.0] * len(values)], lambda sums: sums[0] / sums[1])


def share_of(values: Sequence[float]) -> Interval | None:
    """Return the mean of ones and zeros with Wilson's interval (1927).

    The bootstrap interval of equal values would be empty. For other values, see `mean_of`.
    """
    if not values or not set(values) <= {0.0, 1.0}:
        return mean_of(values)
    count, share, z = len(values), sum(values) / len(values), NormalDist().inv_cdf((1 + LEVEL) / 2)
    weight = 1 + z * z / count
    centre = (share + z * z / (2 * count)) / weight
    half = z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2) / weight
    return Interval(share, max(centre - half, 0.0), min(centre + half, 1.0))


def ratio_of(parts: Sequence[float], wholes: Sequence[float]) -> Interval | None:
    """Return the ratio of two sums, such as tokens over rounds."""
    return bootstrap([parts, wholes], lambda sums: sums[0] / sums[1])


def rate_ratio(
    parts: tuple[Sequence[float], Sequence[float]], wholes: tuple[Sequence[float], Sequence[float]]
) -> Interval | None:
    """Return the ratio of the second rate to the first, both over the same questions."""
    columns = [parts[0], wholes[0], parts[1], wholes[1]]
    return bootstrap(columns, lambda sums: (sums[2] / sums[3]) / (sums[0] / sums[1]))
