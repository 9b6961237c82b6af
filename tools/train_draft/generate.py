"""Text of the base model's own making, many rows at a time: what a draft learns from.

A draft must predict what its base says, so the best training text is the base's. Rows of one
batch share every weight read; finished rows leave the batch when a fifth of it has finished.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

Row = tuple[int, list[int], list[int]]  # index of the prompt, prompt ids, answer ids


class _Room(DynamicLayer):
    """KV cache of one layer with room for later tokens, so that a step copies no history.

    Keys and values: [batch, num_kv_heads, tokens, head_dim].
    """

    GROWTH = 128

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the new rows; all keys and values so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.used, self.room = 0, (key_states[:, :, :0], value_states[:, :, :0])
        end = self.used + key_states.shape[-2]
        if end > self.room[0].shape[-2]:
            self.room = tuple(_grown(old, self.used, end + self.GROWTH) for old in self.room)
        for room, new in zip(self.room, (key_states, value_states), strict=True):
            room[:, :, self.used : end] = new
        self.used = end
        self.keys, self.values = (room[:, :, :end] for room in self.room)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices` of the batch."""
        self.room = tuple(room[indices] for room in self.room)
        self.keys, self.values = (room[:, :, : self.used] for room in self.room)


def _grown(old: torch.Tensor, used: int, tokens: int) -> torch.Tensor:
    new = old.new_empty(*old.shape[:2], tokens, old.shape[3])
    new[:, :, :used] = old[:, :, :used]
    return new


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    *,
    stop_ids: frozenset[int],
    max_new_tokens: int,
    temperature: float,
    batch: int,
    seed: int,
) -> Iterator[Row]:
    """Answers to `prompts`, in batches of alike length; temperature 0 takes the argmax.

    An answer ends with its stop token, or without one at `max_new_tokens`.
    """
    randomness = torch.Generator(model.device).manual_seed(seed)
    by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for start in range(0, len(by_length), batch):
        chosen = by_length[start : start + batch]
        rows = [(index, prompts[index], []) for index in chosen]
        _complete(model, rows, stop_ids, max_new_tokens, temperature, randomness)
        yield from rows


def _complete(
    model: PreTrainedModel,
    rows: list[Row],
    stop_ids: frozenset[int],
    max_new_tokens: int,
    temperature: float,
    randomness: torch.Generator,
) -> None:
    """Fill the answers of `rows`, left-padded to one length."""
    longest = max(len(prompt) for _, prompt, _ in rows)
    padding = [longest - len(prompt) for _, prompt, _ in rows]
    ids = torch.tensor([[0] * pad + row[1] for pad, row in zip(padding, rows, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
    ids, mask = ids.to(model.device), mask.to(model.device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache, alive = Cache(layer_class_to_replicate=_Room), list(rows)
    for _ in range(max_new_tokens):
        output = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache,
            use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        picked = _pick(output.logits[:, -1].float(), temperature, randomness)
        finished = []
        for (_, _, answer), token in zip(alive, picked.tolist(), strict=True):
            if not answer or answer[-1] not in stop_ids:
                answer.append(token)
            finished.append(answer[-1] in stop_ids)
        if sum(finished) * 5 >= len(alive):
            keep = [index for index, done in enumerate(finished) if not done]
            if not keep:
                return
            alive, chosen = [alive[index] for index in keep], torch.tensor(keep, device=ids.device)
            cache.batch_select_indices(chosen)
            picked, mask, positions = picked[chosen], mask[chosen], positions[chosen]
        ids = picked[:, None]
        mask = torch.cat([mask, mask.new_ones(len(alive), 1)], dim=1)
        positions = positions[:, -1:] + 1


def _pick(logits: torch.Tensor, temperature: float, randomness: torch.Generator) -> torch.Tensor:
    """One token id a row, [batch], from logits [batch, V]."""
    if temperature == 0:
        return logits.argmax(-1)
    # Inverse transform sampling: torch.multinomial draws a number for every token instead.
    edges = torch.softmax(logits / temperature, -1).cumsum(-1)
    drawn = torch.rand(len(edges), 1, generator=randomness, device=edges.device) * edges[:, -1:]
    return torch.searchsorted(edges, drawn, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
