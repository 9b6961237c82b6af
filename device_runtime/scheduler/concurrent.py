"""Several answers in the works for one reader, who takes their steps as they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.engine.sequence import Step
from edgellm.device_runtime.faults import is_fault
from edgellm.device_runtime.scheduler.request_output import Answer
from edgellm.device_runtime.scheduler.running_batch import Entry
from edgellm.device_runtime.scheduler.step_lock import Turns

News = tuple[Answer, tuple[Step, ...]]


class BatchError(EdgeLLMError):
    """Some outputs of a batch failed; the others are complete.

    Attributes:
        answers: all of them in order; a `failure` says why one failed.
    """

    def __init__(self, answers: Sequence[Answer]) -> None:
        failed = [(at, one.failure) for at, one in enumerate(answers) if one.failure is not None]
        at, first = failed[0]
        super().__init__(
            f"{len(failed)} of {len(answers)} outputs failed, prompt {at} first: {first}",
            hint="the error's `answers` holds all outputs; `failure` says why one failed",
        )
        self.answers = list(answers)
        self.__cause__ = first


class Going:
    """Answers of one reader, of which so many are in the works at a time."""

    def __init__(self, turns: Turns, answers: Iterable[Answer], most: int) -> None:
        """Nothing is in the works yet.

        Args:
            turns: of their engine.
            answers: taken one by one, as soon as there is a place.
            most: answers in the works.
        """
        self._turns, self._coming, self._most = turns, iter(answers), most
        self._fault: BaseException | None = None  # why no further answer comes
        self.entries = dict[Entry, Answer]()

    def fill(self) -> bool:
        """Begin answers while there are places; whether any are in the works.

        Raises:
            Exception: an answer was iterated over before, or the next could not be made; those
                that were begun are complete.
        """
        entries = self.entries
        while self._fault is None and len(entries) < self._most:
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

    def take(self, entry: Entry, steps: Sequence[Step]) -> News:
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


def together(turns: Turns, answers: Iterable[Answer], most: int) -> Iterator[News]:
    """Iterate over answers side by side.

    Args:
        turns: of their engine.
        answers: taken one by one, as soon as there is a place.
        most: answers in the works.

    Yields:
        An answer and the steps that came of it: none, or the last, when it is complete or has a
        `failure`. The others go on.

    Raises:
        Exception: see `Going.fill`.
    """
    going = Going(turns, answers, most)
    try:
        while going.fill():
            for entry, steps in turns.next([*going.entries]):
                yield going.take(entry, steps)
    finally:
        going.drop()
