"""Whether a round drafts, and whether with the network: by what passes cost, and by the clock.

By cost, with what the build measured, so that a run is repeatable: an account has what drafted
rounds won and lost against plain decoding, and drafting pauses when it is empty. A trial of
drafting starts with a small credit, so that a draft that never pays costs a bounded share of the
time, which falls as pauses grow; a draft that pays fills its account and is never asked again. By
the clock, where `--spec auto` may choose: a round drafts with the network, or with what the text
alone foresees. Both are measured by tokens per
millisecond, apart for rounds in which the text foresees much and for those in which it foresees
little: a stretch of text has its tokens, however they are decoded. What the build measured, over
one length of context, is no judge there: passes of the base grow with the context, a draft's
hardly do.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from edgellm.device_runtime.speculate.costs import ALONE, Costs, shared

# What a trial may lose, and what an account holds at most, in tokens of plain decoding of every
# answer that shares the passes, as all of them take part and wait for each other. The first
# trial finds acceptance rates that nobody knows yet (4 did not last: MT-bench then began with a
# pause); a full account outlasts a stretch of text that is hard to foresee (8 did not: HumanEval
# then lost all of its gain in every tenth answer).
_FIRST_CREDIT, _CREDIT, _FULL = 7.0, 2.0, 24.0
_SHORTEST_PAUSE, _LONGEST_PAUSE = 192, 1024  # tokens
_OPTIMISM, _LONGEST_CHAIN = 0.8, 6  # rate of acceptance, tokens
_RATE_MEMORY = 0.03  # weight of the newest round in the running rates
_FORESEEN = (0.3, 1.0, 2.5)  # tokens; edges between the kinds of rounds
_MEMORY = 0.02  # weight of the newest round of a side
_TRIAL = 10  # rounds of a side
_SHORTEST, _LONGEST = 64, 1024  # rounds until the other side is tried again
_OUTLIER = 4  # times a side's mean; slower rounds are the machine's doing


class _Pace:
    """What decoding reaches by the costs, and pauses of drafting."""

    def __init__(self, costs: Costs, answers: int = 1) -> None:
        self._verify, self._host_ms, self._answers = costs.verify.tolist(), costs.host_ms, answers
        self.plain_ms = self._verify[1]
        self.pause, self._pause_length = 0, _SHORTEST_PAUSE * answers  # tokens
        self._begin_trial(_FIRST_CREDIT)
        self.is_retrial = answers > 1 and not _may_pay(costs)
        if self.is_retrial:
            self.pause = _LONGEST_PAUSE * answers

    def _begin_trial(self, credit: float) -> None:
        self.tokens, self.ms, self._rounds = 1.2, self.plain_ms, 0
        self.account_ms, self.is_retrial = credit * self._round_ms, True

    @property
    def _round_ms(self) -> float:
        """Of plain decoding: a token of every answer."""
        return self._answers * self.plain_ms

    @property
    def rate(self) -> float:
        """Tokens per millisecond, at least plain decoding's."""
        return max(self.tokens / self.ms, 1 / self.plain_ms)

    def end_round(
        self, emitted: int, drafted_ms: float, rows: int, *, networked: bool, read_ms: float
    ) -> None:
        """Update the rate, and the account of a network; see `Controller.end_round`."""
        if self.pause > 0:
            self.pause -= emitted
            if self.pause <= 0:
                self._begin_trial(_CREDIT)
            return
        cost = drafted_ms + self._verify[min(rows, len(self._verify) - 1)]
        # Also of what a network drafted in vain, and of what others waited for
        if rows > 1 or drafted_ms or (networked and self._answers > 1):
            cost += self._host_ms
        weight = max(_RATE_MEMORY, 1 / (self._rounds + 2))
        self.tokens += weight * (emitted - self.tokens)
        self.ms += weight * (cost - self.ms)
        self._rounds += 1
        if networked:
            self._book(emitted * self.plain_ms - cost - read_ms)

    def _book(self, won_ms: float) -> None:
        full_ms = _FULL * self._round_ms
        self.account_ms = min(self.account_ms + won_ms, full_ms)
        if self.account_ms == full_ms:
            self.is_retrial, self._pause_length = False, _SHORTEST_PAUSE * self._answers
        elif self.account_ms < 0:
            self.pause = self._pause_length
            self._pause_length = min(2 * self._pause_length, _LONGEST_PAUSE * self._answers)


