"""How large a tree is worth its time.

With lambda the tokens per millisecond that decoding reaches, a row of a pass that takes dt more
pays if it is accepted with a probability of more than lambda * dt. Growth stops, and the tree is
cut, by this rule; a tree of the root alone is plain decoding (renewal theory: maximizing expected
tokens minus lambda times cost in every round maximizes the long-run rate).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, overload

import numpy as np

from edgellm.device_runtime.sessions import I64
from edgellm.device_runtime.speculate.calibration import Calibration
from edgellm.device_runtime.speculate.tree import F64, Pool, top


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


@dataclass(frozen=True, slots=True)
class Costs:
    """Milliseconds by rows (index), from the engine's measurements."""

    verify: F64
    step: F64
    extend: F64

    @classmethod
    def of(
        cls,
        verify: Mapping[str, float],
        step: Mapping[str, float] | None = None,
        extend: Mapping[str, float] | None = None,
    ) -> Costs:
        """From measured {rows: ms}; what lies between is interpolated.

        Without a network `step` and `extend` are None: drafting costs nothing.
        """
        nothing = {"1": 0.0}
        return cls(*(_table(measured or nothing) for measured in (verify, step, extend)))


def _table(measured: Mapping[str, float]) -> F64:
    rows = sorted(int(key) for key in measured)
    times = np.maximum.accumulate([measured[str(key)] for key in rows])
    return np.interp(np.arange(rows[-1] + 1), rows, times)


@overload
def price(table: F64, rows: int) -> float: ...
@overload
def price(table: F64, rows: I64) -> F64: ...
def price(table: F64, rows: int | I64) -> float | F64:
    """What a pass of `rows` costs by a table of `Costs`, beyond its end as passes of its length."""
    last = len(table) - 1
    return table[np.minimum(rows, last)] * np.ceil(rows / last)


class Policy(Protocol):
    """Decides what is drafted and what is verified."""

    def scores(self, log_probs: F64) -> F64:
        """Log-probability of acceptance of tokens that the draft gave `log_probs`, any shape."""
        ...

    def is_worthwhile(self) -> bool:
        """Whether this round should draft at all."""
        ...

    def frontier(self, pool: Pool, newest: I64, prices: F64) -> I64:
        """Which of the `newest` nodes get children; none to stop.

        Args:
            pool: what was drafted so far.
            newest: the nodes of the latest level.
            prices: milliseconds of a pass for one of them, for two, ...; for more is no room.
        """
        ...

    def select(self, pool: Pool, room: int) -> I64:
        """The drafted nodes to verify, at most `room`, every node's parent among them."""
        ...

    def learn(self, confidences: F64, accepted: I64) -> None:
        """Outcome of the verified nodes whose parent was accepted."""
        ...

    def end_round(self, emitted: int, drafted_ms: float, rows: int) -> None:
        """Tokens that the round gave, its draft passes' cost and the rows that were verified."""
        ...


class FixedTree:
    """The dynamic tree of EAGLE-2 (arXiv 2406.16858): always the same size."""

    def __init__(self, limits: TreeLimits) -> None:
        self._limits = limits

    def scores(self, log_probs: F64) -> F64:
        """The draft's own log-probabilities."""
        return log_probs

    def is_worthwhile(self) -> bool:
        """Always."""
        return True

    def frontier(self, pool: Pool, newest: I64, prices: F64) -> I64:
        """The best `top_k` of the newest level."""
        return newest[top(pool.scores[newest], min(self._limits.top_k, len(prices)))]

    def select(self, pool: Pool, room: int) -> I64:
        """The best of the whole pool."""
        return pool.ranked()[:room]

    def learn(self, confidences: F64, accepted: I64) -> None:
        """Nothing."""

    def end_round(self, emitted: int, drafted_ms: float, rows: int) -> None:
        """Nothing."""


class CostAwareTree:
    """Grows and verifies what pays, by measured costs and learned acceptance rates."""

    _MEMORY = 0.03  # weight of the newest round in the running rates
    _TRIAL_ROUNDS = 12
    _SHORTEST_PAUSE, _LONGEST_PAUSE = 32, 512  # tokens

    def __init__(self, limits: TreeLimits, costs: Costs, calibration: Calibration) -> None:
        self._limits, self._costs, self._calibration = limits, costs, calibration
        self._plain_ms = float(costs.verify[1])
        self._best_child = 0.6  # running mean of the likeliest child's acceptance rate
        self._pause, self._pause_length = 0, self._SHORTEST_PAUSE
        self._begin_trial()

    def _begin_trial(self) -> None:
        self._tokens, self._ms, self._rounds = 1.2, self._plain_ms, 0

    @property
    def rate(self) -> float:
        """Tokens per millisecond that decoding reaches, at least plain decoding's."""
        return max(self._tokens / self._ms, 1 / self._plain_ms)

    def scores(self, log_probs: F64) -> F64:
        """Calibrated."""
        return self._calibration.log_rates(np.exp(log_probs))

    def is_worthwhile(self) -> bool:
        """False during a pause after a trial that lost against plain decoding."""
        return self._pause <= 0

    def frontier(self, pool: Pool, newest: I64, prices: F64) -> I64:
        """The nodes whose likeliest child pays for its rows in draft and verification."""
        order = top(pool.scores[newest], min(self._limits.top_k, len(prices)))
        chances = np.exp(pool.scores[newest[order]]) * self._best_child
        gains = np.cumsum(chances - self.rate * self._row_ms())
        gains -= self.rate * prices[: len(order)]
        best = int(gains.argmax()) if len(gains) else 0
        return newest[order[: best + 1]] if len(gains) and gains[best] > 0 else newest[:0]

    def _row_ms(self) -> float:
        """What one more verified row costs in trees of a middling size."""
        last = min(len(self._costs.verify) - 1, 8)
        return float(self._costs.verify[last] - self._costs.verify[2]) / max(last - 2, 1)

    def select(self, pool: Pool, room: int) -> I64:
        """The size at which expected tokens minus the price of the pass peak."""
        ranked = pool.ranked()[: min(room, len(self._costs.verify) - 2)]
        expected = np.concatenate([[0.0], np.cumsum(np.exp(pool.scores[ranked]))])
        value = expected - self.rate * self._costs.verify[1 : len(ranked) + 2]
        return ranked[: int(value.argmax())]

    def learn(self, confidences: F64, accepted: I64) -> None:
        """Calibrate."""
        self._calibration.learn(confidences, accepted)
        if len(confidences):
            rate = float(np.exp(self._calibration.log_rates(confidences.max())))
            self._best_child += self._MEMORY * (rate - self._best_child)

    def end_round(self, emitted: int, drafted_ms: float, rows: int) -> None:
        """Update the rate; pause when a trial of speculation loses against plain decoding."""
        if self._pause > 0:
            self._pause -= emitted
            if self._pause <= 0:
                self._begin_trial()
            return
        cost = drafted_ms + float(self._costs.verify[min(rows, len(self._costs.verify) - 1)])
        weight = max(self._MEMORY, 1 / (self._rounds + 2))
        self._tokens += weight * (emitted - self._tokens)
        self._ms += weight * (cost - self._ms)
        self._rounds += 1
        if self._rounds >= self._TRIAL_ROUNDS:
            if self._tokens / self._ms < 1 / self._plain_ms:
                self._pause = self._pause_length
                self._pause_length = min(2 * self._pause_length, self._LONGEST_PAUSE)
            elif self._rounds > 4 * self._TRIAL_ROUNDS:
                self._pause_length = self._SHORTEST_PAUSE
