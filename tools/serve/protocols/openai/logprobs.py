"""Log-probabilities in the forms of OpenAI's chat and completions."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from edgellm.device_runtime.sampling.logprobs import TokenLogprobs
from edgellm.device_runtime.text.tokenizer import ChatTokenizer

_LEAST = -9999.0  # JSON has no infinities
_REPLACEMENT = "\ufffd".encode()


class TokenPlaces:
    """Bytes of tokens, and their offsets in the generated text.

    Hidden tokens have no bytes. Bytes of a partial character have the character's offset; bytes
    that are not UTF-8 are U+FFFD in the text, as the tokenizer's decoder writes them.
    """

    def __init__(self, tokenizer: ChatTokenizer, hidden: Collection[int]) -> None:
        """Start at offset 0; the text does not contain `hidden` tokens."""
        self.offset = 0  # of the next token, in characters, without a partial one
        self._tokenizer, self._hidden = tokenizer, hidden
        self._partial = b""  # the start of a character, which the next token may continue
        self._is_shown = False  # whether the text has a U+FFFD for `_partial`
        self.begins = False  # whether the next token starts a text

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token at the current offset."""
        if token_id in self._hidden:
            return b""
        return self._tokenizer.token_bytes(token_id, begins=self.begins)

    def advance(self, token_id: int, text: str = "", *, is_replaced: bool = False) -> int:
        """Move past a token; return its offset.

        Args:
            token_id: the token.
            text: the prompt, which may contain hidden tokens as text.
            is_replaced: the text has U+FFFD for the token, see `replaced`.
        """
        added = _REPLACEMENT if is_replaced else self.bytes_of(token_id)
        if token_id in self._hidden and text:
            word = self._tokenizer.token_text(token_id)
            added = word.encode() if text.startswith(word, self.offset) else added
        self.begins = self.begins and token_id in self._hidden
        if added and self._partial and not _continues(self._partial, added):
            self.offset += not self._is_shown
            self._partial = b""
        offset, data = self.offset, self._partial + added
        characters, num_used = codecs.utf_8_decode(data, "replace", False)
        self.offset, self._partial = offset + len(characters), data[num_used:]
        self._is_shown = self._is_shown and bool(self._partial)
        return offset

    def begin_output(self, prompt: str) -> None:
        """Move to the end of the prompt, which shows a partial character as U+FFFD."""
        self.offset, self._is_shown = len(prompt), bool(self._partial)

    def is_open(self, token_ids: Sequence[int]) -> bool:
        """Whether the next token decides if the last ones are characters, see `replaced`."""
        visible = [token_id for token_id in token_ids if token_id not in self._hidden]
        return bool(visible) and self._tokenizer.is_fallback_byte(visible[-1])

    def replaced(self, token_ids: Sequence[int]) -> list[bool]:
        """Whether the text has U+FFFD for each token.

        Decoders with byte fallback replace all bytes of a run that is not UTF-8. Hidden tokens do
        not end a run; the last run is complete, see `is_open`.
        """
        found = [False] * len(token_ids)
        visible = [at for at, token_id in enumerate(token_ids) if token_id not in self._hidden]
        is_byte = self._tokenizer.is_fallback_byte
        for is_run, run in itertools.groupby(visible, lambda at: is_byte(token_ids[at])):
            places = list(run)
            if is_run and not _is_utf8(b"".join(self.bytes_of(token_ids[at]) for at in places)):
                for at in places:
                    found[at] = True
        return found

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


def transcript_logprobs(
    entries: Iterable[TokenLogprobs], places: TokenPlaces
) -> list[dict[str, Any]]:
    """`logprobs` of transcripts: as `chat_logprobs`, of the tokens alone."""
    found = chat_logprobs(entries, places)
    for each in found:
        del each["top_logprobs"]
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
    given = list(entries)
    ids = [*([] if first_id is None else [first_id]), *(entry.token_id for entry in given)]
    replaced = iter(places.replaced(ids))
    found: dict[str, list[Any]] = {
        name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }

    def add(token_id: int, logprob: float | None, top: dict[str, float] | None) -> None:
        spelling = places.spelling_of(token_id)
        offset = places.advance(token_id, prompt, is_replaced=next(replaced))
        for each, value in zip(found.values(), (spelling, logprob, top, offset), strict=True):
            each.append(value)

    if first_id is not None:
        add(first_id, None, None)
    for entry in given:
        add(entry.token_id, max(entry.logprob, _LEAST), _likeliest(entry, places))
    return found


def _continues(partial: bytes, added: bytes) -> bool:
    """Whether `added` continues the character that `partial` starts."""
    return _is_utf8(partial + added[:1], is_whole=False)


def _is_utf8(data: bytes, *, is_whole: bool = True) -> bool:
    """Whether the data is UTF-8, or else may be its start."""
    try:
        codecs.utf_8_decode(data, "strict", is_whole)
    except UnicodeDecodeError:
        return False
    return True


def _likeliest(entry: TokenLogprobs, places: TokenPlaces) -> dict[str, float]:
    found: dict[str, float] = {}
    for token_id, logprob in entry.top:  # the likelier of equal spellings is first
        found.setdefault(places.spelling_of(token_id), max(logprob, _LEAST))
    return found
