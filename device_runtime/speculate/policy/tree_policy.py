"""Tree policies: the size of draft trees by cost and acceptance.

Let lambda be the throughput in tokens per millisecond. A token that adds dt to a pass pays if its
acceptance probability exceeds lambda * dt. By this rule drafting stops and the tree is pruned. A
tree of the root alone is plain decoding. Renewal theory: maximizing expected tokens minus lambda
times cost in every round maximizes the long-run rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from edgellm.device_runtime.arrays import I64
from edgellm.device_runtime.speculate.policy.acceptance_rates import Calibration
from edgellm.device_runtime.speculate.policy.costs import Costs
from edgellm.device_runtime.speculate.policy.spec_gate import SpecGate
from edgellm.device_runtime.speculate.tree import F64, CandidatePool, top

_MEMORY = 0.03  # weight of the newest round in the running mean


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLimits:
    """Upper bounds of trees, from the user's flags."""

    top_k: int = 10  # maximum children of a node
    steps: int = 6  # maximum levels from a network
    verify_size: int = 60  # nodes, root included
    static_rows: int | None = None  # nodes with children, of a static tree
    text_steps: int = 16  # maximum levels from lookups, which cost no passes of a network

    @property
    def round_rows(self) -> int:
        """Maximum tokens that a round commits."""
        return 1 + max(self.steps, self.text_steps)

    @property
    def draft_rows(self) -> int:
        """Maximum tokens that a network computes for a tree."""
        return self.top_k * self.steps if self.static_rows is None else self.static_rows

    @property
    def pool_size(self) -> int:
        """Maximum candidates of a round."""
        if self.static_rows is not None:
            return 1 + self.top_k * (1 + self.static_rows)
        return 1 + self.top_k + (self.steps - 1) * self.top_k * self.top_k


class Policy(Protocol):
    """Chooses the nodes to expand and the nodes to verify."""

    def scores(self, log_probs: F64) -> F64:
        """Log of the acceptance rate for the draft's `log_probs`, any shape."""
        ...

    @property
    def curve(self) -> F64 | None:
        """`scores` as a curve, see `Calibration.curve`; None: the logarithm."""
        ...

    def frontier(self, pool: CandidatePool, newest: I64, prices: F64) -> I64:
        """Select the `newest` nodes that get children; none to stop.

        Args:
            pool: all candidates of the round.
            newest: the nodes of the latest level.
            prices: milliseconds of a pass for 1, 2, ... of them; the length is the maximum.
        """
        ...

    def select(self, pool: CandidatePool, room: int) -> I64:
        """Select the drafted nodes to verify, at most `room`; parents are included."""
        ...

    def pays(self, chances: Iterable[float]) -> bool:
        """Whether verifying a chain with these acceptance probabilities pays."""
        ...

    def learn(self, confidences: Sequence[float], accepted: Sequence[bool]) -> None:
        """Record the outcome of verified nodes whose parent was accepted."""
        ...


class FixedTree:
    """The dynamic tree of EAGLE-2 (arXiv 2406.16858): always the same size."""

    curve = None

    def __init__(self, limits: TreeLimits) -> None:
        self._limits = limits

    def scores(self, log_probs: F64) -> F64:
        """The draft's own log-probabilities."""
        return log_probs

    def frontier(self, pool: CandidatePool, newest: I64, prices: F64) -> I64:
        """The best `top_k` of the newest level."""
        return newest[top(pool.scores[newest], min(self._limits.top_k, len(prices)))]

    def select(self, pool: CandidatePool, room: int) -> I64:
        """The best of the whole pool."""
        return pool.ranked()[:room]

    def pays(self, chances: Iterable[float]) -> bool:
        """Always."""
        del chances
        return True

    def learn(self, confidences: Sequence[float], accepted: Sequence[bool]) -> None:
        """Learn nothing."""


class CostAwareTree:
    """Expands and verifies nodes that pay, by measured costs and learned acceptance rates."""

    def __init__(
        self, *, limits: TreeLimits, costs: Costs, calibration: Calibration, controller: SpecGate
    ) -> None:
        self._limits, self._costs, self._calibration = limits, costs, calibration
        self._controller = controller
        self._best_child = 0.6  # running mean of the likeliest child's acceptance rate

    def scores(self, log_probs: F64) -> F64:
        """The calibrated log-probabilities."""
        return self._calibration.log_rates(np.exp(log_probs))

    @property
    def curve(self) -> F64:
        """The curve of the calibration."""
        return self._calibration.curve

    def frontier(self, pool: CandidatePool, newest: I64, prices: F64) -> I64:
        """The nodes whose likeliest child pays for its draft and verification."""
        scores = pool.scores[newest].tolist()
        order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        rate, gain, maximum, count = self._controller.rate, 0.0, 0.0, 0
        verify = self._controller.verify
        last = min(len(verify) - 1, 8)
        # Cost of one more verified token in a tree of medium size.
        row_ms = (verify[last] - verify[2]) / max(last - 2, 1)
        allowed = order[: min(self._limits.top_k, len(prices))]
        for size, place in enumerate(allowed, start=1):
            more = math.exp(scores[place]) * self._best_child - rate * row_ms
            if more <= 0:  # later nodes do not pay either, since prices never fall
                break
            gain += more
            if gain - rate * prices[size - 1] > maximum:
                maximum, count = gain - rate * prices[size - 1], size
        return newest[order[:count]]

    def select(self, pool: CandidatePool, room: int) -> I64:
        """The size with the maximum of expected tokens minus the price of the pass."""
        verify = self._controller.verify
        ranked = pool.ranked()[: min(room, len(verify) - 2)]
        rate, expected, count = self._controller.rate, 0.0, 0
        maximum = rate * (self._costs.tree_ms - verify[1])  # root alone: no tree_ms
        for size, score in enumerate(pool.scores[ranked].tolist(), start=1):
            expected += math.exp(score)
            value = expected - rate * verify[size + 1]
            if value > maximum:
                maximum, count = value, size
        return ranked[:count]

    def pays(self, chances: Iterable[float]) -> bool:
        """As `select`, for a single chain."""
        verify, rate = self._controller.verify, self._controller.rate
        won = -rate * (self._costs.host_ms + self._costs.tree_ms)
        for rows, chance in enumerate(chances, start=2):
            row_ms = verify[rows] - verify[rows - 1] if rows < len(verify) else math.inf
            if chance <= rate * row_ms:
                return False
            won += chance - rate * row_ms
            if won > 0:
                return True
        return False

    def learn(self, confidences: Sequence[float], accepted: Sequence[bool]) -> None:
        """Update the calibration."""
        self._calibration.learn(confidences, accepted)
        if len(confidences):
            rate = math.exp(self._calibration.log_rate(max(confidences)))
            self._best_child += _MEMORY * (rate - self._best_child)
