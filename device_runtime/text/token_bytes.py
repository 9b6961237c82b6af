"""Bytes that each token adds to a text, which may be part of a character."""

from __future__ import annotations

import re

from tokenizers import Tokenizer

_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
_BEFORE = "a"  # a token that decoders do not change


class TokenBytes:
    """Spells tokens as the tokenizer's decoder does, for all families."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Detect how the decoder writes bytes."""
        self._tokenizer = tokenizer
        self._bytes = _byte_level() if self._decoded("Ġ") == " " else {}
        self._falls_back = self._decoded("<0x41>") == "A"

    def of(self, token_id: int, *, begins: bool = False) -> bytes:
        """Bytes of a token; `begins`: as the first of a text, some decoders write no space."""
        token = self._tokenizer.id_to_token(token_id) or ""
        if self._bytes and all(character in self._bytes for character in token):
            return bytes(self._bytes[character] for character in token)
        if self._falls_back and (found := _FALLBACK.fullmatch(token)) is not None:
            return bytes.fromhex(found[1])
        if begins:
            return self._decoded(token).encode()
        before = self._decoded(_BEFORE)
        return self._decoded(_BEFORE, token)[len(before) :].encode()

    def is_fallback(self, token_id: int) -> bool:
        """Whether the decoder writes the token as one byte, in a run with its neighbours."""
        token = self._tokenizer.id_to_token(token_id) or ""
        return self._falls_back and _FALLBACK.fullmatch(token) is not None

    def _decoded(self, *tokens: str) -> str:
        decoder = self._tokenizer.decoder
        return " ".join(tokens) if decoder is None else decoder.decode([*tokens])


def _byte_level() -> dict[str, int]:
    """GPT-2's character for each byte: itself if printable, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    found = {chr(byte): byte for byte in printable}
    return found | {chr(0x100 + at): byte for at, byte in enumerate(others)}
