"""Log-probabilities in the two forms that OpenAI has for them."""

from __future__ import annotations

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
    entries: tuple[TokenLogprobs, ...], tokenizer: ChatTokenizer, offset: int
) -> dict[str, Any]:
    """`logprobs` of completions; `offset` is the length of the text before."""
    tokens = [tokenizer.token_text(entry.token_id) for entry in entries]
    offsets = [offset + sum(map(len, tokens[:index])) for index in range(len(tokens))]
    return {
        "tokens": tokens,
        "token_logprobs": [max(entry.logprob, _LEAST) for entry in entries],
        "top_logprobs": [
            {tokenizer.token_text(token_id): max(value, _LEAST) for token_id, value in entry.top}
            for entry in entries
        ],
        "text_offset": offsets,
    }
