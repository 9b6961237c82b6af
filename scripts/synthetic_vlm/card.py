"""The model card of a synthetic checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgellm.scripts.synthetic_vlm.scenes import draw

_KINDS = {
    "one": "one picture, one question",
    "later": "the picture in the second turn",
    "two": "two pictures in one message, a question about the first or the second",
    "turns": "two turns with a picture each, the second answer",
}
_CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: image-text-to-text
---

# A synthetic vision-language model of drawn scenes

**Synthetic: it shows that a pipeline computes a vision-language model right, and says nothing of
the quality of such models.** It knows 25 kinds of cells, {vocab_size} tokens and nothing else: no
photographs, no other questions. What it is good for: every answer can be checked.

It has the classes of Qwen2.5-VL (`Qwen2_5_VLForConditionalGeneration`, its chat template, its image
processor), began with random weights, and reads pictures of 168 x 168 pixels (36 image tokens) with
three rows of three cells, each of them empty or one of four shapes in one of six colours. The right
answer to "Describe the image." is, for instance:

> {caption}

| | |
|---|---|
| parameters | {parameters:.2f} M, bfloat16 |
| encoder | {depth} blocks x {vision_size}, {vision_heads} heads, patches of 14, windows of 112 |
| with full attention | blocks {full} |
| language model | {layers} layers x {size}, {heads} heads, {kv_heads} KV heads, MLP {mlp} |
| positions | M-RoPE, sections {sections} |
| trained on | {examples} conversations about scenes drawn on the way |
| that is | {steps} steps of {batch_size}, learning rate {learning_rate:g}, seed {seed} |
| took | {minutes:.0f} minutes by the clock on {threads} |
| made with | torch {torch}, transformers {transformers} |

The loss is that of the answers' tokens and of a classifier of the cells beside the encoder, which
is thrown away in the end. Muon trains the matrices, AdamW the rest.

Captions of fresh scenes (drawn from seeds that no training uses), float32, greedy, with the
`generate` of transformers:

| conversation | exact captions | right cells |
|---|---|---|
{exactness}

Made by edgellm, in its clone:

```
pip install torch==2.13.0 && pip install -e '.[host]'
python -m edgellm.scripts.synthetic_vlm --output_dir {name} \\
    {flags}
```

`training.json` has the numbers of this page. Licence: Apache-2.0, as edgellm; no other data or
weights are in it.
"""


def model_card(facts: Mapping[str, Any], config: Mapping[str, Any], name: str) -> str:
    """Return README.md of a folder `name`, from its training.json and config.json."""
    text, vision = config["text_config"], config["vision_config"]
    threads = facts["threads"]
    names = ("steps", "batch_size", "learning_rate", "seed")
    return _CARD.format(
        **{key: facts[key] for key in names},
        **facts["versions"],
        name=name,
        flags=" ".join(f"--{key} {facts[key]:g}" for key in names),
        caption=draw(1, 0).caption,
        parameters=facts["parameters"] / 1e6,
        examples=facts["steps"] * facts["batch_size"],
        minutes=facts["training_seconds"] / 60,
        threads="one core" if threads == 1 else f"{threads} cores",
        exactness="\n".join(_row(kind, one) for kind, one in facts["exactness"].items()),
        vocab_size=text["vocab_size"],
        layers=text["num_hidden_layers"],
        size=text["hidden_size"],
        heads=text["num_attention_heads"],
        kv_heads=text["num_key_value_heads"],
        mlp=text["intermediate_size"],
        sections=text["rope_parameters"]["mrope_section"],
        depth=vision["depth"],
        vision_size=vision["hidden_size"],
        vision_heads=vision["num_heads"],
        full=" and ".join(map(str, vision["fullatt_block_indexes"])),
    )


def _row(kind: str, one: Mapping[str, int]) -> str:
    cells = f"{one['right_cells']} of {9 * one['scenes']}"
    return f"| {_KINDS[kind]} | {one['exact']} of {one['scenes']} | {cells} |"
