"""Whether a round drafts with the network, or with what the text alone foresees.

Both are measured by tokens per millisecond, apart for rounds in which the text foresees much and
for those in which it foresees little: a stretch of text has its tokens, however they are decoded.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from edgellm.device_runtime.speculate.policy import Costs, price

_FORESEEN = (0.3, 1.0, 2.5)  # tokens; edges between the kinds of rounds
_MEMORY = 0.02  # weight of the newest round
_TRIAL = 10  # rounds
_SHORTEST, _LONGEST = 64, 1024  # rounds until the other side is tried again


@dataclass(slots=True)
class _Side:
    """Running means of rounds."""

    tokens: float
    ms: float
    rounds: int = 0

    @property
    def rate(self) -> float:
        """Tokens per millisecond."""
        return self.tokens / self.ms

    def learn(self, tokens: int, ms: float) -> None:
        """One more round."""
        self.rounds += 1
        weight = max(_MEMORY, 1 / (self.rounds + 1))
        self.tokens += weight * (tokens - self.tokens)
        self.ms += weight * (ms - self.ms)


@dataclass(slots=True)
class _Kind:
    """Rounds in which the text foresees about as much."""

    sides: dict[bool, _Side]  # with the network, without
    away: int = 0  # rounds since the worse side was tried
    trial: int = 0  # rounds left of a trial
    tried: bool = False  # the side of the trial
    patience: int = _SHORTEST

    def choose(self) -> bool:
        """Whether the network drafts."""
        if self.sides[True].rounds < _TRIAL:
            return True
        if self.away >= self.patience:
            self.tried, self.trial, self.away = not self._better(), _TRIAL, 0
            self.patience = min(2 * self.patience, _LONGEST)
            self.sides[self.tried].rounds = 0  # what it gave long ago counts for one round
        return self.tried if self.trial else self._better()

    def _better(self) -> bool:
        return self.sides[True].rate > self.sides[False].rate

    def learn(self, side: bool, tokens: int, ms: float) -> None:
        """A round of a side."""
        before = self._better()
        self.sides[side].learn(tokens, ms)
        self.trial = max(self.trial - 1, 0)
        self.away += 1
        if self._better() != before:
            self.patience = _SHORTEST


class NetworkGate:
    """See the module."""

    def __init__(self, costs: Costs) -> None:
        """`costs`: of the engine."""
        self._costs = costs
        plain_ms = float(costs.verify[1])
        guesses = (0.0, *_FORESEEN)
        self._kinds = [
            _Kind({True: _Side(1.0, plain_ms), False: _Side(1 + guess, plain_ms)})
            for guess in guesses
        ]
        self._kind = self._kinds[0]

    def opens(self, foreseen: float) -> bool:
        """Whether the network drafts in this round, of which the text foresees so many tokens."""
        self._kind = self._kinds[bisect.bisect(_FORESEEN, foreseen)]
        return self._kind.choose()

    def learn(self, *, networked: bool, tokens: int, drafted_ms: float, rows: int) -> None:
        """What the round gave: its tokens, its draft passes' cost and the verified rows."""
        ms = drafted_ms + price(self._costs.verify, rows)
        self._kind.learn(networked, tokens, ms)
