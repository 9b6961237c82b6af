"""What the worker tells of a request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.device_runtime.api.llm import Step
from edgellm.device_runtime.engine.profile import RoundCounts
from edgellm.device_runtime.sampling.logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt was accepted, and read if its log-probabilities are wanted."""

    prompt_tokens: int
    prompt_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of all of them but the first


@dataclass(frozen=True, slots=True)
class Finished:
    """The figures of a complete answer, or of a text that was embedded."""

    finish_reason: str  # "stop" or "length"
    prompt_tokens: int
    cached_tokens: int  # of the prompt: not computed again
    completion_tokens: int
    rounds: tuple[RoundCounts, ...]  # those in which something was drafted
    queue_ms: float
    first_token_ms: float  # from the arrival of the request
    generation_ms: float  # from the first token to the last
    stop_string: str | None = None  # that ended it
    embedding: NDArray[np.float32] | None = None  # [H], of a text

    @property
    def is_cut(self) -> bool:
        """Whether the maximum length, or the time, ended the output."""
        return self.finish_reason == "length"


@dataclass(frozen=True, slots=True)
class OutputSwitch:
    """What follows is of this text of a request that has several, grown side by side."""

    at: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ends here, answered or not."""

    error: Exception


Event = Started | Step | Finished | Failed | OutputSwitch
