"""Events of a request that the worker posts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.device_runtime.api.llm import Step
from edgellm.device_runtime.engine.profile import RoundCounts
from edgellm.device_runtime.sampling.logprobs import TokenLogprobs
from edgellm.device_runtime.transcription.transcriber import Transcript


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt was accepted, and prefilled if its log-probabilities are wanted."""

    prompt_tokens: int
    prompt_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of all prompt tokens except the first


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Statistics of a finished sequence, of an embedded text, or of a transcript."""

    finish_reason: str  # "stop" or "length"
    prompt_tokens: int
    cached_tokens: int  # prompt tokens from the prefix cache
    completion_tokens: int
    rounds: tuple[RoundCounts, ...]  # rounds with drafted tokens
    queue_ms: float
    first_token_ms: float  # from the arrival of the request
    generation_ms: float  # from the first token to the last
    stop_string: str | None = None  # the matched stop string
    seed: int | None = None  # that repeats the output; None: greedy
    embedding: NDArray[np.float32] | None = None  # [H], of a text
    transcript: Transcript | None = None  # of a recording

    @property
    def is_cut(self) -> bool:
        """Whether the maximum length, or the time, ended the output."""
        return self.finish_reason == "length"


@dataclass(frozen=True, slots=True)
class OutputSwitch:
    """The next events belong to sequence `at` of a request with several sequences."""

    at: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The request failed; no more events follow."""

    error: Exception


Event = Started | Step | Finished | Failed | OutputSwitch
