"""How large a tree is worth its time.

With lambda the tokens per millisecond that decoding reaches, a row of a pass that takes dt more
pays if it is accepted with a probability of more than lambda * dt. Growth stops, and the tree is
cut, by this rule; a tree of the root alone is plain decoding (renewal theory: maximizing expected
tokens minus lambda times cost in every round maximizes the long-run rate).
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


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """The user's flags; upper bounds."""

    top_k: int = 10  # children of a node
    steps: int = 6  # levels of a network
    verify_size: int = 60  # nodes, root included
    static_rows: int | None = None  # nodes with children of a static tree
    text_steps: int = 16  # levels of what text foresees, which costs no passes of a network

    @property
    def round_rows(self) -> int:
        """Tokens that a round commits at most."""
        return 1 + max(self.steps, self.text_steps)

    @property
    def draft_rows(self) -> int:
        """Rows that a network computes for a tree at most."""
        return self.top_k * self.steps if self.static_rows is None else self.static_rows

    @property
    def pool_size(self) -> int:
        """Candidates of a round at most."""
        if self.static_rows is not None:
            return 1 + self.top_k * (1 + self.static_rows)
        return 1 + self.top_k + (self.steps - 1) * self.top_k * self.top_k


class Policy(Protocol):
    """Decides what is drafted and what is verified."""

    def scores(self, log_probs: F64) -> F64:
        """Log-probability of acceptance of tokens that the draft gave `log_probs`, any shape."""
        ...

    @property
    def curve(self) -> F64 | None:
        """What `scores` makes of probabilities, see `Calibration.curve`; None: their logarithm."""
        ...

    def frontier(self, pool: CandidatePool, newest: I64, prices: F64) -> I64:
        """Which of the `newest` nodes get children; none to stop.

        Args:
            pool: what was drafted so far.
            newest: the nodes of the latest level.
            prices: milliseconds of a pass for one of them, for two, ...; for more is no room.
        """
        ...

    def select(self, pool: CandidatePool, room: int) -> I64:
        """The drafted nodes to verify, at most `room`, every node's parent among them."""
        ...

    def pays(self, chances: Iterable[float]) -> bool:
        """Whether a chain of which the base accepts so many, with such chances, is verified."""
        ...

    def learn(self, confidences: Sequence[float], accepted: Sequence[bool]) -> None:
        """Outcome of the verified nodes whose parent was accepted."""
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
        """Of any size."""
        del chances
        return True

    def learn(self, confidences: Sequence[float], accepted: Sequence[bool]) -> None:
        """Nothing."""


class CostAwareTree:
    """Grows and verifies what pays, by measured costs and learned acceptance rates."""

    def __init__(
        self, limits: TreeLimits, costs: Costs, calibration: Calibration, controller: SpecGate
    ) -> None:
        self._limits, self._costs, self._calibration = limits, costs, calibration
        self._controller = controller
        self._best_child = 0.6  # running mean of the likeliest child's acceptance rate

    def scores(self, log_probs: F64) -> F64:
        """Calibrated."""
        return self._calibration.log_rates(np.exp(log_probs))

    @property
    def curve(self) -> F64:
        """Of the calibration."""
        return self._calibration.curve

    def frontier(self, pool: CandidatePool, newest: I64, prices: F64) -> I64:
        """The nodes whose likeliest child pays for its rows in draft and verification."""
        scores = pool.scores[newest].tolist()
        order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        rate, gain, maximum, count = self._controller.rate, 0.0, 0.0, 0
        verify = self._controller.verify
        last = min(len(verify) - 1, 8)
        # What one more verified row costs in trees of a middling size.
        row_ms = (verify[last] - verify[2]) / max(last - 2, 1)
        allowed = order[: min(self._limits.top_k, len(prices))]
        for size, place in enumerate(allowed, start=1):
            more = math.exp(scores[place]) * self._best_child - rate * row_ms
            if more <= 0:  # nor does any behind it pay: prices never fall
                break
            gain += more
            if gain - rate * prices[size - 1] > maximum:
                maximum, count = gain - rate * prices[size - 1], size
        return newest[order[:count]]

    def select(self, pool: CandidatePool, room: int) -> I64:
        """The size at which expected tokens minus the price of the pass peak."""
        verify = self._controller.verify
        ranked = pool.ranked()[: min(room, len(verify) - 2)]
        rate, expected, count = self._controller.rate, 0.0, 0
        maximum = rate * (self._costs.tree_ms - verify[1])  # of the root alone, which has none
        for size, score in enumerate(pool.scores[ranked].tolist(), start=1):
            expected += math.exp(score)
            value = expected - rate * verify[size + 1]
            if value > maximum:
                maximum, count = value, size
        return ranked[:count]

    def pays(self, chances: Iterable[float]) -> bool:
        """As `select`, of a chain alone."""
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
        """Calibrate."""
        self._calibration.learn(confidences, accepted)
        if len(confidences):
            rate = math.exp(self._calibration.log_rate(max(confidences)))
            self._best_child += _MEMORY * (rate - self._best_child)
