"""What the engine is asked, and the beginning of the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from edgellm.device_runtime.api.llm import LLM, RequestOutput
from edgellm.device_runtime.engine import continuation
from edgellm.device_runtime.sampling.sampler import SamplingParams
from edgellm.multimodal.media import Source


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What one request wants from the engine."""

    prompt: str | tuple[int, ...] | list[dict[str, Any]]  # raw text, token ids, or messages
    sampling: SamplingParams
    max_tokens: int | None = None  # None: as many as the cache has room for
    stop: tuple[str, ...] = ()
    images: tuple[Source, ...] = ()  # paths or data: URIs, films, as the messages have placeholders
    template_flags: Mapping[str, Any] = field(default_factory=dict)
    shown_tokens: tuple[str, ...] = ()  # special tokens that are to be read in the answer
    priority: int = 0  # smaller goes first
    lora: str | None = None  # the adapter that answers
    prompt_logprobs: int | None = None  # of the prompt, with so many of the likeliest tokens

    def times(self, count: int | None) -> list[EngineRequest]:
        """Asked so many times, each with the next seed."""
        seeds = (self.sampling.seed + at for at in range(count or 1))
        return [replace(self, sampling=replace(self.sampling, seed=seed % 2**63)) for seed in seeds]


@dataclass(frozen=True, slots=True)
class EmbeddingJob:
    """A text that is to be embedded."""

    text: str | tuple[int, ...]
    lora: str | None = None  # the adapter that reads it

    def token_ids(self, llm: LLM) -> list[int]:
        """Of the text, special tokens as the tokenizer has them."""
        if isinstance(self.text, str):
            return llm.tokenizer.encode(self.text, add_special_tokens=True)
        return [*self.text]


def start(llm: LLM, ask: EngineRequest) -> RequestOutput:
    """An answer that is not iterated over yet; images are encoded.

    Raises:
        RequestError: the template refuses the messages, an image cannot be read, nothing fits.
    """
    prompt, continues = ask.prompt, False
    if isinstance(prompt, list):
        continues = continuation.goes_on(prompt, ask.template_flags)
        prompt = llm.formatter.format(prompt, ask.template_flags)
    return llm.generate_text(
        prompt,
        images=ask.images,
        add_special_tokens=not isinstance(ask.prompt, list),
        continues=continues,
        sampling=ask.sampling,
        max_generate_length=ask.max_tokens or llm.manifest.max_kv_cache_capacity,
        stop=ask.stop,
        shown_tokens=ask.shown_tokens,
        priority=ask.priority,
        lora=ask.lora,
    )
