"""Concurrent requests of one reader, which takes their steps as they are computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.engine.sequence import Step
from edgellm.device_runtime.request_faults import is_fault
from edgellm.device_runtime.scheduler.request_output import RequestOutput
from edgellm.device_runtime.scheduler.running_batch import RunningRequest
from edgellm.device_runtime.scheduler.step_lock import StepLock

NewOutputs = tuple[RequestOutput, tuple[Step, ...]]


class BatchError(EdgeLLMError):
    """Some outputs of a batch failed; the others are complete.

    Attributes:
        answers: all outputs in order; `failure` holds the error of one that failed.
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
    """Requests of one reader, at most `maximum` at a time."""

    def __init__(self, step_lock: StepLock, answers: Iterable[RequestOutput], maximum: int) -> None:
        """Start with no running requests.

        Args:
            step_lock: the engine's step lock.
            answers: taken one by one, as soon as there is space.
            maximum: requests that run at a time.
        """
        self._step_lock, self._coming, self._maximum = step_lock, iter(answers), maximum
        self._fault: BaseException | None = None  # the error that ended the iterator of outputs
        self.entries = dict[RunningRequest, RequestOutput]()

    def fill(self) -> bool:
        """Start requests while there is space; return whether any are running.

        Raises:
            Exception: an output was iterated over before, or the next could not be made. All
                started requests are complete then.
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
                self._step_lock.enter(entry)
        if self._fault is not None and not entries:
            raise self._fault
        return bool(entries)

    def take(self, entry: RunningRequest, steps: Sequence[Step]) -> NewOutputs:
        """Add new steps to an output; remove its request when it is complete."""
        answer = self.entries[entry]
        answer.text += "".join(step.text for step in steps)
        if entry.is_done and not entry.steps:  # another thread may have computed more
            self._step_lock.leave(entry)
            del self.entries[entry]
            answer.failure, answer.is_complete = entry.failure, entry.failure is None
        return answer, tuple(steps)

    def drop(self) -> None:
        """Abandon all requests."""
        for entry in self.entries:
            self._step_lock.leave(entry)
        self.entries.clear()


def together(
    step_lock: StepLock, answers: Iterable[RequestOutput], maximum: int
) -> Iterator[NewOutputs]:
    """Iterate over the outputs of concurrent requests.

    Args:
        step_lock: the engine's step lock.
        answers: taken one by one, as soon as there is space.
        maximum: requests that run at a time.

    Yields:
        An output and its new steps. There may be none, or the last ones, when it is complete or
        has a `failure`. The others continue.

    Raises:
        Exception: see `ConcurrentRequests.fill`.
    """
    requests = ConcurrentRequests(step_lock, answers, maximum)
    try:
        while requests.fill():
            for entry, steps in step_lock.next([*requests.entries]):
                yield requests.take(entry, steps)
    finally:
        requests.drop()
