"""A tiny tokenizer of each family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

NAMES = ("<unk>", "<s>", "</s>")  # special tokens: ids 0, 1, 2
_LETTERS = "▁abcdefghijklmnopqrstuvwxyzITHE<>/[]"
_SPACED = [("▁", end) for end in ("the", "x", "<", "y", "▁")]
_MERGES = [("t", "h"), ("th", "e"), ("s", ">"), *_SPACED]


def _sentencepiece(names: tuple[str, ...]) -> Tokenizer:
    """Pieces with byte fallback, as Llama 2's; no normalizer or pre-tokenizer yet."""
    words = [*names, *(f"<0x{byte:02X}>" for byte in range(256)), *_LETTERS]
    words += ["".join(merge) for merge in _MERGES]
    vocabulary = {word: index for index, word in enumerate(words)}
    return Tokenizer(
        models.BPE(vocabulary, [*_MERGES], unk_token=names[0], fuse_unk=True, byte_fallback=True)
    )


def _prepend(names: tuple[str, ...]) -> Tokenizer:
    made = _sentencepiece(names)
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = _pieces(decoders.Strip(" ", 1, 0))
    return made


def _pieces(*last: decoders.Decoder) -> decoders.Decoder:
    first = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse())
    return decoders.Sequence([*first, *last])


def _metaspace(scheme: str) -> Callable[[tuple[str, ...]], Tokenizer]:
    def made(names: tuple[str, ...]) -> Tokenizer:
        found = _sentencepiece(names)
        kind: Any = scheme
        found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
        found.decoder = _pieces(*([] if scheme == "never" else [decoders.Strip(" ", 1, 0)]))
        return found

    return made


def _byte_level(names: tuple[str, ...]) -> Tokenizer:
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("ð", "Ł"), ("s", ">")]
    words = [*names, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    made = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def _whole_words(names: tuple[str, ...]) -> Tokenizer:
    """As Llama 3's: a word that is a whole token is not merged."""
    merges = [("t", "h"), ("th", "e")]
    words = [*names, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    vocabulary = {word: index for index, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    split = pre_tokenizers.Split(" ", "merged_with_next")
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
    made.decoder = decoders.ByteLevel()
    return made


def _unigram(names: tuple[str, ...]) -> Tokenizer:
    """Control pieces have the highest score, so the model itself would take them."""
    pieces = [(name, 0.0) for name in names]
    pieces += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    pieces += [(letter, -5.0) for letter in _LETTERS] + [("▁the", -3.0), ("▁x", -3.5)]
    made = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")]
    )
    return made


def _wordpiece(names: tuple[str, ...]) -> Tokenizer:
    letters = [letter for letter in _LETTERS if letter != "▁"]
    words = [*names, *letters, *(f"##{letter}" for letter in letters), "the", "##the"]
    vocabulary = {word: index for index, word in enumerate(words)}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token=names[0]))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    return made


def _word_level(names: tuple[str, ...]) -> Tokenizer:
    words = [*names, "the", "x", "y", "[I]", "[/I]"]
    vocabulary = {word: index for index, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=names[0]))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


_MAKERS: dict[str, Callable[[tuple[str, ...]], Tokenizer]] = {
    "prepend": _prepend,
    "prepend_normalized": _prepend,
    "metaspace_first": _metaspace("first"),
    "metaspace_always": _metaspace("always"),
    "metaspace_never": _metaspace("never"),
    "byte_level": _byte_level,
    "whole_words": _whole_words,
    "unigram": _unigram,
    "unigram_normalized": _unigram,
    "wordpiece": _wordpiece,
    "wordpiece_normalized": _wordpiece,
    "word_level": _word_level,
}
FAMILIES = [*_MAKERS]


def make_tokenizer(family: str, names: tuple[str, ...] = NAMES) -> Tokenizer:
    """One of a family; `names` are those of its special tokens, ids 0 to 2."""
    made = _MAKERS[family](names)
    is_normalized = family.endswith("_normalized")  # as in Llama 2's first files
    made.add_special_tokens(
        [AddedToken(name, normalized=is_normalized, special=True) for name in names]
    )
    return made
