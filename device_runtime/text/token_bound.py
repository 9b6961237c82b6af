"""Lower bound of a text's number of tokens, without tokenizing it."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer

_SHRINKING = 4  # at most: characters that normalization (NFC, NFKC) may turn into one
# Parts of tokenizers that keep all characters, up to `_SHRINKING`.
_NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend", "Replace", "ByteLevel")
_PRE_TOKENIZERS = ("ByteLevel", "Split", "Digits", "Metaspace", "Punctuation")


class TokenBound:
    """The bound of one tokenizer: its longest token, if every character becomes part of a token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Args: `tokenizer`, whose vocabulary is read once."""
        described = json.loads(tokenizer.to_str())
        texts = tokenizer.get_vocab(with_added_tokens=True)
        self._longest = max(map(len, texts), default=0) if _keeps_all(described) else 0

    def num_tokens(self, text: str) -> int:
        """At least this many tokens; 0 if the tokenizer may drop characters."""
        return len(text) // (self._longest * _SHRINKING) if self._longest else 0


def _keeps_all(described: dict[str, Any]) -> bool:
    """Whether the tokenizer has a token for every character of a text."""
    model = described["model"]
    before = _parts(described.get("pre_tokenizer"), "pretokenizers")
    has_bytes = any(each["type"] == "ByteLevel" for each in before)
    if model["type"] != "BPE" or not (has_bytes or model.get("byte_fallback")):
        return False  # an unknown word of any length may be one token
    return all(
        each["type"] in _PRE_TOKENIZERS and each.get("behavior") != "Removed" for each in before
    ) and all(
        each["type"] in _NORMALIZERS and not (each["type"] == "Replace" and _shortens(each))
        for each in _parts(described.get("normalizer"), "normalizers")
    )


def _shortens(replacement: dict[str, Any]) -> bool:
    text = replacement["pattern"].get("String")
    return text is None or len(replacement["content"]) < len(text)


def _parts(found: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """The members of a sequence, or the only part."""
    if found is None:
        return []
    if found["type"] != "Sequence":
        return [found]
    return [part for each in found[key] for part in _parts(each, key)]
