"""Passes that drafters ask for: those of several answers are computed together.

A drafter that works yields what it wants computed and is sent the result. So the extensions of
several drafts are one pass, and so is each level of all their trees.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from edgellm.contract import EdgeLLMError

T = TypeVar("T")


class Session(Protocol):
    """What computes passes of a kind of network."""

    @property
    def most_parts(self) -> int:
        """Answers of a pass."""
        ...

    def run_many(self, parts: Sequence[Any], /) -> Sequence[Any]:
        """Results for parts, `most_parts` at most, valid until the session runs again."""
        ...


class AskedSession(Session, Protocol):
    """One whose device need not be waited for."""

    def ask_many(self, parts: Sequence[Any], /) -> Sequence[Any]:
        """As `run_many`, but results are fetched when they are called for."""
        ...


@dataclass(slots=True)
class Wanted:
    """A part of a pass."""

    session: Session
    part: Any
    asks: bool = False  # for what is fetched later; the session is an `AskedSession`
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
        return [_caught(lambda: run(each[0]))]
    work = [_Work(passes) for passes in each]
    for one in work:
        one.begin()
    while going := [one for one in work if one.wanted is not None]:
        first = going[0].session
        if first.most_parts == 1:  # sequences would push each other out of the only cache
            going[0].finish()
            continue
        together = [one for one in going if one.session is first][: first.most_parts]
        _run_together(first, together)
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
        with self._going_on():
            self.wanted = next(self._passes)

    def send(self, result: Any) -> None:
        with self._going_on():
            self.wanted = self._passes.send(result)

    def finish(self) -> None:
        while self.wanted is not None:
            _run_together(self.session, [self])

    def fail(self, error: EdgeLLMError) -> None:
        self.wanted, self.outcome = None, error
        self._passes.close()

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        try:
            yield
        except StopIteration as end:
            self.wanted, self.outcome = None, end.value
        except EdgeLLMError as error:
            self.wanted, self.outcome = None, error


def _run_together(session: Session, work: list[_Work]) -> None:
    try:
        results = _computed([one.wanted for one in work if one.wanted is not None])
    except EdgeLLMError as error:
        if len(work) == 1:
            work[0].fail(error)
        else:  # it may be one's fault alone
            for one in work:
                _run_together(session, [one])
        return
    for one, result in zip(work, results, strict=True):
        if one.wanted is not None:
            one.wanted.answers = len(work)
        one.send(result)


def _computed(parts: Sequence[Wanted]) -> Sequence[Any]:
    """The results of parts of one session, which ask for the same kind of them."""
    session: Any = parts[0].session
    return (session.ask_many if parts[0].asks else session.run_many)([one.part for one in parts])


def _caught(action: Callable[[], T]) -> T | EdgeLLMError:
    try:
        return action()
    except EdgeLLMError as error:
        return error
