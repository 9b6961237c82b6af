"""The tokenizer of a Hugging Face folder as the files a bundle carries."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from edgellm.contract import BrokenArtifactError, EdgeLLMError
from edgellm.strict_json import parse

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
_REMEDY = "copy or download the file again"


def read_tokenizer(folder: Path) -> tuple[dict[str, bytes], tuple[str, int]]:
    """tokenizer.json, tokenizer_config.json and, if the model has one, chat_template.jinja.

    A folder without tokenizer.json but with a SentencePiece model is converted by transformers.

    Returns:
        The files, and the token of the highest id with that id.

    Raises:
        EdgeLLMError: there is no tokenizer, or converting needs transformers.
        BrokenArtifactError: a file does not parse.
    """
    if not (folder / TOKENIZER).exists():
        if not any(folder.glob("*.model")) and not (folder / "vocab.json").exists():
            raise EdgeLLMError(
                f"{folder} has no tokenizer.json", hint="copy the tokenizer beside the weights"
            )
        return _convert_slow(folder)
    files = {TOKENIZER: (folder / TOKENIZER).read_bytes()}
    config: dict[str, Any] = {}
    try:
        ids = Tokenizer.from_buffer(files[TOKENIZER]).get_vocab()
        if (folder / TOKENIZER_CONFIG).exists():
            files[TOKENIZER_CONFIG] = (folder / TOKENIZER_CONFIG).read_bytes()
            config = _object(files[TOKENIZER_CONFIG])
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise BrokenArtifactError(
            f"the tokenizer of {folder} is damaged: {error}", hint=_REMEDY
        ) from None
    try:
        template = _chat_template(folder, config)
        if template is not None:
            files[CHAT_TEMPLATE] = template.encode("utf-8")
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # no text, or no UTF-8
        raise BrokenArtifactError(
            f"the chat template of {folder} is damaged: {error}", hint=_REMEDY
        ) from None
    return files, max(ids.items(), key=lambda item: item[1], default=("", -1))


def _object(text: bytes) -> dict[str, Any]:
    value = parse(text)
    if not isinstance(value, dict):
        raise TypeError(f"{TOKENIZER_CONFIG} does not hold a JSON object")
    return value


def _chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """The model's default template; separate files win over the entry in the config."""
    if (folder / CHAT_TEMPLATE).exists():
        return (folder / CHAT_TEMPLATE).read_text("utf-8")
    if (folder / "chat_template.json").exists():
        return parse((folder / "chat_template.json").read_text("utf-8"))["chat_template"]
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")
    return template


def _convert_slow(folder: Path) -> tuple[dict[str, bytes], tuple[str, int]]:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise EdgeLLMError(
            f"{folder} has only a SentencePiece tokenizer; converting it needs transformers",
            hint="in edgellm's folder: pip install '.[host]'",
        ) from None
    with tempfile.TemporaryDirectory() as converted:
        AutoTokenizer.from_pretrained(folder, local_files_only=True).save_pretrained(converted)
        if not (Path(converted) / TOKENIZER).exists():
            raise EdgeLLMError(f"transformers cannot convert the tokenizer of {folder}")
        return read_tokenizer(Path(converted))
