"""Throughput of decoding by measured costs, and the time budget of speculation.

Times are the build's measurements, so a run is reproducible. A credit holds the time that drafted
rounds saved or lost against plain decoding; when it is empty, drafting pauses. A trial starts with
a small credit, so a draft that never pays costs a bounded share of the time. That share falls as
pauses get longer. A draft that pays fills its credit and is not tried again. The network and the
lookups each have a credit, with their own costs and savings. Only lookups are timed by the clock,
since their time depends on the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from edgellm.device_runtime.speculate.policy.costs import Costs

# Maximum credit, in tokens of plain decoding of every sequence in the batch, since all of them wait
# for each other. It outlasts a passage that is hard to predict (8 did not: HumanEval then lost all
# of its gain in every tenth request).
_FULL = 24.0
_OPTIMISM, _LONGEST_CHAIN = 0.8, 6  # rate of acceptance, tokens
_RATE_MEMORY = 0.03  # weight of the newest round in the running rates


class TrialBudget(NamedTuple):
    """Credit of trials, in these tokens, and pauses after them, in tokens."""

    first: float
    again: float = 2.0
    shortest: int = 192
    longest: int = 1024


# A network's first trial also learns the acceptance rates: 4 did not last, MT-bench then began with
# a pause. Sampled outputs are harder to predict, so they get less credit. Lookups with a network
# cost little, so a small credit lasts, and trials are more frequent.
GREEDY, SAMPLED = TrialBudget(7.0), TrialBudget(3.0, 1.5, 384)
GREEDY_LOOKUP, SAMPLED_LOOKUP = TrialBudget(2.0, longest=384), TrialBudget(1.5, 1.5, longest=384)


class SpecCredit:
    """The time credit of a network, or of lookups."""

    def __init__(self, round_ms: float, answers: int, terms: TrialBudget) -> None:
        """Start with a trial.

        Args:
            round_ms: time of plain decoding: one token of every sequence.
            answers: batch size.
            terms: credit and pauses of trials.
        """
        self._round_ms, self._answers, self._terms = round_ms, answers, terms
        self.pause, self._pause_length = 0, terms.shortest * answers  # tokens
        # In a batch all sequences wait, and the acceptance rates are learned already.
        self._begin_trial(terms.first if answers == 1 else terms.again)

    def _begin_trial(self, credit: float) -> None:
        self.ms, self.is_retrial = credit * self._round_ms, True

    def book(self, won_ms: float) -> None:
        """Add the time that a round saved against plain decoding; negative if it lost time."""
        full_ms = _FULL * self._round_ms
        self.ms = min(self.ms + won_ms, full_ms)
        if self.ms == full_ms:
            self.is_retrial, self._pause_length = False, self._terms.shortest * self._answers
        elif self.ms < 0:
            self.pause = self._pause_length
            self._pause_length = min(2 * self._pause_length, self._terms.longest * self._answers)

    def rest(self) -> None:
        """Pause for the longest time, since drafting cannot pay."""
        self.pause = self._terms.longest * self._answers

    def observe_plain(self, tokens: int) -> bool:
        """Count tokens of a pause; returns whether the pause ends and a trial begins."""
        self.pause = max(self.pause - tokens, 0)
        if not self.pause:
            self._begin_trial(self._terms.again)
        return not self.pause


class TextLookupShare(NamedTuple):
    """The lookups' share of a round."""

    looked_ms: float  # time of lookups
    rows: int = 0  # verified tokens that only lookups proposed
    tokens: int = 0  # accepted ones of these


