"""What decoding reaches by the costs, and what those who draft won and lost.

By cost, with what the build measured, so that a run is repeatable: an account has what drafted
rounds won and lost against plain decoding, and its owner rests when it is empty. A trial starts
with a small credit, so that a draft that never pays costs a bounded share of the time, which falls
as pauses grow; a draft that pays fills its account and is never asked again. A network has one, and
what the text foresees has one: each pays for its rows and its work, and has what these won. Only
what looking a text up takes is known by the clock, as it depends on the text.
"""

from __future__ import annotations

from typing import NamedTuple

from edgellm.device_runtime.speculate.costs import Costs

# What an account may lose at first, and holds at most, in tokens of plain decoding of every answer
# that shares the passes, as all of them take part and wait for each other. The first trial of a
# network finds acceptance rates that nobody knows yet (4 did not last: MT-bench then began with a
# pause); a full account outlasts a stretch of text that is hard to foresee (8 did not: HumanEval
# then lost all of its gain in every tenth answer).
FIRST_CREDIT, FIRST_CREDIT_BESIDE = 7.0, 2.0  # the latter: of text beside a network
_CREDIT, _FULL = 2.0, 24.0
_SHORTEST_PAUSE, _LONGEST_PAUSE = 192, 1024  # tokens
_OPTIMISM, _LONGEST_CHAIN = 0.8, 6  # rate of acceptance, tokens
_RATE_MEMORY = 0.03  # weight of the newest round in the running rates


class Account:
    """Of a network, or of what text foresees."""

    def __init__(self, round_ms: float, answers: int, first_credit: float) -> None:
        """Begin with a trial.

        Args:
            round_ms: of plain decoding: a token of every answer.
            answers: that share the passes.
            first_credit: what the trial may lose, see the module.
        """
        self._round_ms, self._answers = round_ms, answers
        self.pause, self._pause_length = 0, _SHORTEST_PAUSE * answers  # tokens
        self._begin_trial(first_credit)

    def _begin_trial(self, credit: float) -> None:
        self.ms, self.is_retrial = credit * self._round_ms, True

    def book(self, won_ms: float) -> None:
        """A round won so much against plain decoding, or lost it."""
        full_ms = _FULL * self._round_ms
        self.ms = min(self.ms + won_ms, full_ms)
        if self.ms == full_ms:
            self.is_retrial, self._pause_length = False, _SHORTEST_PAUSE * self._answers
        elif self.ms < 0:
            self.pause = self._pause_length
            self._pause_length = min(2 * self._pause_length, _LONGEST_PAUSE * self._answers)

    def rest(self) -> None:
        """There is nothing to win: no trial before the longest pause is over."""
        self.pause = _LONGEST_PAUSE * self._answers

    def pass_by(self, tokens: int) -> bool:
        """So many were decoded during its pause; whether that ended, and a trial begins."""
        self.pause = max(self.pause - tokens, 0)
        if not self.pause:
            self._begin_trial(_CREDIT)
        return not self.pause


class TextShare(NamedTuple):
    """Of a round in which the text was looked up."""

    looked_ms: float  # what that took
    rows: int = 0  # of the tree, which the text alone foresaw
    tokens: int = 0  # of these, accepted


class Pace:
    """What decoding reaches where so many answers share the passes, and who drafts there."""

    def __init__(
        self, costs: Costs, answers: int = 1, text_credit: float = FIRST_CREDIT_BESIDE
    ) -> None:
        """Begin with the costs alone.

        Args:
            costs: of an answer, of passes that all share.
            answers: of them.
            text_credit: what the text may lose at first.
        """
        self._verify, self._costs, self._answers = costs.verify.tolist(), costs, answers
        self.plain_ms = self._verify[1]
        round_ms = answers * self.plain_ms
        self.network = Account(round_ms, answers, FIRST_CREDIT)
        self.text = Account(round_ms, answers, text_credit)
        self._forget_rate()
        if answers > 1:
            if not _may_pay(costs, costs.host_ms + costs.extend[1]):
                self.network.rest()
            if not _may_pay(costs, 0.0):
                self.text.rest()

    def _forget_rate(self) -> None:
        self.tokens, self.ms, self._rounds = 1.2, self.plain_ms, 0

    @property
    def rate(self) -> float:
        """Tokens per millisecond, at least plain decoding's."""
        return max(self.tokens / self.ms, 1 / self.plain_ms)

    def pass_by(self, looked_ms: float) -> None:
        """A token of plain decoding; looking the text up took so long, for nothing."""
        if self.network.pause and self.network.pass_by(1):
            self._forget_rate()
        if self.text.pause:
            self.text.pass_by(1)
        elif looked_ms:
            self._learn_rate(1, self.plain_ms + looked_ms)
            self.text.book(-looked_ms)

    def end_round(
        self,
        emitted: int,
        drafted_ms: float,
        rows: int,
        *,
        networked: bool,
        read_ms: float,
        text: TextShare | None,
    ) -> None:
        """Update rate and accounts; see `Controller.end_round`."""
        cost = drafted_ms + self._verify_ms(rows)
        if rows > 1:
            cost += self._costs.tree_ms
        if networked or drafted_ms:  # also what was drafted in vain
            cost += self._costs.host_ms
        if text is not None:
            cost += text.looked_ms
        self._learn_rate(emitted, cost)
        if self.network.pause and self.network.pass_by(emitted):
            self._forget_rate()
        won_ms = emitted * self.plain_ms - cost
        text_ms = 0.0 if text is None else self._won_by(text, rows) if networked else won_ms
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

    def _won_by(self, text: TextShare, rows: int) -> float:
        """What the text's part of a network's tree won."""
        more_ms = self._verify_ms(rows) - self._verify_ms(rows - text.rows)
        return text.tokens * self.plain_ms - more_ms - text.looked_ms

    def _verify_ms(self, rows: int) -> float:
        return self._verify[min(rows, len(self._verify) - 1)]


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
