"""Passes that drafters ask for: those of several answers are computed together.

A drafter that works yields what it wants computed and is sent the result. So the extensions of
several drafts are one pass, and so is each level of all their trees.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.faults import Confined, computed

T = TypeVar("T")


class Session(Protocol):
    """What computes passes of a kind of network."""

    @property
    def max_batch_size(self) -> int:
        """Answers of a pass."""
        ...

    def run_many(self, parts: Sequence[Any], /) -> Sequence[Any]:
        """Results for parts, `max_batch_size` at most, valid until the session runs again."""
        ...


class RequestedNetwork(Session, Protocol):
    """One whose device need not be waited for."""

    def ask_many(self, parts: Sequence[Any], /) -> Sequence[Any]:
        """As `run_many`, but results are fetched when they are called for."""
        ...


@dataclass(slots=True)
class Wanted:
    """A part of a pass."""

    session: Session
    part: Any
    asks: bool = False  # for what is fetched later; the session is an `RequestedNetwork`
    answers: int = 1  # that shared the pass; known when the result is


Passes = Generator[Wanted, Any, T]  # what is sent is read before the next part is yielded


def run(passes: Passes[T]) -> T:
    """What comes of one drafter's work; raises as its session."""
    try:
        wanted = next(passes)
        while True:
            wanted = passes.send(_computed([wanted])[0])
    except StopIteration as end:
        return end.value


def run_all(each: Sequence[Passes[T]]) -> list[T | EdgeLLMError]:
    """What comes of the work of each of several drafters, or why it failed."""
    if len(each) == 1:
        return [_outcome(each[0])]
    work = [_Work(passes) for passes in each]
    for one in work:
        one.begin()
    while going := [one for one in work if one.wanted is not None]:
        first = going[0].session
        if first.max_batch_size == 1:  # sequences would push each other out of the only cache
            going[0].finish()
            continue
        together = [one for one in going if one.session is first][: first.max_batch_size]
        _run_together(together)
    return [one.outcome for one in work]


class _Work:
    """Of one drafter."""

    def __init__(self, passes: Passes[Any]) -> None:
        self._passes = passes
        self.wanted: Wanted | None = None
        self.outcome: Any = None

    @property
    def session(self) -> Session:
        assert self.wanted is not None
        return self.wanted.session

    def begin(self) -> None:
        self.send(None)

    def send(self, result: Any) -> None:
        with Confined(self.fail):
            try:
                self.wanted = self._passes.send(result)
            except StopIteration as end:
                self.wanted, self.outcome = None, end.value

    def finish(self) -> None:
        while self.wanted is not None:
            _run_together([self])

    def fail(self, error: EdgeLLMError) -> None:
        self.wanted, self.outcome = None, error
        with Confined(lambda _: None):  # it has failed already, for the reason that is known
            self._passes.close()


def _run_together(work: Sequence[_Work]) -> None:
    for one, (result, answers) in computed(work, _computed_for, _Work.fail):
        if one.wanted is not None:
            one.wanted.answers = answers
        one.send(result)


def _computed_for(work: Sequence[_Work]) -> list[tuple[Any, int]]:
    """Results for drafters, each with the number of those that shared the pass."""
    wanted = [one.wanted for one in work if one.wanted is not None]
    return [(result, len(work)) for result in _computed(wanted)]


def _computed(parts: Sequence[Wanted]) -> Sequence[Any]:
    """The results of parts of one session, which ask for the same kind of them."""
    session: Any = parts[0].session
    return (session.ask_many if parts[0].asks else session.run_many)([one.part for one in parts])


def _outcome(passes: Passes[T]) -> T | EdgeLLMError:
    failures: list[EdgeLLMError] = []
    with Confined(failures.append):
        return run(passes)
    return failures[0]
