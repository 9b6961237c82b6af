"""Converts a GGUF file's tokenizer to tokenizer.json, tokenizer_config.json and chat template.

Sources: the GGUF specification's `tokenizer.ggml.*` keys, the pre-tokenizer patterns that the
original models publish, and llama.cpp's `conversion/bert.py` and `src/llama-vocab.cpp`. Covered
are byte-level BPE ("gpt2"), SentencePiece BPE ("llama"), the same with stored merges ("gemma4"),
WordPiece ("bert") and SentencePiece's unigrams ("t5", of XLM-RoBERTa).
"""

from __future__ import annotations

import json
import logging
import string
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram, WordPiece
from tokenizers.processors import TemplateProcessing

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.tokenizer import (
    CHAT_TEMPLATE,
    KIMI_WORDS,
    TOKENIZER,
    TOKENIZER_CONFIG,
)

_CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 3, 4, 5, 6  # values of tokenizer.ggml.token_type
_SPACE, _CONTINUING = "▁", "##"  # before pieces that begin a word; before others in WordPiece

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_SEED = _QWEN2.replace(r"]+[\r\n]*|", r"]+|")  # line feeds do not belong to marks before them
# Marks belong to words.
_MARKED = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_NOT_MARKED = _REST.replace(r"\p{L}", r"\p{L}\p{M}")
_QWEN35 = rf"{_CONTRACTIONS}|{_MARKED}|\p{{N}}|{_NOT_MARKED}"
# Words that change from upper case to lower case once.
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+"
_CAPITALS = rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
_SLASHES = _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)
_GPT4O = rf"{_CASED}{_CONTRACTIONS}?|{_CAPITALS}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_SLASHES}"
_TEKKEN = rf"{_CASED}|{_CAPITALS}|\p{{N}}|{_SLASHES}"
_LLAMAS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2")
_PATTERNS = {
    **dict.fromkeys(_LLAMAS, _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "hunyuan"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "kimi-k2": KIMI_WORDS,
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    "seed-coder": _SEED,
}
# Patterns that apply one after the other.
_SEQUENCES = {
    "default": (  # llama.cpp's
        r"[\p{P}\$\+<=>\^~\|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\p{N}+",
        r"[0-9][0-9][0-9]",
    ),
    "hunyuan-dense": (
        r"\p{N}{1,3}",
        "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
        r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
_WHOLE_FIRST = (*_LLAMAS, "tekken")
_PLAIN = ("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "trillion",
          "granite-docling", "modern-bert")  # fmt: skip
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
_NFC = ("qwen2", "qwen35", "deepseek-r1-qwen", "modern-bert")
_BEGINNING = ("llama", "gemma4", "bert", "t5")  # models whose texts have a first token by default
# llama.cpp's ids of BERT's special tokens in files that lack them
_OF_BERT = {"bos": 101, "unknown": 100, "seperator": 102, "padding": 0}

_NO_SPLITTING = (
    "warning: the GGUF file has no tokenizer.ggml.pre: text is split by llama.cpp's default, which "
    "may not be the model's own; convert the model again to have it"
)
# Texts of end-of-turn and end-of-text tokens in llama.cpp, independent of the metadata's ids.
_ENDS = {
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
    *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<end_of_turn>", "<turn|>"),
    *("<|tool_response>", "<end_of_utterance>", "[e~[", "_<EOT>"),
    "<\uff5cend▁of▁sentence\uff5c>",
}
# The same for control tokens only: Gemma's </s> is strikethrough in text.
_CONTROL_ENDS = {"</s>", "<eos>", "<EOT>", "[EOT]", "[EOS]"}
_CALLS, _LAST = {"<|call|>", "<|calls|>"}, {"<|return|>", "<|flush|>"}

Get = Callable[..., Any]


def end_ids(get: Get) -> set[int]:
    """End-of-sequence tokens: by the ids of end of text, turn and message, and by their texts.

    Args:
        get: look-up of a metadata key, with an optional default.
    """
    tokens: list[str] = get("tokenizer.ggml.tokens")
    eos, *others = (_special_id(get, tokens, name) for name in ("eos", "eot", "eom"))
    found = {tokens[index]: index for index in others if index is not None}
    found |= _ends_by_text(get, tokens)
    if _CALLS & found.keys() and _LAST & found.keys():
        found.pop("<|end|>", None)  # there it ends a message, after which others follow
    return {*found.values()} | (set() if eos is None else {eos})


def _special_id(get: Get, tokens: list[str], name: str) -> int | None:
    """The id of a token with a role, None where the file names none."""
    token_id = get(f"tokenizer.ggml.{name}_token_id")
    if token_id is None or (type(token_id) is int and 0 <= token_id < len(tokens)):
        return token_id
    raise ValueError(f"tokenizer.ggml.{name}_token_id {token_id!r} is none of its tokens")


def _switch(get: Get, name: str, default: bool) -> bool:
    value = get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise TypeError(f"tokenizer.ggml.{name} is {value!r}, not true or false")
    return value


def _ends_by_text(get: Get, tokens: list[str]) -> dict[str, int]:
    types: list[int] = get("tokenizer.ggml.token_type", [1] * len(tokens))
    return {
        token: index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if token in _ENDS or (kind == _CONTROL and token in _CONTROL_ENDS)
    }


def convert_tokenizer(get: Get) -> dict[str, bytes]:
    """The files of a bundle's tokenizer.

    Args:
        get: look-up of a metadata key, with an optional default.

    Raises:
        UnsupportedModelError: an unknown tokenizer model or pre-tokenizer.
    """
    model = get("tokenizer.ggml.model")
    makers = {
        "gpt2": _byte_level,
        "llama": _sentencepiece,
        "gemma4": _sentencepiece,
        "bert": _wordpiece,
        "t5": _unigram,
    }
    if model not in makers:
        raise UnsupportedModelError(
            f"GGUF tokenizer {model!r} is not supported", hint=f"supported: {', '.join(makers)}"
        )
    tokens: list[str] = get("tokenizer.ggml.tokens")
    types: list[int] = get("tokenizer.ggml.token_type", [1] * len(tokens))
    ends = _ends_by_text(get, tokens).values()  # control tokens, whatever their type in the file
    types = [_CONTROL if index in ends else kind for index, kind in enumerate(types)]
    if model == "bert":
        get = _with_ids_of_bert(get, len(tokens))
        pairs = zip(tokens, types, strict=True)
        tokens = [_wordpiece_text(token, kind) for token, kind in pairs]
    tokenizer = makers[model](get, tokens, types)
    for kind, special in ((_USER_DEFINED, False), (_CONTROL, True)):
        added = [
            AddedToken(token, normalized=False, special=special)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type == kind
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    config = _special_tokens(get, tokens)
    _frame(
        tokenizer,
        get,
        tokens,
        begins=model in _BEGINNING or get("tokenizer.ggml.pre", "") in _WHOLE_FIRST,
    )
    files = {
        TOKENIZER: _short(tokenizer.to_str()).encode("utf-8"),
        TOKENIZER_CONFIG: json.dumps(config, indent=2).encode("utf-8"),
    }
    if template := get("tokenizer.chat_template"):
        files[CHAT_TEMPLATE] = template.encode("utf-8")
    return files


def _short(content: str) -> str:
    """A tokenizer.json whose merges are texts, which load a quarter faster than pairs of texts."""
    tokenizer = json.loads(content)
    merges = tokenizer["model"].get("merges") or []
    if any(" " in first + second or first.startswith("#version") for first, second in merges):
        return content  # such texts would be read as other merges
    tokenizer["model"]["merges"] = [" ".join(pair) for pair in merges]
    return json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":"))


def _frame(tokenizer: Tokenizer, get: Get, tokens: list[str], *, begins: bool) -> None:
    """Add the tokens around each text; with `begins` the first one unless the file denies it.

    Between the texts of a pair, BERT has one separator and XLM-RoBERTa two.
    """
    model = get("tokenizer.ggml.model")
    first = _special_id(get, tokens, "bos")
    last = _special_id(get, tokens, "eos")
    if not _switch(get, "add_bos_token", begins):
        first = None
    if not _switch(get, "add_eos_token", model == "t5"):
        adds_separator = _switch(get, "add_sep_token", model == "bert")
        # The specification's spelling.
        last = _special_id(get, tokens, "seperator") if adds_separator else None
    around = {tokens[index]: index for index in (first, last) if index is not None}
    if not around:
        return
    begin, end = _token(tokens, first), _token(tokens, last)
    pairs = {
        "bert": [*begin, "$A", *end, "$B:1", *(f"{token}:1" for token in end)],
        "t5": [*begin, "$A", *end, *end, "$B", *end],
    }
    tokenizer.post_processor = TemplateProcessing(
        single=[*begin, "$A", *end], pair=pairs.get(model), special_tokens=[*around.items()]
    )


def _with_ids_of_bert(get: Get, count: int) -> Get:
    """The look-up with llama.cpp's ids of special tokens that a file of `count` tokens lacks."""

    def found(key: str, default: Any = None) -> Any:
        name = key.removeprefix("tokenizer.ggml.").removesuffix("_token_id")
        own = _OF_BERT.get(name, count)
        if name == "bos":  # written as its own role by older converters
            own = get("tokenizer.ggml.cls_token_id", own)
        return get(key, own if own < count else default)

    return found


def _token(tokens: list[str], index: int | None) -> list[str]:
    return [] if index is None else [tokens[index]]


def _special_tokens(get: Get, tokens: list[str]) -> dict[str, str]:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: _special_id(get, tokens, key) for name, key in names.items()}
    return {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}


def _stored_merges(get: Get, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for text in get("tokenizer.ggml.merges"):  # the library raises a bare Exception
        merge = tuple(text.split(" "))
        known = all(part in vocabulary for part in (*merge, "".join(merge)))
        if len(merge) != 2 or not known:
            raise ValueError(f"the merge {text!r} is not of the vocabulary")
        merges.append(merge)
    return merges


def _scored_merges(get: Get, vocabulary: dict[str, int], types: list[int]) -> list[tuple[str, str]]:
    """Merges that follow from the scores of the tokens."""
    scores: list[float] = get("tokenizer.ggml.scores")
    merges: list[tuple[float, tuple[str, str]]] = []
    for token, token_type in zip(vocabulary, types, strict=True):
        if token_type in (_CONTROL, _BYTE):
            continue
        pairs = [
            (token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in vocabulary and token[cut:] in vocabulary
        ]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(scores[vocabulary[token]], pair) for pair in pairs]
    merges.sort(key=lambda merge: merge[0], reverse=True)
    return [pair for _, pair in merges]


def _byte_level(get: Get, tokens: list[str], types: list[int]) -> Tokenizer:
    del types
    if not (kind := get("tokenizer.ggml.pre", "")):
        kind = "default"
        logging.getLogger(__name__).warning(_NO_SPLITTING)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = _stored_merges(get, vocabulary)
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=kind in _WHOLE_FIRST))
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if kind in _PLAIN:
        tokenizer.pre_tokenizer = plain
    elif kind in _SEQUENCES:
        patterns = _SEQUENCES[kind]
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, whole])
    elif kind in _SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, plain])
    elif kind in _PATTERNS:
        split = pre_tokenizers.Split(Regex(_PATTERNS[kind]), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
    else:
        raise UnsupportedModelError(
            f"GGUF pre-tokenizer {kind!r} is not supported",
            hint="supported: "
            + ", ".join(sorted((*_PLAIN, *_SEQUENCES, *_SINGLE_DIGITS, *_PATTERNS))),
        )
    if kind in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(get: Get, tokens: list[str], types: list[int]) -> Tokenizer:
    """SentencePiece BPE: unknown characters fall back to bytes."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if get("tokenizer.ggml.model") == "gemma4":
        merges = _stored_merges(get, vocabulary)
    else:
        merges = _scored_merges(get, vocabulary, types)
    unknown = tokens[_special_id(get, tokens, "unknown") or 0]
    tokenizer = Tokenizer(
        BPE(
            vocabulary,
            merges,
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    strip: list[Any] = []
    if _switch(get, "add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
        strip = [decoders.Strip(" ", 1, 0)]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _wordpiece_text(token: str, kind: int) -> str:
    """BERT's text of a token; files mark beginnings of words, and not their other pieces."""
    if kind == _CONTROL:
        return token
    return token[1:] if token.startswith(_SPACE) else f"{_CONTINUING}{token}"


def _wordpiece(get: Get, tokens: list[str], types: list[int]) -> Tokenizer:
    """BERT's tokenizer.

    Files may lack whether texts are lowercased: they are, unless all capital letters are tokens.
    """
    del types
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = _special_id(get, tokens, "unknown")
    if unknown is None:
        raise ValueError("tokenizer.ggml.unknown_token_id is missing")
    is_cased = all(letter in vocabulary for letter in string.ascii_uppercase)
    lowers = _switch(get, "normalizer.lowercase", not is_cased)
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token=tokens[unknown]))
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=lowers, strip_accents=_switch(get, "normalizer.strip_accents", lowers)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=_CONTINUING)
    return tokenizer


