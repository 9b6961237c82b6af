"""The output of a request: its steps, text, finish reason and timings."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Generator

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.engine.profile import PREFILL, Profile
from edgellm.device_runtime.engine.prompt import Prompt
from edgellm.device_runtime.engine.sequence import FinishReason, Sequence, Step
from edgellm.device_runtime.scheduler.running_batch import RunningRequest
from edgellm.device_runtime.scheduler.step_lock import StepLock, TaskReader


class RequestOutput:
    """An output that is extended while it is iterated over; complete when the iteration ends.

    Attributes:
        failure: the error that ended it early; set after all earlier steps have been read.
    """

    def __init__(self, entry: RunningRequest, step_lock: StepLock) -> None:
        self.text, self.is_complete = "", False
        self.failure: BaseException | None = None
        self._entry, self._step_lock = entry, step_lock
        self._begun = threading.Lock()

    @property
    def _sequence(self) -> Sequence:
        return self._entry.sequence

    @property
    def prompt(self) -> Prompt:
        """The prompt of the request."""
        return self._sequence.prompt

    @property
    def max_tokens(self) -> int:
        """Maximum number of output tokens."""
        return self._sequence.max_tokens

    @property
    def token_ids(self) -> list[int]:
        """Output tokens so far, including the end token."""
        return self._sequence.token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why generation ended; None while it runs."""
        return self._sequence.finish_reason

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended generation; None if something else did."""
        return self._sequence.stop_string

    @property
    def seed(self) -> int | None:
        """Seed that repeats the output; None: greedy outputs need none."""
        params = self._sequence.sampler.params
        return None if params.is_greedy else params.seed

    @property
    def warnings(self) -> list[str]:
        """Warnings for the user."""
        return self._sequence.warnings

    @property
    def profile(self) -> Profile:
        """Times of the stages of the request."""
        return self._sequence.profile

    @property
    def prompt_token_count(self) -> int:
        """Tokens of the prompt, including image tokens."""
        return len(self.prompt.token_ids)

    @property
    def before_pass(self) -> Callable[[], object] | None:
        """Called before every pass, by any thread; an exception ends the iteration."""
        return self._entry.before_pass

    @before_pass.setter
    def before_pass(self, asked: Callable[[], object]) -> None:
        self._entry.before_pass = asked

    def __iter__(self) -> Generator[Step, None, None]:
        """Yield the steps as they are computed, once.

        Raises:
            EdgeLLMError: it was iterated over before, or the engine was closed meanwhile.
        """
        return self._grow(self.begin())

    async def __aiter__(self) -> AsyncIterator[Step]:
        """As `__iter__`, without blocking the event loop."""
        import asyncio  # takes a hundredth of a second, which only async programs pay

        entry = self.begin()
        self._step_lock.enter(entry, TaskReader(asyncio.get_running_loop()))
        try:
            while not entry.is_read:
                for _, steps in await asyncio.to_thread(self._step_lock.next, [entry]):
                    for step in steps:
                        self.text += step.text
                        yield step
                if entry.failure is not None and entry.is_done and not entry.steps:
                    self.failure = entry.failure
                    raise entry.failure
            self.is_complete = True
        finally:  # also of a cancelled task, whose thread then computes one pass at most
            self._step_lock.leave(entry)

    def begin(self) -> RunningRequest:
        """The running request, for one reader; raises as `__iter__`."""
        if not self._begun.acquire(blocking=False):
            raise EdgeLLMError(
                "an output can be iterated over only once",
                hint="read its text and token_ids, or generate again",
            )
        return self._entry

    def _grow(self, entry: RunningRequest) -> Generator[Step, None, None]:
        try:
            self._step_lock.enter(entry)
            while not entry.is_read:
                for _, steps in self._step_lock.next([entry]):
                    for step in steps:
                        self.text += step.text
                        yield step
                if entry.failure is not None and entry.is_done and not entry.steps:
                    self.failure = entry.failure
                    raise entry.failure
            self.is_complete = True
        finally:
            self._step_lock.leave(entry)

    def timings(self) -> dict[str, float]:
        """Times in milliseconds, and rates, of this request."""
        prefill, decode = self.profile.total_ms(PREFILL), self.profile.decode_ms()
        decoded, rounds = max(len(self.token_ids) - 1, 0), self.profile.rounds
        reused = sum(self.profile.reused_tokens)
        computed = self.prompt_token_count - reused
        timings = {
            "prefill_ms": prefill,
            "generation_ms": decode,
            "reused_tokens": reused,
            "prefill_tokens_per_second": computed / prefill * 1e3 if prefill else 0.0,
            "generation_tokens_per_second": decoded / decode * 1e3 if decode else 0.0,
        }
        if rounds:
            timings["spec_verify_count"] = len(rounds)
            timings["spec_acceptance_length"] = sum(c.emitted for c in rounds) / len(rounds)
            timings |= self.profile.acceptance()
        return timings
