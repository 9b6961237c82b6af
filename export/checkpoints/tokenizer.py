"""Tokenizer files of a bundle, from a Hugging Face folder."""

from __future__ import annotations

import base64
import codecs
import importlib.util
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from edgellm.core.commands.extras import install
from edgellm.core.errors import (
    BrokenArtifactError,
    EdgeLLMError,
    UnsupportedModelError,
)
from edgellm.core.strict_json import parse

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
_SPECIAL_TOKENS = "special_tokens_map.json"
_DEFAULT_TEMPLATE = "additional_chat_templates/default.jinja"  # of several, each in a file
_TEMPLATE_FILE = "chat_template.json"
_ADDED_TOKENS = "added_tokens.json"
_ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_REMEDY = "copy or download the file again"
_TIKTOKEN, _RESERVED = "tiktoken.model", 256  # ids after those of the file, of special tokens
_TEKKEN = "tekken.json"
# By id, in files of versions up to 7 that list none
_TEKKEN_SPECIAL = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] "
    "[/TOOL_RESULTS] [TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] "
    "[SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
)
_TEKKEN_ROLES = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "tokenizer_class": "PreTrainedTokenizerFast",
}
_UNLISTED = ("v3", "v7")  # versions of files that may list no special tokens
# Versions with one form of conversations without tools, as mistral-common encodes them
_INSTRUCT_VERSIONS = ("v7", "v11", "v13")
# An image goes before a single text. mistral-common rejects system messages with audio before
# version 13, and in its template of version 13, too.
_INSTRUCT = """\
{%- macro text_of(content) -%}
    {%- if content is string %}{{- content }}
    {%- else %}
        {%- for part in content %}
            {%- if part['type'] != 'text' %}
                {{- raise_exception('Only messages of the user have images or audio.') }}
            {%- endif %}
            {{- part['text'] }}
        {%- endfor %}
    {%- endif %}
{%- endmacro -%}
{{- '<s>' }}
{%- set seen = namespace(system=false, last='assistant') %}
{%- for message in messages %}
    {%- set content = message['content'] %}
    {%- if message['role'] == 'system' %}
        {%- set seen.system = true %}
        {{- '[SYSTEM_PROMPT]' + text_of(content) + '[/SYSTEM_PROMPT]' }}
    {%- elif message['role'] not in ['user', 'assistant'] %}
        {{- raise_exception('Only the roles system, user and assistant are supported.') }}
    {%- elif message['role'] == seen.last %}
        {{- raise_exception('Messages of user and assistant must alternate, the user is first.') }}
    {%- elif message['role'] == 'assistant' %}
        {%- set seen.last = 'assistant' %}
        {{- text_of(content) + '</s>' }}
    {%- else %}
        {%- set seen.last = 'user' %}
        {{- '[INST]' }}
        {%- if content is string %}
            {{- content }}
        {%- else %}
            {%- set is_image_last = content | length == 2 and content[0]['type'] == 'text'
                and content[1]['type'] in ['image', 'image_url'] %}
            {%- for part in (content | reverse if is_image_last else content) %}
                {%- if part['type'] == 'text' %}
                    {{- part['text'] }}
                {%- elif part['type'] in ['image', 'image_url'] %}
                    {{- '[IMG]' }}
                {%- elif part['type'] not in ['audio', 'input_audio', 'audio_url'] %}
                    {{- raise_exception('Only text, images and audio are supported.') }}
                {%- elif seen.system %}
                    {{- raise_exception('With audio no system message is supported.') }}
                {%- else %}
                    {{- '[BEGIN_AUDIO][AUDIO]' }}
                {%- endif %}
            {%- endfor %}
        {%- endif %}
        {{- '[/INST]' }}
    {%- endif %}
{%- endfor %}
"""
# Words that change from upper case to lower case once; Chinese characters are apart.
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_BEFORE, _CONTRACTION = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_WORDS = (
    rf"[\p{{Han}}]+|{_BEFORE}[{_UPPER}]*[{_LOWER}]+{_CONTRACTION}"
    rf"|{_BEFORE}[{_UPPER}]+[{_LOWER}]*{_CONTRACTION}|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Classes beside published files of tiktoken, whose code has the pattern of words
_TIKTOKEN_WORDS = {"tokenization_kimi.TikTokenTokenizer": KIMI_WORDS}


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A bundle's tokenizer files."""

    files: dict[str, bytes]
    last_token: tuple[str, int] = ("", -1)  # of the highest id, with that id
    eos_token_id: int | None = None  # of its eos_token


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """tokenizer.json, tokenizer_config.json and, if the model has one, chat_template.jinja.

    A folder without tokenizer.json but with a SentencePiece model, or with a vocabulary and merges
    in two files, is converted by transformers; Mistral's tekken.json and Kimi's file of tiktoken
    without it. A folder of tekken.json without a template has Mistral's, if its version is known.

    Raises:
        EdgeLLMError: no tokenizer, or converting needs transformers.
        BrokenArtifactError: a file does not parse.
    """
    read = _reader(folder)
    if read is None:
        if not any(folder.glob("*.model")) and not (folder / "vocab.json").exists():
            raise EdgeLLMError(
                f"{folder} has no tokenizer.json", hint="copy the tokenizer beside the weights"
            )
        return _convert_slow(folder)
    files: dict[str, bytes] = {}
    try:
        files[TOKENIZER] = read(folder)
        tokenizer = Tokenizer.from_buffer(files[TOKENIZER])
        config = _read_config(folder, files)
        if read is _read_tekken:
            config = _TEKKEN_ROLES | config
            files[TOKENIZER_CONFIG] = json.dumps(config, indent=2).encode("utf-8")
        if _add_listed(tokenizer, folder, config) | _add_named(tokenizer, config):
            files[TOKENIZER] = tokenizer.to_str().encode("utf-8")
        end = tokenizer.token_to_id(_special_tokens(config).get("eos_token", ""))
    except EdgeLLMError:
        raise
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise BrokenArtifactError(
            f"the tokenizer of {folder} is damaged: {error}", hint=_REMEDY
        ) from None
    try:
        template = _chat_template(folder, config)
        if template is None and read is _read_tekken and _has_instruct_form(folder):
            template = _INSTRUCT
        if template is not None:
            files[CHAT_TEMPLATE] = template.encode("utf-8")
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # no text, or no UTF-8
        raise BrokenArtifactError(
            f"the chat template of {folder} is damaged: {error}", hint=_REMEDY
        ) from None
    return TokenizerFiles(files, _last(tokenizer), end)


def without_tokens(files: Mapping[str, bytes], size: int) -> tuple[dict[str, bytes], list[str]]:
    """Remove added tokens whose ids are `size` or larger: their text becomes ordinary text.

    llama.cpp's converter cuts the vocabulary in the same way. Gemma 3's image token and padding
    tokens that were added without rows in the embedding are such tokens. Tokens of the model's
    own vocabulary stay, since ordinary text contains them.

    Returns:
        The files, and the texts of the removed tokens.
    """
    if TOKENIZER not in files:
        return dict(files), []
    tokenizer = parse(files[TOKENIZER])
    added = tokenizer.get("added_tokens") or []
    removed = [token["content"] for token in added if token["id"] >= size]
    if not removed:
        return dict(files), []
    tokenizer["added_tokens"] = [token for token in added if token["id"] < size]
    model = tokenizer["model"]
    if isinstance(vocabulary := model.get("vocab"), dict):
        kept = {text: at for text, at in vocabulary.items() if at < size or text not in removed}
        model["vocab"] = kept
    elif isinstance(vocabulary, list):  # Unigram: texts with their scores
        is_tail = {text for text, _ in vocabulary[size:]} <= set(removed)
        model["vocab"] = vocabulary[:size] if is_tail else vocabulary
    content = json.dumps(tokenizer, ensure_ascii=False).encode("utf-8")
    return {**files, TOKENIZER: content}, removed


def last_token(files: Mapping[str, bytes]) -> tuple[str, int]:
    """The token of the highest id, with its id; ("", -1) without a tokenizer."""
    if TOKENIZER not in files:
        return "", -1
    return _last(Tokenizer.from_buffer(files[TOKENIZER]))


def _last(tokenizer: Tokenizer) -> tuple[str, int]:
    ids = tokenizer.get_vocab(with_added_tokens=True)
    return max(ids.items(), key=lambda item: item[1], default=("", -1))


def _without_bom(path: Path) -> bytes:
    """The bytes of a JSON file, without a mark that `tokenizers` and transformers reject."""
    return path.read_bytes().removeprefix(codecs.BOM_UTF8)


def _read_config(folder: Path, files: dict[str, bytes]) -> dict[str, Any]:
    """Read tokenizer_config.json into `files`; older folders have tokens in a separate file."""
    config: dict[str, Any] = {}
    if (folder / TOKENIZER_CONFIG).exists():
        files[TOKENIZER_CONFIG] = _without_bom(folder / TOKENIZER_CONFIG)
        config = _object(files[TOKENIZER_CONFIG], TOKENIZER_CONFIG)
    # transformers reads the second file if the first does not list the added tokens.
    if "added_tokens_decoder" not in config and (folder / _SPECIAL_TOKENS).exists():
        named = _object((folder / _SPECIAL_TOKENS).read_bytes(), _SPECIAL_TOKENS)
        if not named.items() <= config.items():
            config = {**config, **named}
            files[TOKENIZER_CONFIG] = json.dumps(config, indent=2).encode("utf-8")
    return config


def _add_listed(tokenizer: Tokenizer, folder: Path, config: dict[str, Any]) -> bool:
    """Add tokens that other files list, as transformers does; whether there were any.

    Raises:
        BrokenArtifactError: a token that tokenizer.json lacks would have another id than listed.
    """
    has = {repr(token) for token in tokenizer.get_added_tokens_decoder().values()}
    listed = sorted(_listed(folder, config).items())
    others = {at: token for at, token in listed if repr(token) not in has}
    missing = [at for at, token in others.items() if tokenizer.token_to_id(token.content) is None]
    tokenizer.add_tokens([*others.values()])
    for at in missing:
        token_id = tokenizer.token_to_id(others[at].content)
        if token_id != at:
            raise BrokenArtifactError(
                f"the tokenizer of {folder} lists {others[at].content!r} with id {at}; after the "
                f"tokens of {TOKENIZER} it would be {token_id}",
                hint=f"{TOKENIZER} is of another save, or lacks tokens; {_REMEDY}",
            )
    return bool(others)


def _listed(folder: Path, config: dict[str, Any]) -> dict[int, AddedToken]:
    """Added tokens by id as tokenizer_config.json lists them, or else the file of older folders."""
    if (found := config.get("added_tokens_decoder")) is not None:
        return {int(at): _added(token) for at, token in found.items()}
    if not (folder / _ADDED_TOKENS).exists():
        return {}
    ids = _object((folder / _ADDED_TOKENS).read_bytes(), _ADDED_TOKENS)
    special = {*_special_tokens(config).values(), *_additional(config)}
    return {
        int(at): AddedToken(text, normalized=text not in special, special=text in special)
        for text, at in ids.items()
    }


def _added(token: dict[str, Any]) -> AddedToken:
    return AddedToken(**{name: value for name, value in token.items() if name != "__type"})


def _add_named(tokenizer: Tokenizer, config: dict[str, Any]) -> bool:
    """Make tokens of a role special, as transformers does; whether one of them was not.

    What the vocabulary does not have stays unknown.
    """
    added = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    missing = [
        added.get(content, AddedToken(content, special=True))
        for content in dict.fromkeys(_special_tokens(config).values())
        if not (content in added and added[content].special)
        and tokenizer.token_to_id(content) is not None
    ]
    tokenizer.add_special_tokens(missing)
    return bool(missing)


def _additional(config: dict[str, Any]) -> list[str]:
    """Texts of special tokens without a role, or with one that only this model has."""
    found: list[Any] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = config.get(key) or []
        found += value.values() if isinstance(value, dict) else value
    texts = [value.get("content") if isinstance(value, dict) else value for value in found]
    return [text for text in texts if text and isinstance(text, str)]


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Texts of the tokens that have a role, as far as the config names them."""
    found = {name: config.get(name) for name in _ROLES}
    texts = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in found.items()
    }
    return {name: text for name, text in texts.items() if text and isinstance(text, str)}


def _object(text: bytes, name: str) -> dict[str, Any]:
    value = parse(text)
    if not isinstance(value, dict):
        raise TypeError(f"{name} does not hold a JSON object")
    return value


def _chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """The model's default template; separate files win over the entry in the config.

    Raises:
        UnsupportedModelError: named templates without a default, which transformers cannot apply.
    """
    for name in (CHAT_TEMPLATE, _DEFAULT_TEMPLATE):
        if (folder / name).exists():
            return (folder / name).read_text("utf-8")
    template, file = tokenizer_config.get("chat_template"), TOKENIZER_CONFIG
    if (folder / _TEMPLATE_FILE).exists():
        content = parse((folder / _TEMPLATE_FILE).read_text("utf-8"))
        template, file = content["chat_template"], _TEMPLATE_FILE
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    more = sorted(path.stem for path in (folder / _DEFAULT_TEMPLATE).parent.glob("*.jinja"))
    if template is None and more:
        template, file = dict.fromkeys(more), str(Path(_DEFAULT_TEMPLATE).parent)
    if not isinstance(template, dict):
        return template
    if not template:
        raise TypeError("it is empty")
    if "default" not in template:
        raise UnsupportedModelError(
            f"{folder / file} names the chat templates {', '.join(sorted(template))}, and none of "
            "them is the default",
            hint=f"name one of them default, or copy its text to {CHAT_TEMPLATE}",
        )
    return template["default"]


def _reader(folder: Path) -> Callable[[Path], bytes] | None:
    """Function that makes tokenizer.json of the folder; None: transformers has to."""
    if (folder / TOKENIZER).exists():
        return _read_json
    if (folder / _TEKKEN).exists():
        return _read_tekken
    words = _tiktoken_words(folder)
    return None if words is None else partial(_read_tiktoken, words=words)


def _read_json(folder: Path) -> bytes:
    return _without_bom(folder / TOKENIZER)


def _tiktoken_words(folder: Path) -> str | None:
    """Pattern of words beside a known file of tiktoken; None: another folder."""
    if not (folder / _TIKTOKEN).exists():
        return None
    classes = _tokenizer_config(folder).get("auto_map", {})
    found = classes.get("AutoTokenizer") if isinstance(classes, dict) else None
    names = found if isinstance(found, list) else [found]
    return next((_TIKTOKEN_WORDS[name] for name in names if name in _TIKTOKEN_WORDS), None)


def _read_tiktoken(folder: Path, words: str) -> bytes:
    """The tokenizer.json of a file with tokens in base64 and their ranks, a line each."""
    lines = (line.split() for line in (folder / _TIKTOKEN).read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    named = _listed(folder, _tokenizer_config(folder))
    special = (
        named.get(at, AddedToken(f"<|reserved_token_{at}|>", normalized=False, special=True))
        for at in range(len(ranks), len(ranks) + _RESERVED)
    )
    return _ranked(ranks, words, {}, special).to_str().encode("utf-8")


def _read_tekken(folder: Path) -> bytes:
    """The tokenizer.json of Mistral's tekken.json, whose special tokens have the first ids.

    Texts begin with `<s>`, as in mistral-common and in the tokenizer.json of published folders.
    """
    given = _object(_without_bom(folder / _TEKKEN), _TEKKEN)
    config = given["config"]
    special = _tekken_special(given)
    size = config.get("default_vocab_size", len(special) + len(given["vocab"]))
    entries = given["vocab"][: size - len(special)]  # files have more tokens than models
    if [entry["rank"] for entry in entries] != [*range(size - len(special))]:
        raise ValueError(f"the ranks of {_TEKKEN} do not count from 0 to {size - len(special)}")
    ranks = {
        base64.b64decode(entry["token_bytes"], validate=True): at
        for at, entry in enumerate(entries, len(special))
    }
    first = {text: at for at, text in enumerate(special)}
    added = (AddedToken(text, normalized=False, special=True) for text in special)
    tokenizer = _ranked(ranks, config["pattern"], first, added)
    begin = _TEKKEN_ROLES["bos_token"]
    tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, first[begin])]
    )
    return tokenizer.to_str().encode("utf-8")


def _tekken_special(given: dict[str, Any]) -> list[str]:
    """Texts of the special tokens of tekken.json by id; unnamed ones are numbered."""
    listed, config = given.get("special_tokens"), given["config"]
    if listed is None:
        if config.get("version") not in _UNLISTED:
            raise ValueError(f"{_TEKKEN} lists no special tokens")
        listed = [
            {"rank": at, "token_str": text} for at, text in enumerate(_TEKKEN_SPECIAL.split())
        ]
    texts = {entry["rank"]: entry["token_str"] for entry in listed}
    count = config.get("default_num_special_tokens", len(listed))
    if sorted(texts) != [*range(len(listed))] or len(listed) > count:
        raise ValueError(f"the special tokens of {_TEKKEN} do not count from 0 to {count}")
    return [texts.get(at, f"<SPECIAL_{at}>") for at in range(count)]


def _has_instruct_form(folder: Path) -> bool:
    """Whether conversations of a model with tekken.json have the form of `_INSTRUCT`.

    Models with tokens for reasoning may need a prompt that tekken.json does not have.
    """
    given = _object(_without_bom(folder / _TEKKEN), _TEKKEN)
    wanted = {"[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "</s>"}
    special = {*_tekken_special(given)}
    is_known = given["config"].get("version") in _INSTRUCT_VERSIONS
    return is_known and wanted <= special and "[THINK]" not in special


def _ranked(
    ranks: dict[bytes, int], words: str, first: Mapping[str, int], special: Iterable[AddedToken]
) -> Tokenizer:
    """Byte-level BPE of ranked tokens; the rank of a token is that of its merges.

    Args:
        ranks: ids of the tokens, in the order of their ranks.
        words: pattern of the texts that are tokenized on their own.
        first: ids of special tokens that come before those of `ranks`.
        special: tokens of `first`, or tokens that get the next ids.
    """
    letters = _byte_letters()
    texts = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = sorted(
        (rank, ranks[token[:at]], ranks[token[at:]], token, at)
        for token, rank in ranks.items()
        for at in range(1, len(token))
        if token[:at] in ranks and token[at:] in ranks
    )
    pairs = [(texts[token[:at]], texts[token[at:]]) for *_, token, at in merges]
    vocabulary = {texts[token]: rank for token, rank in ranks.items()} | {**first}
    tokenizer = Tokenizer(BPE(vocabulary, pairs, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(words), "isolated")
    by_byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, by_byte])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*special])
    return tokenizer


def _byte_letters() -> list[str]:
    """Letters of bytes in byte-level BPE: printable ones are their own."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _convert_slow(folder: Path) -> TokenizerFiles:
    """Convert a tokenizer without tokenizer.json as transformers does."""
    found = sorted(folder.glob("*.model"))
    what = f"only {found[0].name} as a tokenizer" if found else "vocab.json without tokenizer.json"
    # transformers 5.24 reads SentencePiece models with both
    needed = ["transformers", *(["sentencepiece", "google.protobuf"] if found else [])]
    if missing := [name.replace("google.", "") for name in needed if not _is_installed(name)]:
        raise EdgeLLMError(
            f"{folder} has {what}; converting it needs {' and '.join(missing)}",
            hint=install("host"),
        )
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as converted:
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # noqa: BLE001 - of a damaged file it raises anything
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            has_class = "tokenizer_class" in _tokenizer_config(folder)
            if not found and not has_class and _is_object(folder / "vocab.json"):
                raise EdgeLLMError(
                    f"{folder} has vocab.json without tokenizer.json, and nothing says how the "
                    "tokenizer splits text",
                    hint=f'name its class in {TOKENIZER_CONFIG}, such as "tokenizer_class": '
                    '"GPT2Tokenizer"',
                ) from None
            raise BrokenArtifactError(
                f"transformers cannot read the tokenizer of {folder}: {reason}",
                hint=f"{_REMEDY}, or save the tokenizer as {TOKENIZER} elsewhere",
            ) from None
        tokenizer.save_pretrained(converted)
        if not (Path(converted) / TOKENIZER).exists():
            raise EdgeLLMError(
                f"transformers cannot convert the tokenizer of {folder}",
                hint=f"save it as {TOKENIZER} with transformers elsewhere, and copy that file",
            )
        return read_tokenizer(Path(converted))


def _is_object(path: Path) -> bool:
    """Whether a file holds a JSON object."""
    try:
        return isinstance(parse(path.read_text("utf-8")), dict)
    except (OSError, ValueError):
        return False


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of its package
        return False


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    try:
        return _object((folder / TOKENIZER_CONFIG).read_bytes(), TOKENIZER_CONFIG)
    except (OSError, ValueError, TypeError):
        return {}