class Throughput:
    """Throughput of decoding at one batch size, with the credits of network and lookups."""

    def __init__(
        self,
        *,
        costs: Costs,
        answers: int = 1,
        network: TrialBudget = GREEDY,
        text: TrialBudget = GREEDY_LOOKUP,
    ) -> None:
        """Start with the costs alone.

        Args:
            costs: a sequence's share of the passes.
            answers: batch size.
            network: terms of the network's credit.
            text: terms of the lookups' credit.
        """
        self._costs, self.plain_ms = costs, float(costs.verify[1])
        round_ms = answers * self.plain_ms
        self.network = SpecCredit(round_ms, answers, network)
        self.text = SpecCredit(round_ms, answers, text)
        self._forget_rate()
        if answers > 1:
            if not _may_pay(costs, costs.host_ms + costs.extend[1]):
                self.network.rest()
            if not _may_pay(costs, costs.host_ms):
                self.text.rest()

    def inherit_pauses(self, smaller: Throughput) -> None:
        """Take over the pauses of a smaller batch, since drafting loses more in a larger one."""
        for own, other in ((self.network, smaller.network), (self.text, smaller.text)):
            own.pause = max(own.pause, other.pause)

    def _forget_rate(self) -> None:
        self.tokens, self.ms, self._rounds = 1.2, self.plain_ms, 0

    @property
    def rate(self) -> float:
        """Tokens per millisecond, at least plain decoding's."""
        return max(self.tokens / self.ms, 1 / self.plain_ms)

    def observe_plain(self, looked_ms: float) -> None:
        """Record a token of plain decoding, and the time of a lookup that proposed nothing."""
        network, text = self.network, self.text
        if network.pause > 1 and text.pause > 1:
            network.pause -= 1
            text.pause -= 1
            return
        if network.pause and network.observe_plain(1):
            self._forget_rate()
        if text.pause:
            text.observe_plain(1)
        elif looked_ms:
            self._learn_rate(1, self.plain_ms + looked_ms)
            text.book(-looked_ms)

    def end_round(
        self,
        emitted: int,
        drafted_ms: float,
        rows: int,
        *,
        verify: Sequence[float],
        networked: bool,
        read_ms: float,
        text: TextLookupShare | None,
    ) -> None:
        """Update rate and credits; see `SpecGate.end_round`.

        `verify` has the sequence's share in milliseconds by tokens, in the batch of this round.
        """
        rows = min(rows, len(verify) - 1)
        cost = drafted_ms + self.plain_ms + verify[rows] - verify[1]
        if rows > 1:
            cost += self._costs.tree_ms
        if networked or drafted_ms or rows > 1:  # also if the draft proposed nothing
            cost += self._costs.host_ms
        if text is not None:
            cost += text.looked_ms
        self._learn_rate(emitted, cost)
        if self.network.pause and self.network.observe_plain(emitted):
            self._forget_rate()
        won_ms = emitted * self.plain_ms - cost
        text_ms = 0.0 if text is None else self._won_by(text, rows, verify) if networked else won_ms
        if networked:
            self.network.book(won_ms - text_ms - read_ms)
        if self.text.pause:
            self.text.observe_plain(emitted)
        elif text is not None:
            self.text.book(text_ms)

    def _learn_rate(self, emitted: int, cost: float) -> None:
        weight = max(_RATE_MEMORY, 1 / (self._rounds + 2))
        self.tokens += weight * (emitted - self.tokens)
        self.ms += weight * (cost - self.ms)
        self._rounds += 1

    def _won_by(self, text: TextLookupShare, rows: int, verify: Sequence[float]) -> float:
        """Time that lookups saved in a network's tree."""
        more_ms = verify[rows] - verify[max(rows - text.rows, 1)]
        return text.tokens * self.plain_ms - more_ms - text.looked_ms


def _may_pay(costs: Costs, drafting_ms: float) -> bool:
    """Whether chains with an optimistic acceptance rate pay."""
    plain_ms, tokens = costs.verify[1], 0.0
    drafting_ms += costs.tree_ms
    for rows in range(2, min(_LONGEST_CHAIN + 2, len(costs.verify))):
        tokens += _OPTIMISM ** (rows - 1)
        if tokens * plain_ms > costs.verify[rows] - plain_ms + drafting_ms:
            return True
        drafting_ms += costs.step[1]
    return False
