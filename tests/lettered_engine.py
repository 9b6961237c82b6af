"""An engine whose tokens are printable characters, byte level as GPT-2's: it can be guided."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from edgellm.artifact import hash_file


def with_letters(engine: Path, target: Path) -> Path:
    """A copy of an engine of 96 tokens: 2 ends, 3 is a space, 4 has code 34."""
    shutil.copytree(engine, target)
    letters = ["<unk>", "<s>", "</s>", "Ġ", *(chr(code) for code in range(34, 126))]
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(target / "tokenizer.json"))
    path = target / "manifest.json"
    manifest = json.loads(path.read_text())
    record = hash_file(target / "tokenizer.json")
    manifest["files"]["tokenizer.json"] = dataclasses.asdict(record)
    path.write_text(json.dumps(manifest))
    return target
