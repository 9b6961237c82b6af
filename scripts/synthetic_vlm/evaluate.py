"""Accuracy of captions of fresh scenes, with greedy `generate` of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from edgellm.scripts.synthetic_vlm.checkpoint import Model
from edgellm.scripts.synthetic_vlm.conversations import Conversation, Encoder, converse
from edgellm.scripts.synthetic_vlm.scenes import Score, score

_BATCH = 25
_MAX_NEW_TOKENS = 64  # the longest caption has 43


@dataclass(frozen=True, slots=True)
class Exactness:
    """Correct captions and cells over some scenes."""

    exact: int  # captions
    right_cells: int  # of nine a scene
    scenes: int


def measure(model: Model, encoder: Encoder, kind: str, count: int) -> Exactness:
    """Generate and score the last reply of `count` fresh conversations of a kind."""
    found: list[Score] = []
    for begin in range(0, count, _BATCH):
        numbers = range(begin, min(begin + _BATCH, count))
        asked = [fresh(kind, number) for number in numbers]
        for conversation, caption in zip(asked, answers(model, encoder, asked), strict=True):
            found.append(score(caption, conversation.asked))
    return Exactness(
        sum(one.exact for one in found), sum(one.right_cells for one in found), len(found)
    )


def fresh(kind: str, number: int) -> Conversation:
    """Return a conversation outside the training data, whose seeds begin with 0."""
    return converse(kind, 1, 0, number, 0)


@torch.no_grad()
def answers(model: Model, encoder: Encoder, conversations: Sequence[Conversation]) -> list[str]:
    """Generate the last reply of each conversation."""
    encoded = [encoder(conversation, prompt=True) for conversation in conversations]
    longest = max(len(item.token_ids) for item in encoded)
    padding = [longest - len(item.token_ids) for item in encoded]
    pad_id = model.config.text_config.pad_token_id
    ids = np.stack(
        [
            np.pad(item.token_ids, (left, 0), constant_values=pad_id)
            for item, left in zip(encoded, padding, strict=True)
        ]
    )
    prompts = torch.from_numpy(ids)
    generated = model.generate(
        input_ids=prompts,
        attention_mask=torch.from_numpy((np.arange(longest) >= np.c_[padding]).astype(np.int64)),
        mm_token_type_ids=(prompts == model.config.image_token_id).int(),
        pixel_values=torch.from_numpy(np.concatenate([item.pixels for item in encoded])),
        image_grid_thw=torch.tensor([(1, *grid) for item in encoded for grid in item.grids]),
        do_sample=False,
        max_new_tokens=_MAX_NEW_TOKENS,
    )
    return [encoder.tokenizer.decode(row[longest:].tolist()) for row in generated]
