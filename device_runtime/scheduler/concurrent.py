"""Several answers in the works for one reader, who takes their steps as they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.engine.sequence import Step
from edgellm.device_runtime.faults import is_fault
from edgellm.device_runtime.scheduler.request_output import RequestOutput
from edgellm.device_runtime.scheduler.running_batch import RunningRequest
from edgellm.device_runtime.scheduler.step_lock import StepLock

NewOutputs = tuple[RequestOutput, tuple[Step, ...]]


class BatchError(EdgeLLMError):
    """Some outputs of a batch failed; the others are complete.

    Attributes:
        answers: all of them in order; a `failure` says why one failed.
    """

    def __init__(self, answers: Sequence[RequestOutput]) -> None:
        failed = [(at, one.failure) for at, one in enumerate(answers) if one.failure is not None]
        at, first = failed[0]
        super().__init__(
            f"{len(failed)} of {len(answers)} outputs failed, prompt {at} first: {first}",
            hint="the error's `answers` holds all outputs; `failure` says why one failed",
        )
        self.answers = list(answers)
        self.__cause__ = first


class ConcurrentRequests:
    """Answers of one reader, of which so many are in the works at a time."""

    def __init__(self, turns: StepLock, answers: Iterable[RequestOutput], maximum: int) -> None:
        """Nothing is in the works yet.

        Args:
            turns: of their engine.
            answers: taken one by one, as soon as there is a place.
            maximum: answers in the works.
        """
        self._turns, self._coming, self._maximum = turns, iter(answers), maximum
        self._fault: BaseException | None = None  # why no further answer comes
        self.entries = dict[RunningRequest, RequestOutput]()

    def fill(self) -> bool:
        """Begin answers while there are places; whether any are in the works.

        Raises:
            Exception: an answer was iterated over before, or the next could not be made; those
                that were begun are complete.
        """
        entries = self.entries
        while self._fault is None and len(entries) < self._maximum:
            try:
                if (answer := next(self._coming, None)) is None:
                    break
                entry = answer.begin()
            except BaseException as error:
                if not is_fault(error):
                    raise
                self._fault = error
            else:
                entries[entry] = answer
                self._turns.enter(entry)
        if self._fault is not None and not entries:
            raise self._fault
        return bool(entries)

    def take(self, entry: RunningRequest, steps: Sequence[Step]) -> NewOutputs:
        """What came of one of them, which is left when it is complete."""
        answer = self.entries[entry]
        answer.text += "".join(step.text for step in steps)
        if entry.is_done and not entry.steps:  # another thread may have computed more
            self._turns.leave(entry)
            del self.entries[entry]
            answer.failure, answer.is_complete = entry.failure, entry.failure is None
        return answer, tuple(steps)

    def drop(self) -> None:
        """Nobody reads on."""
        for entry in self.entries:
            self._turns.leave(entry)
        self.entries.clear()


def together(
    turns: StepLock, answers: Iterable[RequestOutput], maximum: int
) -> Iterator[NewOutputs]:
    """Iterate over answers side by side.

    Args:
        turns: of their engine.
        answers: taken one by one, as soon as there is a place.
        maximum: answers in the works.

    Yields:
        An answer and the steps that came of it: none, or the last, when it is complete or has a
        `failure`. The others go on.

    Raises:
        Exception: see `ConcurrentRequests.fill`.
    """
    going = ConcurrentRequests(turns, answers, maximum)
    try:
        while going.fill():
            for entry, steps in turns.next([*going.entries]):
                yield going.take(entry, steps)
    finally:
        going.drop()
