"""The engine behind the server: loading it, and starting the answer to one request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgellm.device_runtime.engine.arguments import MAX_STALL_MS
from edgellm.device_runtime.engine.llm import LLM, Answer
from edgellm.device_runtime.sampling.sampler import SamplingParams
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.multimodal.sources import Source


@dataclass(frozen=True, slots=True)
class Ask:
    """What one request wants from the engine."""

    prompt: str | tuple[int, ...] | list[dict[str, Any]]  # raw text, token ids, or messages
    sampling: SamplingParams
    max_tokens: int | None = None  # None: as many as the cache has room for
    stop: tuple[str, ...] = ()
    images: tuple[Source, ...] = ()  # paths or data: URIs, films, as the messages have placeholders
    template_flags: Mapping[str, Any] = field(default_factory=dict)
    shown_tokens: tuple[str, ...] = ()  # special tokens that are to be read in the answer
    priority: int = 0  # smaller goes first
    prompt_logprobs: int | None = None  # of the prompt, with so many of the likeliest tokens


@dataclass(frozen=True, slots=True)
class Embed:
    """A text that is to be embedded."""

    text: str | tuple[int, ...]

    def token_ids(self, llm: LLM) -> list[int]:
        """Of the text, special tokens as the tokenizer has them."""
        if isinstance(self.text, str):
            return llm.tokenizer.encode(self.text, add_special_tokens=True)
        return [*self.text]


def load(
    engine_dir: Path,
    multimodal_engine_dir: Path | None,
    how: SpecOptions | None,
    *,
    context_reuse: bool,
    allow_special_tokens: bool = False,
    verify: bool | None,
    max_stall_ms: float = MAX_STALL_MS,
) -> LLM:
    """The engine of a server; raises what `LLM` raises."""
    return LLM(
        engine_dir, verify=verify, spec=how, multimodal_engine_dir=multimodal_engine_dir,
        context_reuse=context_reuse, allow_special_tokens=allow_special_tokens,
        max_stall_ms=max_stall_ms,
    )  # fmt: skip


def start(llm: LLM, ask: Ask) -> Answer:
    """An answer that is not iterated over yet; images are encoded.

    Raises:
        RequestError: the template refuses the messages, an image cannot be read, nothing fits.
    """
    prompt = ask.prompt
    if isinstance(prompt, list):
        prompt = llm.formatter.format(prompt, ask.template_flags)
    return llm.generate_text(
        prompt,
        images=ask.images,
        add_special_tokens=not isinstance(ask.prompt, list),
        sampling=ask.sampling,
        max_generate_length=ask.max_tokens or llm.manifest.max_kv_cache_capacity,
        stop=ask.stop,
        shown_tokens=ask.shown_tokens,
        priority=ask.priority,
    )
