"""Calibration text as samples of token ids; other samples are held out for the evaluation."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from edgellm.core.errors import EdgeLLMError
from edgellm.core.strict_json import parse

DEFAULT = "default"
_OWN_TEXT = Path(__file__).with_name("calibration.jsonl")
_FORMAT = 'each line is {"messages": [{"role": "user", "content": "..."}]} or {"text": "..."}'
_ANY_KIND = "text"  # default
_HELD_OUT_SHARE = 8  # at most one sample in 8

Rows = NDArray[np.int64]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Packed samples [samples, S] without padding: documents one after another."""

    rows: Rows
    held_out: Rows
    held_out_kinds: Rows  # of each token, indices into `kinds`
    kinds: tuple[str, ...]
    name: str
    sha256: str  # of both


def load_tokenizer(files: Mapping[str, bytes]) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint's files."""
    with tempfile.TemporaryDirectory() as name:
        for file, content in files.items():
            (Path(name) / file).write_bytes(content)
        return AutoTokenizer.from_pretrained(name, local_files_only=True)


def read_calibration(
    dataset: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_samples: int,
    num_held_out: int,
    seq_len: int,
    vocab_size: int,
    seed: int,
) -> Calibration:
    """Read samples from edgellm's text or from a file.

    Documents are shuffled; each is either calibration text or held out. Short texts give fewer
    samples.

    Args:
        dataset: "default", or a .jsonl or .txt file (whose paragraphs are documents).
        tokenizer: of the model; its chat template formats conversations.
        num_samples: number of samples for calibration.
        num_held_out: number of held-out samples, at most an eighth of all.
        seq_len: S, tokens of a sample.
        vocab_size: of the model.
        seed: of the shuffle.

    Raises:
        EdgeLLMError: missing, empty, not UTF-8, of unknown form, or shorter than two samples.
    """
    path = _OWN_TEXT if dataset == DEFAULT else text_file(dataset)
    documents, kinds = _distinct(path, tokenizer)
    order = np.random.default_rng(seed).permutation(len(documents))
    first = _first_token(tokenizer)
    length = seq_len - len(first)
    wanted = max(num_samples + num_held_out + 2, _HELD_OUT_SHARE * num_held_out) * length
    shuffled = [documents[index] for index in order]
    pieces, piece_kinds = _pieces(shuffled, tokenizer, length, wanted)
    total = sum(map(len, pieces)) // length
    held_rows = max(1, min(num_held_out, total // _HELD_OUT_SHARE))
    split = _split(pieces, held_rows * length)
    held_out = _pack(pieces[:split], length, held_rows, first)
    held_kinds = _pack(piece_kinds[:split], length, held_rows, [0] * len(first))
    rows = _pack(pieces[split:], length, num_samples, first)
    if not len(rows) or not len(held_out):
        raise EdgeLLMError(
            f"{path} is too short: {sum(map(len, pieces))} tokens, a sample has {length} and one "
            "more is held out",
            hint="give more text, or a smaller --seq_len",
        )
    if max(rows.max(), held_out.max()) >= vocab_size:
        raise EdgeLLMError(
            f"the tokenizer gives id {max(rows.max(), held_out.max())}, the model has {vocab_size}",
            hint="the tokenizer belongs to another model",
        )
    sha = hashlib.sha256(rows.tobytes() + b"|" + held_out.tobytes()).hexdigest()
    name = DEFAULT if dataset == DEFAULT else path.name
    return Calibration(
        rows=rows, held_out=held_out, held_out_kinds=held_kinds, kinds=kinds, name=name, sha256=sha
    )


def text_file(name: str) -> Path:
    """Return the path of a .jsonl or .txt file; raise `EdgeLLMError` for other files."""
    path = Path(name).expanduser()
    if not path.is_file():
        raise EdgeLLMError(
            f"no such text file: {name}",
            hint=f"give a .jsonl or .txt file, or the name of a set: {DEFAULT}",
        )
    if path.suffix not in (".jsonl", ".txt"):
        raise EdgeLLMError(f"{path} is neither .jsonl nor .txt", hint=_FORMAT)
    return path


def _distinct(
    path: Path, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[tuple[str, int]], tuple[str, ...]]:
    """Return distinct texts with the indices of their kinds, and the names of the kinds."""
    found: dict[str, str] = {}
    for text, kind in read_lines(path, lambda each: (_shown(each, tokenizer), kind_of(each))):
        found.setdefault(text, kind)
    if not found:
        raise EdgeLLMError(f"{path} holds no text", hint=_FORMAT)
    kinds = tuple(sorted({*found.values()}))
    return [(text, kinds.index(kind)) for text, kind in found.items()], kinds


def read_lines(path: Path, read: Callable[[dict[str, Any]], _T]) -> Iterator[_T]:
    """Yield `read` of each line's object; paragraphs of a .txt file are {"text": ...}.

    Raises:
        EdgeLLMError: the file is not UTF-8, a line is no JSON object, or `read` rejects it
            (ValueError, KeyError, TypeError, TemplateError).
    """
    try:
        content = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise EdgeLLMError(
            f"{path} is not UTF-8 (byte {error.start})", hint="convert it: iconv -t UTF-8"
        ) from None
    if path.suffix == ".txt":
        paragraphs = content.replace("\r\n", "\n").split("\n\n")
        yield from (read({"text": text}) for text in paragraphs if text.strip())
        return
    # JSON strings may contain the other line ends of str.splitlines.
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            try:
                yield read(_object(parse(line)))
            except (ValueError, KeyError, TypeError, TemplateError) as error:
                raise EdgeLLMError(
                    f"{path} line {number} is neither a conversation nor text: {error!r}",
                    hint=_FORMAT,
                ) from None


def _object(entry: Any) -> dict[str, Any]:
    """Return a conversation or text; raise an error for other entries."""
    if not isinstance(entry, dict):
        raise TypeError("not a JSON object")
    if "messages" not in entry:
        if not isinstance(entry["text"], str):
            raise TypeError("text is not a string")
        return entry
    messages = entry["messages"]
    if not all(isinstance(m["role"], str) and isinstance(m["content"], str) for m in messages):
        raise TypeError("a message has no role or no content")
    return entry


def _shown(entry: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> str:
    if "messages" not in entry:
        return entry["text"].strip() + "\n\n"
    messages = entry["messages"]
    if getattr(tokenizer, "chat_template", None):
        return templated(messages, tokenizer)
    return "".join(f"{message['content'].strip()}\n\n" for message in messages)


def templated(
    messages: Sequence[Mapping[str, str]], tokenizer: PreTrainedTokenizerBase, **options: Any
) -> str:
    """Apply the chat template; a system message that it rejects begins the user's message.

    Templates without a system role are Gemma 2's and Mistral 0.1's.

    Raises:
        TemplateError: the template rejects the messages, also without a system message.
    """

    def applied(shown: Sequence[Mapping[str, str]]) -> str:
        return str(tokenizer.apply_chat_template([*map(dict, shown)], tokenize=False, **options))

    first, *rest = messages
    if first["role"] != "system" or not rest:
        return applied(messages)
    try:
        return applied(messages)
    except TemplateError:
        if rest[0]["role"] != "user":
            return applied(rest)
        text = f"{first['content']}\n\n{rest[0]['content']}"
        return applied([{"role": "user", "content": text}, *rest[1:]])


def kind_of(entry: dict[str, Any]) -> str:
    """Return the kind of a line; raise `TypeError` for an invalid one."""
    kind = entry.get("kind", _ANY_KIND)
    if not isinstance(kind, str) or not kind:
        raise TypeError("kind is not a name")
    return kind


def _first_token(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the BOS token that begins each sequence of the model, if any.

    It has the largest activations, so samples begin with it too.
    """
    bos = tokenizer.bos_token_id
    found: list[Any] = list(tokenizer("a")["input_ids"])
    return [bos] if isinstance(bos, int) and found[:1] == [bos] else []


def _pieces(
    documents: list[tuple[str, int]], tokenizer: PreTrainedTokenizerBase, length: int, wanted: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Tokenize documents, and split long ones by `length`, until there are `wanted` tokens.

    The second list contains each token's kind.
    """
    pieces: list[list[int]] = []
    kinds: list[list[int]] = []
    count = 0
    for text, kind in documents:
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        parts = [ids[begin : begin + length] for begin in range(0, len(ids), length)]
        pieces += parts
        kinds += [[kind] * len(part) for part in parts]
        count += len(ids)
        if count >= wanted:
            break
    return pieces, kinds


def _split(pieces: list[list[int]], wanted: int) -> int:
    """Return the number of pieces with `wanted` tokens."""
    sizes = np.cumsum([len(piece) for piece in pieces])
    return int(np.searchsorted(sizes, wanted)) + 1


def _pack(pieces: list[list[int]], length: int, count: int, first: list[int]) -> Rows:
    """Pack at most `count` samples; drop an incomplete one."""
    ids = np.array([token for piece in pieces for token in piece], np.int64)
    count = min(count, len(ids) // length)
    rows = ids[: count * length].reshape(count, length)
    return np.concatenate([np.tile(np.array(first, np.int64), (count, 1)), rows], axis=1)
