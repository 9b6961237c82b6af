"""What decoding reaches by the costs, and what those who draft won and lost.

By cost, with what the build measured, so that a run is repeatable: an account has what drafted
rounds won and lost against plain decoding, and its owner rests when it is empty. A trial starts
with a small credit, so that a draft that never pays costs a bounded share of the time, which falls
as pauses grow; a draft that pays fills its account and is never asked again. A network has one, and
what the text foresees has one: each pays for its rows and its work, and has what these won. Only
what looking a text up takes is known by the clock, as it depends on the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from edgellm.device_runtime.speculate.policy.costs import Costs

# What an account holds at most, in tokens of plain decoding of every answer that shares the passes,
# as all of them take part and wait for each other. It outlasts a stretch of text that is hard to
# foresee (8 did not: HumanEval then lost all of its gain in every tenth answer).
_FULL = 24.0
_OPTIMISM, _LONGEST_CHAIN = 0.8, 6  # rate of acceptance, tokens
_RATE_MEMORY = 0.03  # weight of the newest round in the running rates


class TrialBudget(NamedTuple):
    """What trials may lose, in such tokens, and pauses behind them, in tokens."""

    first: float
    again: float = 2.0
    shortest: int = 192
    longest: int = 1024


# A network's first trial finds acceptance rates that nobody knows yet: 4 did not last, MT-bench
# then began with a pause. Sampled answers are harder to foresee, so that less is risked there; and
# looking a text up, beside a network, costs little: a little credit lasts, and it is tried sooner.
GREEDY, SAMPLED = TrialBudget(7.0), TrialBudget(3.0, 1.5, 384)
GREEDY_BESIDE, SAMPLED_BESIDE = TrialBudget(2.0, longest=384), TrialBudget(1.5, 1.5, longest=384)


class SpecCredit:
    """Of a network, or of what text foresees."""

    def __init__(self, round_ms: float, answers: int, terms: TrialBudget) -> None:
        """Begin with a trial.

        Args:
            round_ms: of plain decoding: a token of every answer.
            answers: that share the passes.
            terms: of trials.
        """
        self._round_ms, self._answers, self._terms = round_ms, answers, terms
        self.pause, self._pause_length = 0, terms.shortest * answers  # tokens
        # Beside others it is all of them who wait, and what a draft is worth is known already.
        self._begin_trial(terms.first if answers == 1 else terms.again)

    def _begin_trial(self, credit: float) -> None:
        self.ms, self.is_retrial = credit * self._round_ms, True

    def book(self, won_ms: float) -> None:
        """A round won so much against plain decoding, or lost it."""
        full_ms = _FULL * self._round_ms
        self.ms = min(self.ms + won_ms, full_ms)
        if self.ms == full_ms:
            self.is_retrial, self._pause_length = False, self._terms.shortest * self._answers
        elif self.ms < 0:
            self.pause = self._pause_length
            self._pause_length = min(2 * self._pause_length, self._terms.longest * self._answers)

    def rest(self) -> None:
        """There is nothing to win: no trial before the longest pause is over."""
        self.pause = self._terms.longest * self._answers

    def pass_by(self, tokens: int) -> bool:
        """So many were decoded during its pause; whether that ended, and a trial begins."""
        self.pause = max(self.pause - tokens, 0)
        if not self.pause:
            self._begin_trial(self._terms.again)
        return not self.pause


class TextLookupShare(NamedTuple):
    """Of a round in which the text was looked up."""

    looked_ms: float  # what that took
    rows: int = 0  # of the tree, which the text alone foresaw
    tokens: int = 0  # of these, accepted


class Throughput:
    """What decoding reaches where so many answers share the passes, and who drafts there."""

    def __init__(
        self,
        costs: Costs,
        answers: int = 1,
        network: TrialBudget = GREEDY,
        text: TrialBudget = GREEDY_BESIDE,
    ) -> None:
        """Begin with the costs alone.

        Args:
            costs: of an answer, of passes that all share.
            answers: of them.
            network: terms of its account.
            text: of the text's.
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

    def rest_like(self, smaller: Throughput) -> None:
        """What rests in a smaller company would lose more in this one."""
        for own, other in ((self.network, smaller.network), (self.text, smaller.text)):
            own.pause = max(own.pause, other.pause)

    def _forget_rate(self) -> None:
        self.tokens, self.ms, self._rounds = 1.2, self.plain_ms, 0

    @property
    def rate(self) -> float:
        """Tokens per millisecond, at least plain decoding's."""
        return max(self.tokens / self.ms, 1 / self.plain_ms)

    def pass_by(self, looked_ms: float) -> None:
        """A token of plain decoding; looking the text up took so long, for nothing."""
        network, text = self.network, self.text
        if network.pause > 1 and text.pause > 1:
            network.pause -= 1
            text.pause -= 1
            return
        if network.pause and network.pass_by(1):
            self._forget_rate()
        if text.pause:
            text.pass_by(1)
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
        """Update rate and accounts; see `Controller.end_round`.

        `verify` are milliseconds by rows of the pass that it was, beside others' rows: rows more
        cost what they add there.
        """
        rows = min(rows, len(verify) - 1)
        cost = drafted_ms + self.plain_ms + verify[rows] - verify[1]
        if rows > 1:
            cost += self._costs.tree_ms
        if networked or drafted_ms or rows > 1:  # also what was drafted in vain
            cost += self._costs.host_ms
        if text is not None:
            cost += text.looked_ms
        self._learn_rate(emitted, cost)
        if self.network.pause and self.network.pass_by(emitted):
            self._forget_rate()
        won_ms = emitted * self.plain_ms - cost
        text_ms = 0.0 if text is None else self._won_by(text, rows, verify) if networked else won_ms
        if networked:
            self.network.book(won_ms - text_ms - read_ms)
        if self.text.pause:
            self.text.pass_by(emitted)
        elif text is not None:
            self.text.book(text_ms)

    def _learn_rate(self, emitted: int, cost: float) -> None:
        weight = max(_RATE_MEMORY, 1 / (self._rounds + 2))
        self.tokens += weight * (emitted - self.tokens)
        self.ms += weight * (cost - self.ms)
        self._rounds += 1

    def _won_by(self, text: TextLookupShare, rows: int, verify: Sequence[float]) -> float:
        """What the text's part of a network's tree won."""
        more_ms = verify[rows] - verify[max(rows - text.rows, 1)]
        return text.tokens * self.plain_ms - more_ms - text.looked_ms


def _may_pay(costs: Costs, drafting_ms: float) -> bool:
    """Whether chains pay of which the base accepts more than of any draft that we know."""
    plain_ms, tokens = costs.verify[1], 0.0
    drafting_ms += costs.tree_ms
    for rows in range(2, min(_LONGEST_CHAIN + 2, len(costs.verify))):
        tokens += _OPTIMISM ** (rows - 1)
        if tokens * plain_ms > costs.verify[rows] - plain_ms + drafting_ms:
            return True
        drafting_ms += costs.step[1]
    return False