def _unigram(get: Get, tokens: list[str], types: list[int]) -> Tokenizer:
    """SentencePiece's unigrams.

    Converters fill the vocabulary with tokens that are never used, whose scores of -10000 would
    change that of unknown characters, which is below the lowest.
    """
    scores: list[float] = get("tokenizer.ggml.scores")
    pieces = [*zip(tokens, scores, types, strict=True)]
    while pieces and pieces[-1][2] == _UNUSED:
        pieces.pop()
    lowest = min(score for _, score, kind in pieces if kind != _UNUSED)
    vocabulary = [(token, max(score, lowest)) for token, score, _ in pieces]
    tokenizer = Tokenizer(
        Unigram(vocabulary, unk_id=_special_id(get, tokens, "unknown"), byte_fallback=False)
    )
    if charsmap := get("tokenizer.ggml.precompiled_charsmap"):
        tokenizer.normalizer = normalizers.Precompiled(bytes(each % 256 for each in charsmap))
    scheme = "always" if _switch(get, "add_space_prefix", True) else "never"
    steps: list[Any] = [pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme)]
    if _switch(get, "remove_extra_whitespaces", True):
        steps.insert(0, pre_tokenizers.WhitespaceSplit())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.Metaspace(_SPACE, prepend_scheme=scheme)
    return tokenizer
