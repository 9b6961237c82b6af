"""Tiny random encoders of texts, with a tokenizer that adds special tokens and types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from conftest import WORDS
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers import models as tokenizer_models

VOCABULARY = 96
_BEGIN, _END = "<s>", "</s>"


def make_encoder(folder: Path, kind: str = "AutoModel", **config: Any) -> Path:
    """A randomly initialized encoder.

    Args:
        folder: is written.
        kind: transformers' class, which adds a head or none.
        config: of the model; `num_labels` of a classifier.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    hf_config = transformers.AutoConfig.for_model(**config, initializer_range=0.2)
    model = getattr(transformers, kind).from_config(hf_config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name.lower() and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.2)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    write_pair_tokenizer(folder)
    return folder


def write_pair_tokenizer(folder: Path) -> None:
    """A word-level tokenizer of w9, w10, ...: `<s> text </s>`, and `<s> text </s> text </s>`."""
    words = WORDS + [f"w{index}" for index in range(len(WORDS), VOCABULARY)]
    table = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(tokenizer_models.WordLevel(table, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([_BEGIN, _END])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_BEGIN}:0 $A:0 {_END}:0",
        pair=f"{_BEGIN}:0 $A:0 {_END}:0 $B:1 {_END}:1",
        special_tokens=[(name, table[name]) for name in (_BEGIN, _END)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<unk>",
        "cls_token": _BEGIN,
        "sep_token": _END,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
