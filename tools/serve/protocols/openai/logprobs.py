"""Log-probabilities in the forms of OpenAI's chat and completions."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable
from typing import Any

from edgellm.device_runtime.sampling.logprobs import TokenLogprobs
from edgellm.device_runtime.text.tokenizer import ChatTokenizer

_LEAST = -9999.0  # JSON has no infinities


class TokenPlaces:
    """Bytes of tokens, and their offsets in the generated text.

    Hidden tokens have no bytes. Bytes of a partial character have the character's offset.
    """

    def __init__(self, tokenizer: ChatTokenizer, hidden: Collection[int]) -> None:
        """Start at offset 0; the text does not contain `hidden` tokens."""
        self.offset = 0  # of the next token, in characters
        self._tokenizer, self._hidden = tokenizer, hidden
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self.begins = False  # whether the next token starts a text

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token at the current offset."""
        if token_id in self._hidden:
            return b""
        return self._tokenizer.token_bytes(token_id, begins=self.begins)

    def advance(self, token_id: int, text: str = "") -> None:
        """Move past a token; the prompt `text` may contain hidden tokens as text."""
        added = self.bytes_of(token_id)
        if token_id in self._hidden and text:
            word = self._tokenizer.token_text(token_id)
            added = word.encode() if text.startswith(word, self.offset) else added
        self.offset += len(self._characters.decode(added))
        self.begins = self.begins and token_id in self._hidden

    def name_of(self, token_id: int) -> str:
        """A token's text; U+FFFD replaces a partial character."""
        found = self.bytes_of(token_id)
        return found.decode(errors="replace") if found else self._tokenizer.token_text(token_id)

    def spelling_of(self, token_id: int) -> str:
        """A token's text; a partial character as hexadecimal bytes, as in OpenAI completions."""
        found = self.bytes_of(token_id)
        try:
            return found.decode() if found else self._tokenizer.token_text(token_id)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


def chat_logprobs(entries: Iterable[TokenLogprobs], places: TokenPlaces) -> list[dict[str, Any]]:
    """`logprobs.content` of chat completions; advances `places`."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        name, own = places.name_of(token_id), list(places.bytes_of(token_id))
        return {"token": name, "logprob": max(logprob, _LEAST), "bytes": own}

    found: list[dict[str, Any]] = []
    for entry in entries:
        top = [one(*each) for each in entry.top]
        found.append(one(entry.token_id, entry.logprob) | {"top_logprobs": top})
        places.advance(entry.token_id)
    return found


def completion_logprobs(
    entries: Iterable[TokenLogprobs],
    places: TokenPlaces,
    first_id: int | None = None,
    prompt: str = "",
) -> dict[str, Any]:
    """`logprobs` of completions; advances `places`.

    Args:
        entries: tokens and their log-probabilities.
        places: offsets of the tokens.
        first_id: the first token of the prompt, which has no log-probability.
        prompt: start of the text, which may contain special tokens as text.
    """
    found: dict[str, list[Any]] = {
        name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }

    def add(token_id: int, logprob: float | None, top: dict[str, float] | None) -> None:
        values = (places.spelling_of(token_id), logprob, top, places.offset)
        for each, value in zip(found.values(), values, strict=True):
            each.append(value)
        places.advance(token_id, prompt)

    if first_id is not None:
        add(first_id, None, None)
    for entry in entries:
        add(entry.token_id, max(entry.logprob, _LEAST), _likeliest(entry, places))
    return found


def _likeliest(entry: TokenLogprobs, places: TokenPlaces) -> dict[str, float]:
    found: dict[str, float] = {}
    for token_id, logprob in entry.top:  # the likelier of equal spellings is first
        found.setdefault(places.spelling_of(token_id), max(logprob, _LEAST))
    return found
