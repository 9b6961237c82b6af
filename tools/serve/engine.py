"""The engine behind the server: loading it, and starting the answer to one request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgellm.contract import RequestError
from edgellm.device_runtime.llm import LLM, Answer
from edgellm.device_runtime.sampling import SamplingParams
from edgellm.device_runtime.speculate.options import SpecOptions
from edgellm.device_runtime.tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True)
class Ask:
    """What one request wants from the engine."""

    prompt: str | tuple[int, ...] | list[dict[str, Any]]  # raw text, token ids, or messages
    sampling: SamplingParams
    max_tokens: int | None = None  # None: as many as the cache has room for
    stop: tuple[str, ...] = ()
    images: tuple[str, ...] = ()  # paths or data: URIs, as the messages have placeholders
    template_flags: Mapping[str, Any] = field(default_factory=dict)


def load(
    engine_dir: Path,
    multimodal_engine_dir: Path | None,
    how: SpecOptions | None,
    *,
    context_reuse: bool,
    verify: bool | None,
) -> LLM:
    """The engine of a server; raises what `LLM` raises."""
    return LLM(
        engine_dir, verify=verify, spec=how, multimodal_engine_dir=multimodal_engine_dir,
        context_reuse=context_reuse,
    )  # fmt: skip


def start(llm: LLM, ask: Ask) -> Answer:
    """An answer that is not iterated over yet; images are encoded.

    Words of messages that read like special tokens stay words: only the chat template makes
    special tokens. In a raw prompt they are special tokens, since it comes without a template.

    Raises:
        RequestError: the template refuses the messages, an image cannot be read, nothing fits.
    """
    prompt = rendered(llm.tokenizer, ask) if isinstance(ask.prompt, list) else ask.prompt
    return llm.generate_text(
        prompt,
        images=ask.images,
        add_special_tokens=not isinstance(ask.prompt, list),
        sampling=ask.sampling,
        max_generate_length=ask.max_tokens or llm.manifest.max_kv_cache_capacity,
        stop=ask.stop,
    )


def rendered(tokenizer: ChatTokenizer, ask: Ask) -> str:
    """The messages of an `Ask` in the chat template, with the marks of `ChatTokenizer.as_text`.

    Raises:
        RequestError: the template refuses them.
    """
    try:
        messages = _as_text(tokenizer, ask.prompt)
        flags = {"add_generation_prompt": True, **_as_text(tokenizer, dict(ask.template_flags))}
        return tokenizer.render(messages, **flags)
    except RecursionError:
        raise RequestError("the messages are nested too deeply") from None


def _as_text(tokenizer: ChatTokenizer, value: Any) -> Any:
    """JSON whose strings, at any depth, hold no special tokens."""
    if isinstance(value, str):
        return tokenizer.as_text(value)
    if isinstance(value, list):
        return [_as_text(tokenizer, item) for item in value]
    if isinstance(value, dict):
        return {tokenizer.as_text(key): _as_text(tokenizer, item) for key, item in value.items()}
    return value
