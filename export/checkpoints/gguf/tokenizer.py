"""Converts a GGUF file's tokenizer to tokenizer.json, tokenizer_config.json and chat template.

Sources: the GGUF specification's `tokenizer.ggml.*` keys and the pre-tokenizer patterns that the
original models publish. Byte-level BPE ("gpt2"), SentencePiece BPE ("llama") and the same with
stored merges ("gemma4") are covered.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.tokenizer import (
    CHAT_TEMPLATE,
    KIMI_WORDS,
    TOKENIZER,
    TOKENIZER_CONFIG,
)

_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6  # values of tokenizer.ggml.token_type

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
          "granite-docling")  # fmt: skip
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
_NFC = ("qwen2", "qwen35", "deepseek-r1-qwen")

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
    makers = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _sentencepiece}
    if model not in makers:
        raise UnsupportedModelError(f"GGUF tokenizer {model!r} is not supported")
    tokens: list[str] = get("tokenizer.ggml.tokens")
    types: list[int] = get("tokenizer.ggml.token_type", [1] * len(tokens))
    ends = _ends_by_text(get, tokens).values()  # control tokens, whatever their type in the file
    types = [_CONTROL if index in ends else kind for index, kind in enumerate(types)]
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
        begins=model in ("llama", "gemma4") or get("tokenizer.ggml.pre", "") in _WHOLE_FIRST,
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
    """Add the tokens around each text; with `begins` the first one unless the file denies it."""
    first = _special_id(get, tokens, "bos")
    last = _special_id(get, tokens, "eos")
    if not _switch(get, "add_bos_token", begins):
        first = None
    if not _switch(get, "add_eos_token", False):
        adds_separator = _switch(get, "add_sep_token", False)
        # The specification's spelling.
        last = _special_id(get, tokens, "seperator") if adds_separator else None
    around = {tokens[index]: index for index in (first, last) if index is not None}
    if around:
        text = [*_token(tokens, first), "$A", *_token(tokens, last)]
        tokenizer.post_processor = TemplateProcessing(single=text, special_tokens=[*around.items()])


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