def _may_pay(costs: Costs) -> bool:
    """Whether chains pay of which the base accepts more than of any draft that we know."""
    plain_ms, tokens = costs.verify[1], 0.0
    drafting_ms = costs.host_ms + costs.extend[1]
    for rows in range(2, min(_LONGEST_CHAIN + 2, len(costs.verify))):
        tokens += _OPTIMISM ** (rows - 1)
        if tokens * plain_ms > costs.verify[rows] - plain_ms + drafting_ms:
            return True
        drafting_ms += costs.step[1]
    return False


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


class Controller:
    """See the module; one for all requests of a kind."""

    def __init__(self, costs: Costs, *, pauses: bool = False, adapts: bool = False) -> None:
        """Begin with the costs alone.

        Args:
            costs: of the engine.
            pauses: leave drafting alone for a while when it loses.
            adapts: rounds may go without the network.
        """
        self._costs, self._pauses, self.adapts = costs, pauses, adapts
        self._paces: dict[int, _Pace] = {}  # by the answers that share a pass
        self.company = ALONE  # of the answer whose round it is
        guesses = (0.0, *_FORESEEN)
        plain_ms = self.pace.plain_ms
        self._kinds = [
            _Kind({True: _Side(1.0, plain_ms), False: _Side(1 + guess, plain_ms)})
            for guess in guesses
        ]
        self._kind = self._kinds[0]  # of the round
        self._opened_at: float | None = None  # seconds; since when the clock judges the round

    @property
    def pace(self) -> _Pace:
        """What decoding reaches in this company."""
        answers = self.company.answers
        if answers not in self._paces:
            tables = self._costs.verify, self._costs.step, self._costs.extend
            verify, step, extend = (shared(table, answers) for table in tables)
            shares = replace(self._costs, verify=verify, step=step, extend=extend)
            self._paces[answers] = _Pace(shares, answers)
        return self._paces[answers]

    @property
    def rate(self) -> float:
        """Tokens per millisecond that decoding reaches, by the costs, all of a company together."""
        return self.pace.rate

    @property
    def is_pausing(self) -> bool:
        """Whether this round's network rests; without one, whether the round does."""
        return self.pace.pause > 0

    @property
    def is_retrial(self) -> bool:
        """Whether drafting, behind a pause, has yet to show that it pays."""
        return self.pace.is_retrial

    def opens(self, foreseen: Callable[[], float]) -> bool:
        """Whether the network drafts in a round, of which the text foresees so many tokens."""
        if not self.adapts:
            return True
        # In company the clock tells what all rounds take.
        self._opened_at = time.perf_counter() if self.company.answers == 1 else None
        return self.choose(foreseen())

    def choose(self, foreseen: float) -> bool:
        """As `opens`, without a look at the clock."""
        self._kind = self._kinds[bisect.bisect(_FORESEEN, foreseen)]
        return self._kind.choose()

    def look_away(self) -> None:
        """The clock is no judge of this round: it does what others left."""
        self._opened_at = None

    def end_round(
        self,
        emitted: int,
        drafted_ms: float,
        rows: int,
        *,
        networked: bool,
        read_ms: float = 0.0,
    ) -> None:
        """What a round gave.

        Args:
            emitted: tokens.
            drafted_ms: what its draft passes cost.
            rows: that were verified.
            networked: whether the network drafted.
            read_ms: what it cost a network to read a prompt, or what a pause left; no tree can
                change it, so that it does not enter the rate.
        """
        if self._pauses:
            self.pace.end_round(emitted, drafted_ms, rows, networked=networked, read_ms=read_ms)
        if self._opened_at is not None:
            ms = (time.perf_counter() - self._opened_at) * 1e3
            self.learn(networked=networked, tokens=emitted, ms=ms)
            self._opened_at = None

    def learn(self, *, networked: bool, tokens: int, ms: float) -> None:
        """What a round of a side gave by the clock."""
        self._kind.learn(networked, tokens, ms)
