"""How often the base accepts a token that the draft is so and so sure of, learned while running.

A draft's probabilities are biased: greedy decoding accepts its favourite more often than the
draft's softmax says, unfamiliar text less often. The tree's size is chosen by these rates.
"""

from __future__ import annotations

import numpy as np

from edgellm.device_runtime.sessions import I64
from edgellm.device_runtime.speculate.tree import F64

_EDGES = np.array([0.0, 0.01, 0.03, 0.08, 0.15, 0.25, 0.4, 0.55, 0.7, 0.85, 0.95])
_LEAST = 1e-4


class Calibration:
    """Acceptance rates by the draft's confidence."""

    def __init__(self, *, prior_weight: float = 12.0, memory: float = 2000.0) -> None:
        """The prior takes the draft at its word, for `prior_weight` observations a bin.

        Args:
            prior_weight: observations that the prior counts for.
            memory: rounds after which old observations have faded to a third.
        """
        centers = (_EDGES + np.append(_EDGES[1:], 1.0)) / 2
        self._tried = np.full(len(_EDGES), prior_weight)
        self._accepted = centers * prior_weight
        self._centers, self._fade = centers, 1 - 1 / memory
        self._refresh()

    def _refresh(self) -> None:
        rates = self._accepted / self._tried
        self._log_rates = np.log(np.clip(np.maximum.accumulate(rates), _LEAST, 1 - _LEAST))

    def log_rates(self, confidences: F64) -> F64:
        """Log of the acceptance rate of tokens with these draft probabilities, any shape."""
        return np.interp(confidences, self._centers, self._log_rates)

    @property
    def curve(self) -> F64:
        """[2, points]: confidences, and `log_rates` of them."""
        return np.stack([self._centers, self._log_rates])

    def learn(self, confidences: F64, accepted: I64) -> None:
        """Count tokens whose parent was accepted: [M] and 1 where the token was too."""
        bins = np.searchsorted(_EDGES, confidences, side="right") - 1
        self._tried *= self._fade
        self._accepted *= self._fade
        np.add.at(self._tried, bins, 1.0)
        np.add.at(self._accepted, bins, accepted)
        self._refresh()
