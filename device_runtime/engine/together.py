"""Several answers in the works for one reader, who takes their steps as they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from edgellm.device_runtime.engine.answer import Answer
from edgellm.device_runtime.engine.batch import Entry
from edgellm.device_runtime.engine.sequence import Step
from edgellm.device_runtime.engine.turns import Turns

News = tuple[Answer, tuple[Step, ...]]


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
        self.entries = dict[Entry, Answer]()

    def fill(self) -> bool:
        """Begin answers while there are places; whether any are in the works.

        Raises:
            EdgeLLMError: one was iterated over before.
        """
        entries = self.entries
        while len(entries) < self._most and (answer := next(self._coming, None)) is not None:
            entry = answer.begin()
            entries[entry] = answer
            self._turns.enter(entry)
        return bool(entries)

    def take(self, entry: Entry, steps: Sequence[Step]) -> News:
        """What came of one of them, which is left when it is complete."""
        answer = self.entries[entry]
        answer.text += "".join(step.text for step in steps)
        if entry.is_read:
            self._turns.leave(entry)
            del self.entries[entry]
            answer.is_complete = True
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
        An answer and the steps that came of it: none, or the last, when it is complete.

    Raises:
        EdgeLLMError: an answer failed, or was iterated over before; the others are dropped.
    """
    going = Going(turns, answers, most)
    try:
        while going.fill():
            for entry, steps in turns.next([*going.entries]):
                yield going.take(entry, steps)
    finally:
        going.drop()
