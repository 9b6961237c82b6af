"""An engine whose tokens are printable characters, byte level as GPT-2's: it can be guided."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path

from manifests import read_manifest, write_manifest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from edgellm.core.artifact import hash_file


def with_letters(
    engine: Path, target: Path, *, chat_template: str | None = None, tokens: Sequence[str] = ()
) -> Path:
    r"""A copy of an engine of 96 tokens: 2 ends, 3 is a space, 4 has code 34; no `, but new lines.

    Up to two `tokens` take the places of | and \, with ids 94 and 62; [those] are special.
    """
    shutil.copytree(engine, target)
    codes = (chr(code) for code in range(34, 126))
    letters = ["<unk>", "<s>", "</s>", "Ġ", *("Ċ" if code == "`" else code for code in codes)]
    for place, token in zip((94, 62), tokens, strict=False):
        letters[place] = token
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", *(one for one in tokens if one[0] == "[")])
    tokenizer.add_tokens([AddedToken(one, special=False) for one in tokens if one[0] != "["])
    changed = ["tokenizer.json"]
    tokenizer.save(str(target / "tokenizer.json"))
    if chat_template is not None:
        (target / "chat_template.jinja").write_text(chat_template)
        changed.append("chat_template.jinja")
    manifest = read_manifest(target)
    manifest["eos_token_ids"] = [2]
    for name in changed:
        manifest["files"][name] = dataclasses.asdict(hash_file(target / name))
    write_manifest(target, manifest)
    return target
