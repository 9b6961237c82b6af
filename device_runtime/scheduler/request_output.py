"""An answer as its reader sees it: the steps of a sequence, and what they came to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.engine.profile import PREFILL, Profile
from edgellm.device_runtime.engine.prompt import Prompt
from edgellm.device_runtime.engine.sequence import FinishReason, Sequence, Step
from edgellm.device_runtime.scheduler.running_batch import RunningRequest
from edgellm.device_runtime.scheduler.step_lock import StepLock, TaskReader


class RequestOutput:
    """An answer that grows while it is iterated over; complete when the iteration ends.

    Attributes:
        failure: why it ended before its time, when all steps before that have been read.
    """

    def __init__(self, entry: RunningRequest, turns: StepLock) -> None:
        self.text, self.is_complete = "", False
        self.failure: BaseException | None = None
        self._entry, self._turns = entry, turns
        self._begun = threading.Lock()

    @property
    def _sequence(self) -> Sequence:
        return self._entry.sequence

    @property
    def prompt(self) -> Prompt:
        """What it answers."""
        return self._sequence.prompt

    @property
    def max_tokens(self) -> int:
        """Its tokens at most."""
        return self._sequence.max_tokens

    @property
    def token_ids(self) -> list[int]:
        """Its tokens so far, the end token among them."""
        return self._sequence.token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None until that is known."""
        return self._sequence.finish_reason

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it; None where something else did."""
        return self._sequence.stop_string

    @property
    def warnings(self) -> list[str]:
        """What is to be said about it."""
        return self._sequence.warnings

    @property
    def profile(self) -> Profile:
        """Where its time went."""
        return self._sequence.profile

    @property
    def prompt_token_count(self) -> int:
        """Tokens of the prompt, those of images among them."""
        return len(self.prompt.token_ids)

    @property
    def before_pass(self) -> Callable[[], object] | None:
        """Asked before every pass, by any thread; what it raises ends the iteration."""
        return self._entry.before_pass

    @before_pass.setter
    def before_pass(self, asked: Callable[[], object]) -> None:
        self._entry.before_pass = asked

    def __iter__(self) -> Generator[Step, None, None]:
        """Yield the steps as they are computed, once.

        Raises:
            EdgeLLMError: it was iterated over before; while it is, the engine was closed.
        """
        return self._grow(self.begin())

    async def __aiter__(self) -> AsyncIterator[Step]:
        """The same, without keeping the event loop from others; raises as `__iter__`."""
        entry = self.begin()
        self._turns.enter(entry, TaskReader(asyncio.get_running_loop()))
        try:
            while not entry.is_read:
                for _, steps in await asyncio.to_thread(self._turns.next, [entry]):
                    for step in steps:
                        self.text += step.text
                        yield step
                if entry.failure is not None and entry.is_done and not entry.steps:
                    self.failure = entry.failure
                    raise entry.failure
            self.is_complete = True
        finally:  # also of a cancelled task, whose thread then computes one pass at most
            self._turns.leave(entry)

    def begin(self) -> RunningRequest:
        """What is read of it from now on, by one reader; raises as `__iter__`."""
        if not self._begun.acquire(blocking=False):
            raise EdgeLLMError(
                "an answer is iterated over once",
                hint="read its text and token_ids, or ask again",
            )
        return self._entry

    def _grow(self, entry: RunningRequest) -> Generator[Step, None, None]:
        try:
            self._turns.enter(entry)
            while not entry.is_read:
                for _, steps in self._turns.next([entry]):
                    for step in steps:
                        self.text += step.text
                        yield step
                if entry.failure is not None and entry.is_done and not entry.steps:
                    self.failure = entry.failure
                    raise entry.failure
            self.is_complete = True
        finally:
            self._turns.leave(entry)

    def timings(self) -> dict[str, float]:
        """Milliseconds and rates of this answer."""
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
