"""Batches the forward passes that the drafters of several sequences request.

A drafter is a generator: it yields a request for a pass and receives the result. So the
extensions of several drafts are one batch, and each level of all their trees is one too.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.request_faults import Confined, computed

T = TypeVar("T")


class Network(Protocol):
    """Computes forward passes of one network."""

    @property
    def max_batch_size(self) -> int:
        """Sequences in a pass."""
        ...

    def run_batch(self, parts: Sequence[Any], /) -> Sequence[Any]:
        """Results of at most `max_batch_size` parts, valid until the network runs again."""
        ...


class AsyncNetwork(Network, Protocol):
    """A network that runs passes asynchronously."""

    def run_async(self, parts: Sequence[Any], /) -> Sequence[Any]:
        """As `run_batch`, but each result is a callable that fetches it from the device."""
        ...


@dataclass(slots=True, kw_only=True)
class Wanted:
    """One sequence's part of a forward pass."""

    network: Network
    part: Any
    is_async: bool = False  # the network is an `AsyncNetwork`
    answers: int = 1  # batch size of the pass; set with the result


Passes = Generator[Wanted, Any, T]  # a result is consumed before the next part is yielded


def run(passes: Passes[T]) -> T:
    """The result of one drafter's passes; raises the errors of its network."""
    try:
        wanted = next(passes)
        while True:
            wanted = passes.send(_computed([wanted])[0])
    except StopIteration as end:
        return end.value


def run_all(each: Sequence[Passes[T]]) -> list[T | EdgeLLMError]:
    """The result of each drafter, or its error; passes run in batches."""
    if len(each) == 1:
        return [_outcome(each[0])]
    work = [_Work(passes) for passes in each]
    for one in work:
        one.begin()
    while pending := [one for one in work if one.wanted is not None]:
        first = pending[0].network
        if first.max_batch_size == 1:  # sequences would evict each other from the only cache
            pending[0].finish()
            continue
        batch = [one for one in pending if one.network is first][: first.max_batch_size]
        _run_batch(batch)
    return [one.outcome for one in work]


class _Work:
    """The generator of one drafter, with its pending request and its result."""

    def __init__(self, passes: Passes[Any]) -> None:
        self._passes = passes
        self.wanted: Wanted | None = None
        self.outcome: Any = None

    @property
    def network(self) -> Network:
        assert self.wanted is not None
        return self.wanted.network

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
            _run_batch([self])

    def fail(self, error: EdgeLLMError) -> None:
        self.wanted, self.outcome = None, error
        with Confined(lambda _: None):  # the first error is recorded already
            self._passes.close()


def _run_batch(work: Sequence[_Work]) -> None:
    for one, (result, answers) in computed(work, _computed_for, _Work.fail):
        if one.wanted is not None:
            one.wanted.answers = answers
        one.send(result)


def _computed_for(work: Sequence[_Work]) -> list[tuple[Any, int]]:
    """The result of each drafter, with the batch size of the pass."""
    wanted = [one.wanted for one in work if one.wanted is not None]
    return [(result, len(work)) for result in _computed(wanted)]


def _computed(parts: Sequence[Wanted]) -> Sequence[Any]:
    """Results of parts of one network, all synchronous or all asynchronous."""
    network: Any = parts[0].network
    return (network.run_async if parts[0].is_async else network.run_batch)(
        [one.part for one in parts]
    )


def _outcome(passes: Passes[T]) -> T | EdgeLLMError:
    failures: list[EdgeLLMError] = []
    with Confined(failures.append):
        return run(passes)
    return failures[0]
