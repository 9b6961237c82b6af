"""The files of a synthetic checkpoint: Qwen2.5-VL's classes, small enough to train in minutes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from edgellm.scripts.synthetic_vlm.conversations import CHOICES, GREETINGS, NEXT, REQUESTS
from edgellm.scripts.synthetic_vlm.scenes import COLOURS, EMPTY, SHAPES, SIDE

PAD, END = "<|endoftext|>", "<|im_end|>"
SPECIAL = (
    PAD, "<|im_start|>", END, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
UNKNOWN = "<unk>"
_PHRASES = (
    "system user assistant You are a helpful assistant.",
    "Row 1 : , .",
    EMPTY,
    *REQUESTS,
    *itertools.chain(*CHOICES, *GREETINGS),
    *NEXT,
)
# Words of prompts and captions, and others that a user may write
_WORDS = (
    UNKNOWN, "\n", *".,:;!?'\"()-", *"0123456789", *COLOURS, *SHAPES, *" ".join(_PHRASES).split(),
    "an", "and", "of", "to", "on", "there", "here", "how", "many", "which", "colour", "colours",
    "shape", "shapes", "cell", "cells", "rows", "column", "columns", "image", "images", "picture",
    "pictures", "show", "look", "at", "thanks", "yes", "no",
)  # fmt: skip
# A Qwen2_5_VLForConditionalGeneration, whose type hints mislead checkers
Model = Any
_PATCH, _MERGE = 14, 2
_MIN_TOKENS, _MAX_TOKENS = 4, 64  # of one picture; a scene has 36
# Qwen2.5-VL's format, without tools
_CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if loop.first and message['role'] != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}
{{- message['content'] }}
{%- else %}
{%- for item in message['content'] %}
{%- if item['type'] in ('image', 'image_url') %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif item['type'] == 'video' %}
{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- else %}
{{- item['text'] }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def vocabulary() -> dict[str, int]:
    """Return the ids of words and special tokens."""
    words = dict.fromkeys((*SPECIAL, *(word.strip(".,!?") or word for word in _WORDS)))
    return {word: at for at, word in enumerate(words)}


def tokenizer() -> Tokenizer:
    """Return a tokenizer of words, digits, punctuation and line breaks, without other spaces."""
    made = Tokenizer(models.WordLevel(vocabulary(), UNKNOWN))
    made.normalizer = normalizers.Replace(Regex(r"[ \t\r]+"), " ")
    tokens = Regex(r"\n|[A-Za-z]+|[^ A-Za-z]")
    made.pre_tokenizer = pre_tokenizers.Split(tokens, "removed", invert=True)
    made.add_special_tokens(list(SPECIAL))
    return made


def make_config(**sizes: dict[str, Any]) -> Qwen2_5_VLConfig:
    """Return the model's config; `text_config` and `vision_config` change sizes."""
    ids = vocabulary()
    vision = {
        "depth": 4, "hidden_size": 128, "intermediate_size": 256, "num_heads": 2,
        "patch_size": _PATCH, "spatial_merge_size": _MERGE, "temporal_patch_size": 2,
        "window_size": 112, "fullatt_block_indexes": [1, 3],
    }  # fmt: skip
    # Eight thin layers: an EAGLE-3 draft reads the inputs of layers 2, n/2 and n-3
    text = {
        "vocab_size": len(ids), "hidden_size": 256, "intermediate_size": 320,
        "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]
        },
        "bos_token_id": None, "eos_token_id": ids[END], "pad_token_id": ids[PAD],
    }  # fmt: skip
    text |= sizes.get("text_config", {})
    vision |= {"out_hidden_size": text["hidden_size"], **sizes.get("vision_config", {})}
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )


def make_model(config: Qwen2_5_VLConfig) -> Model:
    """Return a float32 model with random weights."""
    return Qwen2_5_VLForConditionalGeneration(config)


def read_model(folder: Path) -> Model:
    """Load a stored model in float32, for inference."""
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype="float32").eval()


def write_processor(folder: Path, made: Qwen2_5_VLConfig) -> None:
    """Write config.json, and the files of tokenizer and image processor."""
    side = (_PATCH * _MERGE) ** 2
    assert SIDE % (_PATCH * _MERGE) == 0  # scenes are not resized
    made.save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE, "utf-8")
    _write(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048,
        "clean_up_tokenization_spaces": False, "add_prefix_space": False,
        "eos_token": END, "pad_token": PAD, "unk_token": UNKNOWN, "bos_token": None,
        "extra_special_tokens": {
            "image_token": "<|image_pad|>", "video_token": "<|video_pad|>",
            "vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>",
        },
    })  # fmt: skip
    _write(folder / "preprocessor_config.json", {
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": _MIN_TOKENS * side, "max_pixels": _MAX_TOKENS * side,
        "patch_size": _PATCH, "merge_size": _MERGE, "temporal_patch_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    })  # fmt: skip


def write_model(folder: Path, model: Model) -> None:
    """Write model.safetensors in the model's dtype, config.json and generation_config.json."""
    model.save_pretrained(folder)
    ids = vocabulary()
    _write(
        folder / "generation_config.json",
        {"do_sample": False, "eos_token_id": [ids[END], ids[PAD]], "pad_token_id": ids[PAD]},
    )


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", "utf-8")
