"""Log-probabilities in the two forms that OpenAI has for them."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable
from typing import Any

from edgellm.device_runtime.sampling.logprobs import TokenLogprobs
from edgellm.device_runtime.text.tokenizer import ChatTokenizer

_LEAST = -9999.0  # JSON has no infinities


class TokenPlaces:
    """Bytes of tokens, and where they stand in a text that grows.

    A token that the text hides has no bytes. Bytes that are a part of a character stand where it
    begins.
    """

    def __init__(self, tokenizer: ChatTokenizer, hidden: Collection[int]) -> None:
        """Begin a text, which holds no `hidden` tokens."""
        self.offset = 0  # of the next token, in characters
        self._tokenizer, self._hidden = tokenizer, hidden
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self.begins = False  # whether the next token is the first of a text

    def bytes_of(self, token_id: int) -> bytes:
        """What a token adds in this place."""
        if token_id in self._hidden:
            return b""
        return self._tokenizer.token_bytes(token_id, begins=self.begins)

    def pass_by(self, token_id: int, text: str = "") -> None:
        """Go on after a token; `text`, a prompt, may spell a hidden one out."""
        added = self.bytes_of(token_id)
        if token_id in self._hidden and text:
            word = self._tokenizer.token_text(token_id)
            added = word.encode() if text.startswith(word, self.offset) else added
        self.offset += len(self._characters.decode(added))
        self.begins = self.begins and token_id in self._hidden

    def name_of(self, token_id: int) -> str:
        """A token's text; U+FFFD in place of a part of a character."""
        found = self.bytes_of(token_id)
        return found.decode(errors="replace") if found else self._tokenizer.token_text(token_id)

    def spelling_of(self, token_id: int) -> str:
        """The same, but bytes as OpenAI's completions spell a part of a character."""
        found = self.bytes_of(token_id)
        try:
            return found.decode() if found else self._tokenizer.token_text(token_id)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


def chat_logprobs(entries: Iterable[TokenLogprobs], places: TokenPlaces) -> list[dict[str, Any]]:
    """`logprobs.content` of chat completions; the places go on."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        name, own = places.name_of(token_id), list(places.bytes_of(token_id))
        return {"token": name, "logprob": max(logprob, _LEAST), "bytes": own}

    found: list[dict[str, Any]] = []
    for entry in entries:
        top = [one(*each) for each in entry.top]
        found.append(one(entry.token_id, entry.logprob) | {"top_logprobs": top})
        places.pass_by(entry.token_id)
    return found


def completion_logprobs(
    entries: Iterable[TokenLogprobs],
    places: TokenPlaces,
    first_id: int | None = None,
    prompt: str = "",
) -> dict[str, Any]:
    """`logprobs` of completions; the places go on.

    Args:
        entries: tokens and their log-probabilities.
        places: of the tokens, in the text.
        first_id: of a token before them that has no log-probability: nothing was before it.
        prompt: that the text begins with, which may spell special tokens out.
    """
    found: dict[str, list[Any]] = {
        name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }

    def add(token_id: int, logprob: float | None, top: dict[str, float] | None) -> None:
        values = (places.spelling_of(token_id), logprob, top, places.offset)
        for each, value in zip(found.values(), values, strict=True):
            each.append(value)
        places.pass_by(token_id, prompt)

    if first_id is not None:
        add(first_id, None, None)
    for entry in entries:
        add(entry.token_id, max(entry.logprob, _LEAST), _likeliest(entry, places))
    return found


def _likeliest(entry: TokenLogprobs, places: TokenPlaces) -> dict[str, float]:
    found: dict[str, float] = {}
    for token_id, logprob in entry.top:  # of two that are spelled alike the likelier one is first
        found.setdefault(places.spelling_of(token_id), max(logprob, _LEAST))
    return found
