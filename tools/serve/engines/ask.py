"""Requests to the engine, and the start of their outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from edgellm.device_runtime.api.generation_request import GenerationRequest
from edgellm.device_runtime.api.llm import LLM, RequestOutput
from edgellm.device_runtime.api.pooler import EmbeddingInput, RerankInput
from edgellm.device_runtime.engine import continuation
from edgellm.device_runtime.sampling.params import SamplingParams
from edgellm.device_runtime.transcription.options import TranscriptionOptions
from edgellm.multimodal.media import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One generation request to the engine."""

    prompt: str | tuple[int, ...] | list[dict[str, Any]]  # raw text, token ids, or messages
    sampling: SamplingParams
    max_tokens: int | None = None  # None: the model's default, else the KV cache's capacity
    stop: tuple[str, ...] = ()
    images: tuple[Source, ...] = ()  # paths, data: URIs or videos, one a placeholder
    template_flags: Mapping[str, Any] = field(default_factory=dict)
    shown_tokens: tuple[str, ...] = ()  # special tokens that stay in the output
    priority: int = 0  # lower values run first
    lora: str | None = None  # name of the LoRA adapter
    prompt_logprobs: int | None = None  # number of top tokens with log-probabilities

    def times(self, count: int | None) -> list[EngineRequest]:
        """`count` copies of this request with consecutive seeds; None: one."""
        first = self.sampling.seed
        if first is None:  # greedy
            return [self] * (count or 1)
        seeds = (first + at for at in range(count or 1))
        return [replace(self, sampling=replace(self.sampling, seed=seed % 2**63)) for seed in seeds]


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionInput:
    """A recording for a speech model."""

    audio: bytes  # of a file
    options: TranscriptionOptions


# One sequence of a job
Ask: TypeAlias = EngineRequest | EmbeddingInput | RerankInput | TranscriptionInput


def start(llm: LLM, ask: EngineRequest) -> RequestOutput:
    """Create the output of a request; images are encoded, no token is generated yet.

    Raises:
        RequestError: the template rejects the messages, an image cannot be read, or the request
            does not fit.
    """
    prompt, continues = ask.prompt, False
    if isinstance(prompt, list):
        continues = continuation.goes_on(prompt, ask.template_flags)
        prompt = llm.formatter.format(prompt, ask.template_flags)
    length = ask.max_tokens or llm.defaults.max_generate_length
    return llm.generate_text(
        GenerationRequest(
            text=prompt,
            images=ask.images,
            add_special_tokens=not isinstance(ask.prompt, list),
            continues=continues,
            sampling=ask.sampling,
            max_generate_length=length or llm.manifest.max_kv_cache_capacity,
            stop=ask.stop,
            shown_tokens=ask.shown_tokens,
            priority=ask.priority,
            lora=ask.lora,
        )
    )
