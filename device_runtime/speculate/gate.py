"""Whether a round drafts with the network, or with what the text alone foresees.

Both are measured by tokens per millisecond, apart for rounds in which the text foresees much and
for those in which it foresees little: a stretch of text has its tokens, however they are decoded.
The milliseconds are the clock's. What the build measured, over one length of context, is no judge
here: passes of the base grow with the context, a draft's hardly do.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from edgellm.device_runtime.speculate.policy import Costs

_FORESEEN = (0.3, 1.0, 2.5)  # tokens; edges between the kinds of rounds
_MEMORY = 0.02  # weight of the newest round
_TRIAL = 10  # rounds
_SHORTEST, _LONGEST = 64, 1024  # rounds until the other side is tried again
_OUTLIER = 4  # times a side's mean; slower rounds are the machine's doing


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
        weight, ms = max(_MEMORY, 1 / (self.rounds + 1)), min(ms, _OUTLIER * self.ms)
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
        for side in (True, False):
            if self.sides[side].rounds < _TRIAL:
                return side
        if self.away >= self.patience:
            self.tried, self.trial, self.away = not self._better(), _TRIAL, 0
            self.patience = min(2 * self.patience, _LONGEST)
            self.sides[self.tried].rounds = _TRIAL  # what it gave long ago counts for little
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
        """`costs`: of the engine, for a start."""
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

    def learn(self, *, networked: bool, tokens: int, ms: float) -> None:
        """What the round gave, and how long it took."""
        self._kind.learn(networked, tokens, ms)
