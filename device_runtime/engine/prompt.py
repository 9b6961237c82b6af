"""The prompt of a sequence: token ids, images and adapter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from edgellm.core.errors import PromptLengthError, RequestError
from edgellm.core.manifest import Engine
from edgellm.device_runtime.arrays import (
    ImageRows,
    LoadedAdapter,
    RowKey,
)
from edgellm.device_runtime.prefix_cache.pinned_prefixes import marked, row_keys
from edgellm.device_runtime.text.tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """Input of a sequence; ids of image and audio tokens start at the vocabulary's size."""

    token_ids: list[int]
    images: ImageRows | None = None  # None: text only
    adapter: LoadedAdapter | None = None  # None: the base alone

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """See `ImageRows`."""
        return () if self.images is None else self.images.spans

    def chunk_end(self, begin: int, max_rows: int) -> int:
        """End of a prefill chunk from `begin`: not inside a span, whose length may be more rows."""
        return whole_end(self.spans, begin, min(begin + max_rows, len(self.token_ids)))

    @property
    def keys(self) -> list[RowKey]:
        """Prefix cache keys; equal token ids may be tokens of different images."""
        return self.keys_of(self.token_ids)

    def keys_of(self, token_ids: list[int]) -> list[RowKey]:
        """Keys of a text with this prompt as its prefix."""
        images = self.images.keys if self.images is not None else {}
        return marked(row_keys(token_ids, images), self.adapter)


def whole_end(spans: Iterable[tuple[int, int]], begin: int, end: int) -> int:
    """End of a chunk [begin, end), moved out of a span: before it, or after one at `begin`."""
    inside = [(first, last) for first, last in spans if first < end < last]
    if not inside:
        return end
    first, last = inside[0]
    return first if first > begin else last


_LONG = 64  # characters for each token of the longest prompt; longer texts are checked first


def refuse_long(text: str, tokenizer: ChatTokenizer, engine: Engine) -> None:
    """Reject a prompt by its characters, since tokenizing megabytes takes seconds and gigabytes.

    Raises:
        PromptLengthError: the engine cannot take the prompt.
    """
    longest = engine.max_input_len
    if len(text) > _LONG * longest and (least := tokenizer.num_tokens_at_least(text)) > longest:
        raise PromptLengthError(
            f"the prompt has {len(text)} characters, which are more than {least} tokens; the "
            f"engine takes {longest}",
            hint="shorten it",
        )


def fit(prompt_tokens: int, wanted_tokens: int, engine: Engine) -> tuple[int, list[str]]:
    """Maximum new tokens after a prompt, and warnings.

    Raises:
        PromptLengthError: the engine cannot take the prompt.
    """
    longest, capacity = engine.max_input_len, engine.max_kv_cache_capacity
    if prompt_tokens == 0:
        raise RequestError("the prompt is empty")
    if prompt_tokens > longest:
        fits = prompt_tokens < engine.decoder.max_positions
        hint = f", or build with --maxInputLen {prompt_tokens}" if fits else ""
        raise PromptLengthError(
            f"the prompt has {prompt_tokens} tokens, the engine takes {longest}",
            hint="shorten it" + hint,
        )
    room = capacity - prompt_tokens
    if room < 1:
        raise PromptLengthError(
            f"the prompt of {prompt_tokens} tokens fills the KV cache of {capacity}",
            hint="build with a larger --maxKVCacheCapacity",
        )
    if wanted_tokens <= room:
        return wanted_tokens, []
    return room, [
        f"max_generate_length {wanted_tokens} cut to {room}: prompt and output share "
        f"a KV cache of {capacity} tokens"
    ]
