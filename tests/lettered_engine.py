"""An engine whose tokens are printable characters, byte level as GPT-2's: it can be guided."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from edgellm.artifact import hash_file


def with_letters(
    engine: Path, target: Path, *, chat_template: str | None = None, special: str | None = None
) -> Path:
    """A copy of an engine of 96 tokens: 2 ends, 3 is a space, 4 has code 34; no `, but new lines.

    `special` takes the place of |, with id 94.
    """
    shutil.copytree(engine, target)
    codes = (chr(code) for code in range(34, 126))
    letters = ["<unk>", "<s>", "</s>", "Ġ", *("Ċ" if code == "`" else code for code in codes)]
    letters[94] = special or letters[94]
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", *([special] if special else [])])
    changed = ["tokenizer.json"]
    tokenizer.save(str(target / "tokenizer.json"))
    if chat_template is not None:
        (target / "chat_template.jinja").write_text(chat_template)
        changed.append("chat_template.jinja")
    path = target / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["eos_token_ids"] = [2]
    for name in changed:
        manifest["files"][name] = dataclasses.asdict(hash_file(target / name))
    path.write_text(json.dumps(manifest))
    return target
