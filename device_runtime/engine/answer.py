"""An answer as its reader sees it: the steps of a sequence, and what they came to."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator

from edgellm.contract import EdgeLLMError
from edgellm.device_runtime.engine.profile import PREFILL, Profile
from edgellm.device_runtime.engine.prompt import Prompt
from edgellm.device_runtime.engine.sequence import FinishReason, Sequence, Step


class Answer:
    """An answer that grows while it is iterated over; complete when the iteration ends."""

    def __init__(self, sequence: Sequence, steps: Iterator[Step]) -> None:
        self.text = ""
        self._sequence, self._steps = sequence, steps
        self._begun = threading.Lock()

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

    def __iter__(self) -> Generator[Step, None, None]:
        """Yield the steps as they are computed, once.

        Raises:
            EdgeLLMError: it was iterated over before; while it is, the engine was closed.
        """
        if not self._begun.acquire(blocking=False):
            raise EdgeLLMError(
                "an answer is iterated over once",
                hint="read its text and token_ids, or ask again",
            )
        return self._grow()

    def _grow(self) -> Generator[Step, None, None]:
        steps, self._steps = self._steps, iter(())  # so that a caller who stops lets the engine go
        for step in steps:
            self.text += step.text
            yield step

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
