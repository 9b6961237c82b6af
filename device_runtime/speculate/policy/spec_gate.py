"""Whether a round drafts, and whether with the network: by what passes cost, and by the clock.

By cost, drafting rests where it loses (`accounts.py`). By the clock, where `--spec auto` may
choose: a round drafts with the network, or with what the text alone foresees. Both are measured by
tokens per millisecond, apart for rounds in which the text foresees much and for those in which it
foresees little: a stretch of text has its tokens, however they are decoded. What the build
measured, over one length of context, is no judge there: passes of the base grow with the context,
a draft's hardly do.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from edgellm.device_runtime.speculate.policy.costs import ALONE, BatchLoad, Costs, shared
from edgellm.device_runtime.speculate.policy.spec_budget import (
    GREEDY,
    GREEDY_BESIDE,
    TextLookupShare,
    Throughput,
    TrialBudget,
)
from edgellm.device_runtime.speculate.text_lookup import TextDrafts

_PREDICTED = (0.3, 1.0, 2.5)  # tokens; edges between the kinds of rounds
_MEMORY = 0.02  # weight of the newest round of a side
_TRIAL = 10  # rounds of a side
_SHORTEST, _LONGEST = 64, 1024  # rounds until the other side is tried again
_LOOKED_MS = 0.03  # of looking the text up, until the clock has seen it
_KEPT_SHARES = 256  # of companies
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


class SpecGate:
    """See the module; one for all requests of a kind."""

    def __init__(
        self,
        costs: Costs,
        *,
        pauses: bool = False,
        adapts: bool = False,
        network: TrialBudget = GREEDY,
        text: TrialBudget = GREEDY_BESIDE,
    ) -> None:
        """Begin with the costs alone.

        Args:
            costs: of the engine.
            pauses: leave drafting alone for a while when it loses.
            adapts: rounds may go without the network.
            network: terms of its accounts.
            text: of the text's.
        """
        self._costs, self._pauses, self.adapts = costs, pauses, adapts
        self._terms, self._looked_ms = (network, text), _LOOKED_MS
        self._paces: dict[int, Throughput] = {}  # by the answers that share a pass
        self.batch_load = ALONE  # of the answer whose round it is
        self.pace, self.verify = self._pace_of(1), costs.verify.tolist()  # ms of its share, by rows
        self._shares: dict[BatchLoad, list[float]] = {ALONE: self.verify}
        guesses = (0.0, *_PREDICTED)
        plain_ms = self.pace.plain_ms
        self._kinds = [
            _Kind({True: _Side(1.0, plain_ms), False: _Side(1 + guess, plain_ms)})
            for guess in guesses
        ]
        self._kind = self._kinds[0]  # of the round
        self._opened_at: float | None = None  # seconds; since when the clock judges the round

    def turn_to(self, batch_load: BatchLoad) -> Throughput:
        """The round is of an answer in this company; what decoding reaches there."""
        if batch_load is not self.batch_load:
            self.batch_load, self.pace = batch_load, self._pace_of(batch_load.answers)
            self.verify = self._share_of(batch_load)
        return self.pace

    def _share_of(self, batch_load: BatchLoad) -> list[float]:
        if batch_load not in self._shares:
            if len(self._shares) == _KEPT_SHARES:
                self._shares.clear()
            self._shares[batch_load] = self._costs.share(batch_load).tolist()
        return self._shares[batch_load]

    def _pace_of(self, answers: int) -> Throughput:
        if answers not in self._paces:
            verify = self._costs.share(BatchLoad(answers, answers - 1))
            step, extend = self._costs.step_share(answers), shared(self._costs.extend, answers)
            shares = replace(self._costs, verify=verify, step=step, extend=extend)
            pace = Throughput(shares, answers, *self._terms)
            if fewer := [known for known in self._paces if known < answers]:
                pace.rest_like(self._paces[max(fewer)])
            self._paces[answers] = pace
        return self._paces[answers]

    @property
    def rate(self) -> float:
        """Tokens per millisecond that decoding reaches, by the costs, all of a company together."""
        return self.pace.rate

    @property
    def is_pausing(self) -> bool:
        """Whether this round's network rests."""
        return self.pace.network.pause > 0

    @property
    def is_retrial(self) -> bool:
        """Whether the network, behind a pause, has yet to show that it pays."""
        return self.pace.network.is_retrial

    def opens(self, predicted: Callable[[], float]) -> bool:
        """Whether the network drafts in a round, of which the text foresees so many tokens."""
        if not self.adapts:
            return True
        # In company the clock tells what all rounds take.
        self._opened_at = time.perf_counter() if self.batch_load.answers == 1 else None
        return self.choose(predicted())

    def choose(self, predicted: float) -> bool:
        """As `opens`, without a look at the clock."""
        self._kind = self._kinds[bisect.bisect(_PREDICTED, predicted)]
        return self._kind.choose()

    def look_away(self) -> None:
        """The clock is no judge of this round: it does what others left."""
        self._opened_at = None

    def looked_up(self, foresight: TextDrafts) -> float:
        """What a look at the text takes, in milliseconds, if there was one since the last round."""
        seconds, foresight.looked_s = foresight.looked_s, 0.0
        if not seconds:
            return 0.0
        mean = self._looked_ms
        self._looked_ms += _MEMORY * (min(seconds * 1e3, _OUTLIER * mean) - mean)
        return self._looked_ms

    def pass_by(self, foresight: TextDrafts) -> None:
        """A token of plain decoding; the text may have been looked up in vain."""
        if self._pauses:
            self.pace.pass_by(self.looked_up(foresight) if foresight.looked_s else 0.0)
        if self._opened_at is not None:
            self._judge(networked=False, tokens=1)

    def end_round(
        self,
        emitted: int,
        drafted_ms: float,
        rows: int,
        *,
        networked: bool,
        read_ms: float = 0.0,
        text: TextLookupShare | None = None,
    ) -> None:
        """What a round gave.

        Args:
            emitted: tokens.
            drafted_ms: what its draft passes cost.
            rows: that were verified.
            networked: whether the network drafted.
            read_ms: what it cost a network to read a prompt, or what a pause left; no tree can
                change it, so that it does not enter the rate.
            text: what it foresaw; None: nobody looked.
        """
        if self._pauses:
            self.pace.end_round(
                emitted,
                drafted_ms,
                rows,
                verify=self.verify,
                networked=networked,
                read_ms=read_ms,
                text=text,
            )
        if self._opened_at is not None:
            self._judge(networked=networked, tokens=emitted)

    def _judge(self, *, networked: bool, tokens: int) -> None:
        assert self._opened_at is not None
        ms = (time.perf_counter() - self._opened_at) * 1e3
        self.learn(networked=networked, tokens=tokens, ms=ms)
        self._opened_at = None

    def learn(self, *, networked: bool, tokens: int, ms: float) -> None:
        """What a round of a side gave by the clock."""
        self._kind.learn(networked, tokens, ms)
