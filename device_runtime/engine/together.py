"""Several answers in the works for one reader, who takes their steps as they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from edgellm.device_runtime.engine.answer import Answer
from edgellm.device_runtime.engine.batch import Entry
from edgellm.device_runtime.engine.sequence import Step
from edgellm.device_runtime.engine.turns import Turns

News = tuple[Answer, tuple[Step, ...]]


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
    coming, going = iter(answers), dict[Entry, Answer]()
    try:
        while True:
            while len(going) < most and (answer := next(coming, None)) is not None:
                entry = answer.begin()
                going[entry] = answer
                turns.enter(entry)
            if not going:
                return
            for entry, steps in turns.next([*going]):
                answer = going[entry]
                answer.text += "".join(step.text for step in steps)
                if entry.is_read:
                    turns.leave(entry)
                    del going[entry]
                    answer.is_complete = True
                yield answer, tuple(steps)
    finally:
        for entry in going:
            turns.leave(entry)
