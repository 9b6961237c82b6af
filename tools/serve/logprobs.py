"""Log-probabilities in the two forms that OpenAI has for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgellm.device_runtime.sampling.logprobs import TokenLogprobs
from edgellm.device_runtime.tokenizer import ChatTokenizer

_LEAST = -9999.0  # JSON has no infinities


def chat_logprobs(
    entries: tuple[TokenLogprobs, ...], tokenizer: ChatTokenizer
) -> list[dict[str, Any]]:
    """`logprobs.content` of chat completions."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.token_text(token_id)
        # A token may be a part of a character; its bytes are not known from here.
        whole = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, _LEAST), "bytes": whole}

    return [
        one(entry.token_id, entry.logprob) | {"top_logprobs": [one(*top) for top in entry.top]}
        for entry in entries
    ]


def completion_logprobs(
    entries: Sequence[TokenLogprobs],
    tokenizer: ChatTokenizer,
    offset: int,
    first_id: int | None = None,
) -> dict[str, Any]:
    """`logprobs` of completions.

    Args:
        entries: tokens and their log-probabilities.
        tokenizer: of the model.
        offset: length of the text before.
        first_id: of a token before them that has no log-probability: nothing was before it.
    """
    first = [] if first_id is None else [first_id]
    before = [None for _ in first]
    tokens = [tokenizer.token_text(one) for one in (*first, *(each.token_id for each in entries))]
    offsets = [offset + sum(map(len, tokens[:index])) for index in range(len(tokens))]
    return {
        "tokens": tokens,
        "token_logprobs": [*before, *(max(entry.logprob, _LEAST) for entry in entries)],
        "top_logprobs": [*before, *(_likeliest(entry, tokenizer) for entry in entries)],
        "text_offset": offsets,
    }


def _likeliest(entry: TokenLogprobs, tokenizer: ChatTokenizer) -> dict[str, float]:
    return {tokenizer.token_text(one): max(value, _LEAST) for one, value in entry.top}
