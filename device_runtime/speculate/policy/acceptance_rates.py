"""Acceptance rates by the draft's confidence, learned at runtime.

A draft's probabilities are biased. Greedy decoding accepts its top token more often than the
draft's softmax predicts; unfamiliar text less often. These rates choose the tree's size.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

import numpy as np

from edgellm.device_runtime.speculate.tree import F64

_EDGES = (0.0, 0.01, 0.03, 0.08, 0.15, 0.25, 0.4, 0.55, 0.7, 0.85, 0.95)
_CENTERS = tuple((low + high) / 2 for low, high in zip(_EDGES, (*_EDGES[1:], 1.0), strict=True))
_LEAST, _HEAVIEST = 1e-4, 1e9


class Calibration:
    """Acceptance rates by the draft's confidence, as lists, which are faster for few numbers."""

    def __init__(self, *, prior_weight: float = 12.0, memory: float = 2000.0) -> None:
        """Start with the draft's own probabilities as the prior.

        Args:
            prior_weight: weight of the prior, in observations per bin.
            memory: rounds after which an observation has 1/e of its weight.
        """
        self._tried = [prior_weight] * len(_EDGES)
        self._accepted = [center * prior_weight for center in _CENTERS]
        # Instead of a decay of old counts, new ones get a growing weight; rates are the same.
        self._weight, self._growth = 1.0, 1 / (1 - 1 / memory)
        self._own = [_log_rate(center) for center in _CENTERS]  # of each bin
        self._log_rates = self._own  # made monotone over bins

    def log_rates(self, confidences: F64) -> F64:
        """Log of the acceptance rate of tokens with these draft probabilities, any shape."""
        return np.interp(confidences, _CENTERS, self._log_rates)

    def log_rate(self, confidence: float) -> float:
        """As `log_rates`, of one token."""
        above = bisect.bisect(_CENTERS, confidence)
        if above in (0, len(_CENTERS)):
            return self._log_rates[min(above, len(_CENTERS) - 1)]
        low, high = _CENTERS[above - 1 : above + 1]
        share = (confidence - low) / (high - low)
        return self._log_rates[above - 1] * (1 - share) + self._log_rates[above] * share

    @property
    def curve(self) -> F64:
        """[2, points]: confidences, and `log_rates` of them."""
        return np.array([_CENTERS, self._log_rates])

    def learn(self, confidences: Sequence[float], accepted: Sequence[bool]) -> None:
        """Update the rates with tokens whose parent was accepted: was the token accepted too?"""
        self._weight *= self._growth
        if self._weight > _HEAVIEST:
            self._tried = [count / self._weight for count in self._tried]
            self._accepted = [count / self._weight for count in self._accepted]
            self._weight = 1.0
        for confidence, is_accepted in zip(confidences, accepted, strict=True):
            place = bisect.bisect(_EDGES, confidence) - 1
            self._tried[place] += self._weight
            if is_accepted:
                self._accepted[place] += self._weight
            self._own[place] = _log_rate(self._accepted[place] / self._tried[place])
        self._log_rates = [*itertools.accumulate(self._own, max)]


def _log_rate(rate: float) -> float:
    return math.log(min(max(rate, _LEAST), 1 - _LEAST))
