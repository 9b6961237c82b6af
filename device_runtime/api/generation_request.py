"""A request whose text is formatted, as `LLM`, files and servers hand it to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgellm.device_runtime.sampling.params import SamplingParams
from edgellm.multimodal.media import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request.

    Attributes:
        text: formatted text, or its token ids.
        images: images and videos of the text, in order.
        add_special_tokens: the tokenizer adds its special tokens; the text is raw.
        continues: the output continues the last message of the text.
        sampling: how tokens are chosen.
        max_generate_length: maximum number of tokens.
        stop: strings that end the output and are not part of it.
        speculative: False decodes plainly although the engine has a drafter.
        system_prompt: a prefix of the text that is pinned for later requests.
        shown_tokens: special tokens that the output's text contains.
        priority: smaller is scheduled first.
        lora: name of a loaded adapter.
    """

    text: str | Sequence[int]
    images: Sequence[Source] = ()
    add_special_tokens: bool
    continues: bool = False
    sampling: SamplingParams
    max_generate_length: int
    stop: Sequence[str]
    speculative: bool = True
    system_prompt: str | None = None
    shown_tokens: Sequence[str] = ()
    priority: int = 0
    lora: str | None = None
