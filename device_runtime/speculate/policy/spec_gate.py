"""Decides for each round whether to draft, and whether with the network.

By measured costs, drafting pauses where it loses time (`spec_budget.py`). With `--spec auto` the
clock chooses between the network and lookups alone, by tokens per millisecond. Rounds with many
and with few expected tokens from lookups are compared separately, since throughput depends on the
text. The build's measurements do not suffice here: they have one context length, and the base's
passes slow down with the context, a draft's hardly.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from edgellm.device_runtime.speculate.policy.costs import ALONE, BatchLoad, Costs, shared
from edgellm.device_runtime.speculate.policy.spec_budget import (
    GREEDY,
    GREEDY_LOOKUP,
    TextLookupShare,
    Throughput,
    TrialBudget,
)
from edgellm.device_runtime.speculate.text_lookup import TextDrafts

_PREDICTED = (0.3, 1.0, 2.5)  # expected tokens from lookups; edges between the kinds of rounds
_MEMORY = 0.02  # weight of the newest round of a side
_TRIAL = 10  # rounds in a trial of a side
_SHORTEST, _LONGEST = 64, 1024  # rounds until the other side is tried again
_LOOKED_MS = 0.03  # initial estimate of a lookup's time
_MAX_SHARES = 256  # cached batch loads
_OUTLIER = 4  # times a side's mean; slower rounds are clipped as noise


@dataclass(slots=True)
class _Side:
    """Running means of rounds with the network, or without."""

    tokens: float
    ms: float
    rounds: int = 0

    @property
    def rate(self) -> float:
        """Tokens per millisecond."""
        return self.tokens / self.ms

    def learn(self, tokens: int, ms: float) -> None:
        """Record a round."""
        self.rounds += 1
        weight, ms = max(_MEMORY, 1 / (self.rounds + 1)), min(ms, _OUTLIER * self.ms)
        self.tokens += weight * (tokens - self.tokens)
        self.ms += weight * (ms - self.ms)


@dataclass(slots=True, kw_only=True)
class _Kind:
    """Rounds with similarly many expected tokens from lookups."""

    sides: dict[bool, _Side]  # True: with the network
    away: int = 0  # rounds since the worse side was tried
    trial: int = 0  # remaining rounds of a trial
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
            self.sides[self.tried].rounds = _TRIAL  # old rounds get little weight
        return self.tried if self.trial else self._better()

    def _better(self) -> bool:
        return self.sides[True].rate > self.sides[False].rate

    def learn(self, side: bool, tokens: int, ms: float) -> None:
        """Record a round of a side."""
        before = self._better()
        self.sides[side].learn(tokens, ms)
        self.trial = max(self.trial - 1, 0)
        self.away += 1
        if self._better() != before:
            self.patience = _SHORTEST


class SpecGate:
    """Chooses the drafters of a round; one for all greedy requests, one for all sampled ones."""

    def __init__(
        self,
        *,
        costs: Costs,
        pauses: bool = False,
        adapts: bool = False,
        network: TrialBudget = GREEDY,
        text: TrialBudget = GREEDY_LOOKUP,
    ) -> None:
        """Start with the costs alone.

        Args:
            costs: pass times of the engine.
            pauses: whether drafting pauses when it loses time.
            adapts: whether rounds may skip the network.
            network: terms of the network's credits.
            text: terms of the lookups' credits.
        """
        self._costs, self._pauses, self.adapts = costs, pauses, adapts
        self._terms, self._looked_ms = (network, text), _LOOKED_MS
        self._paces: dict[int, Throughput] = {}  # by batch size
        self.batch_load = ALONE  # of the current round
        self.pace, self.verify = self._pace_of(1), costs.verify.tolist()  # ms of its share, by rows
        self._shares: dict[BatchLoad, list[float]] = {ALONE: self.verify}
        guesses = (0.0, *_PREDICTED)
        plain_ms = self.pace.plain_ms
        self._kinds = [
            _Kind(sides={True: _Side(1.0, plain_ms), False: _Side(1 + guess, plain_ms)})
            for guess in guesses
        ]
        self._kind = self._kinds[0]  # of the round
        self._opened_at: float | None = None  # seconds; start of a timed round

    def set_batch_load(self, batch_load: BatchLoad) -> Throughput:
        """Set the batch of the current round; returns the throughput at its size."""
        if batch_load is not self.batch_load:
            self.batch_load, self.pace = batch_load, self._pace_of(batch_load.answers)
            self.verify = self._share_of(batch_load)
        return self.pace

    def _share_of(self, batch_load: BatchLoad) -> list[float]:
        if batch_load not in self._shares:
            if len(self._shares) == _MAX_SHARES:
                self._shares.clear()
            self._shares[batch_load] = self._costs.share(batch_load).tolist()
        return self._shares[batch_load]

    def _pace_of(self, answers: int) -> Throughput:
        if answers not in self._paces:
            verify = self._costs.share(BatchLoad(answers, answers - 1))
            step, extend = self._costs.step_share(answers), shared(self._costs.extend, answers)
            shares = replace(self._costs, verify=verify, step=step, extend=extend)
            network, text = self._terms
            pace = Throughput(costs=shares, answers=answers, network=network, text=text)
            if fewer := [known for known in self._paces if known < answers]:
                pace.inherit_pauses(self._paces[max(fewer)])
            self._paces[answers] = pace
        return self._paces[answers]

    @property
    def rate(self) -> float:
        """Throughput of the batch in tokens per millisecond, by the costs."""
        return self.pace.rate

    @property
    def is_pausing(self) -> bool:
        """Whether the network pauses in this round."""
        return self.pace.network.pause > 0

    @property
    def is_retrial(self) -> bool:
        """Whether the network is in a trial."""
        return self.pace.network.is_retrial

    def chooses_network(self, predicted: Callable[[], float]) -> bool:
        """Whether the network drafts, given the expected number of tokens from lookups."""
        if not self.adapts:
            return True
        # In a batch the clock would measure the rounds of all sequences.
        self._opened_at = time.perf_counter() if self.batch_load.answers == 1 else None
        return self.choose(predicted())

    def choose(self, predicted: float) -> bool:
        """As `chooses_network`, without timing the round."""
        self._kind = self._kinds[bisect.bisect(_PREDICTED, predicted)]
        return self._kind.choose()

    def skip_timing(self) -> None:
        """Do not time this round, since it includes work of earlier rounds."""
        self._opened_at = None

    def looked_up(self, text_drafts: TextDrafts) -> float:
        """Mean time of a lookup in milliseconds; 0 without a lookup since the last round."""
        seconds, text_drafts.looked_s = text_drafts.looked_s, 0.0
        if not seconds:
            return 0.0
        mean = self._looked_ms
        self._looked_ms += _MEMORY * (min(seconds * 1e3, _OUTLIER * mean) - mean)
        return self._looked_ms

    def observe_plain(self, text_drafts: TextDrafts) -> None:
        """Record a token of plain decoding, and a lookup that proposed nothing."""
        if self._pauses:
            self.pace.observe_plain(self.looked_up(text_drafts) if text_drafts.looked_s else 0.0)
        if self._opened_at is not None:
            self._record_time(networked=False, tokens=1)

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
        """Record a round.

        Args:
            emitted: number of tokens.
            drafted_ms: cost of its draft passes.
            rows: verified tokens.
            networked: whether the network drafted.
            read_ms: the network's cost of a prompt, or of tokens of a pause. It does not enter
                the rate, since it does not depend on trees.
            text: the lookups' share; None: no lookup.
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
            self._record_time(networked=networked, tokens=emitted)

    def _record_time(self, *, networked: bool, tokens: int) -> None:
        assert self._opened_at is not None
        ms = (time.perf_counter() - self._opened_at) * 1e3
        self.learn(networked=networked, tokens=tokens, ms=ms)
        self._opened_at = None

    def learn(self, *, networked: bool, tokens: int, ms: float) -> None:
        """Record the measured time of a round of a side."""
        self._kind.learn(networked, tokens, ms)
