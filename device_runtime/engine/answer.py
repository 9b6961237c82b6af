"""What an answer consists of, and how it grows."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Literal

from edgellm.contract import EdgeLLMError
from edgellm.device_runtime.engine.profile import PREFILL, Profile
from edgellm.device_runtime.engine.prompt import Prompt
from edgellm.device_runtime.sampling.logprobs import TokenLogprobs
from edgellm.device_runtime.speculate.loop import Round

FinishReason = Literal["stop", "length"]  # "stop": end token or stop string


@dataclass(frozen=True, slots=True)
class Step:
    """What one pass added to the answer."""

    token_ids: tuple[int, ...]
    text: str  # whole characters only; may be empty
    round: Round | None = None  # the tree that gave them, when they were drafted
    pieces: tuple[str, ...] = ()  # the text that each token completed
    logprobs: tuple[TokenLogprobs, ...] = ()  # of the tokens, if the sampling asks for them


@dataclass(slots=True)
class Answer:
    """An answer that grows while it is iterated over; complete when the iteration ends."""

    prompt: Prompt
    max_tokens: int
    warnings: list[str]
    profile: Profile
    steps: Iterator[Step] = field(repr=False)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None  # None until it is known
    _begun: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def prompt_token_count(self) -> int:
        """Tokens of the prompt, those of images among them."""
        return len(self.prompt.token_ids)

    def __iter__(self) -> Generator[Step, None, None]:
        """Yield the steps as they are computed, once.

        Raises:
            EdgeLLMError: it was iterated over before; while it is, another answer was started.
        """
        if not self._begun.acquire(blocking=False):
            raise EdgeLLMError(
                "an answer is iterated over once",
                hint="read its text and token_ids, or ask again",
            )
        return self._grow()

    def _grow(self) -> Generator[Step, None, None]:
        steps, self.steps = self.steps, iter(())  # so that a caller who stops lets the engine go
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
