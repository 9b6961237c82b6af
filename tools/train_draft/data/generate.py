"""Batched generation with the base, for training data.

A draft predicts the base's outputs, so the base's own text is the best training text. Finished
sequences leave the batch once they are a fifth of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicLayer

from edgellm.tools.train_draft.base import Base, Prompt, Rows, padded

Output = tuple[int, list[int]]  # index of the prompt, generated ids


class _PreallocatedLayer(DynamicLayer):
    """KV cache of one layer, allocated in chunks of tokens, so that a step copies no history.

    Keys and values: [batch, num_kv_heads, tokens, head_dim].
    """

    GROWTH = 128

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values of new tokens; return all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.used, self.buffers = 0, (key_states[:, :, :0], value_states[:, :, :0])
        end = self.used + key_states.shape[-2]
        if end > self.buffers[0].shape[-2]:
            self.buffers = tuple(
                _enlarged(old, self.used, end + self.GROWTH) for old in self.buffers
            )
        for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, self.used : end] = new
        self.used = end
        self.keys, self.values = (buffer[:, :, :end] for buffer in self.buffers)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the sequences `indices` of the batch."""
        self.buffers = tuple(buffer[indices] for buffer in self.buffers)
        self.keys, self.values = (buffer[:, :, : self.used] for buffer in self.buffers)


def _enlarged(old: torch.Tensor, used: int, tokens: int) -> torch.Tensor:
    new = old.new_empty(*old.shape[:2], tokens, old.shape[3])
    new[:, :, :used] = old[:, :, :used]
    return new


@torch.inference_mode()
def generate(
    base: Base,
    prompts: Sequence[Prompt],
    *,
    stop_ids: frozenset[int],
    max_new_tokens: int,
    temperature: float,
    batch: int,
    seed: int,
) -> Iterator[Output]:
    """Generate outputs for `prompts`, in batches of similar length; temperature 0 is greedy.

    An output ends with a stop token, or without one at `max_new_tokens`.
    """
    randomness = torch.Generator(base.model.device).manual_seed(seed)
    by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index].ids))
    for start in range(0, len(by_length), batch):
        chosen = by_length[start : start + batch]
        answers = _complete(
            base,
            [prompts[index] for index in chosen],
            stop_ids,
            max_new_tokens,
            temperature,
            randomness,
        )
        yield from zip(chosen, answers, strict=True)


def _complete(
    base: Base,
    prompts: Sequence[Prompt],
    stop_ids: frozenset[int],
    max_new_tokens: int,
    temperature: float,
    randomness: torch.Generator,
) -> list[list[int]]:
    """Generate the outputs of one batch, left-padded to one length."""
    ids, attends = padded([prompt.ids for prompt in prompts], left=True)
    rows = Rows(ids, attends, tuple(prompt.pictures for prompt in prompts))
    positions, cache = base.positions(rows), Cache(layer_class_to_replicate=_PreallocatedLayer)
    answers: list[list[int]] = [[] for _ in prompts]
    running = answers
    for _ in range(max_new_tokens):
        output = base.decoder(**base.inputs(rows, positions), past_key_values=cache, use_cache=True)
        logits = nn.functional.linear(output.last_hidden_state[:, -1], base.head)
        picked = _pick(logits.float(), temperature, randomness).cpu()
        finished = []
        for answer, token in zip(running, picked.tolist(), strict=True):
            if not answer or answer[-1] not in stop_ids:
                answer.append(token)
            finished.append(answer[-1] in stop_ids)
        # The position after a picture is that after its longer side, on all axes.
        positions = positions[..., -1:].amax(0, keepdim=True).expand_as(positions[..., -1:]) + 1
        attends = torch.cat([attends, attends.new_ones(len(running), 1)], dim=1)
        if sum(finished) * 5 >= len(running):
            keep = [index for index, done in enumerate(finished) if not done]
            if not keep:
                break
            running = [running[index] for index in keep]
            cache.batch_select_indices(torch.tensor(keep, device=base.model.device))
            picked, attends, positions = picked[keep], attends[keep], positions[:, keep]
        rows = Rows(picked[:, None], attends, ((),) * len(running))
    return answers


def _pick(logits: torch.Tensor, temperature: float, randomness: torch.Generator) -> torch.Tensor:
    """Sample one token id per sequence, [batch], from logits [batch, V]."""
    if temperature == 0:
        return logits.argmax(-1)
    # Inverse transform sampling: torch.multinomial would draw a number for every token.
    edges = torch.softmax(logits / temperature, -1).cumsum(-1)
    drawn = torch.rand(len(edges), 1, generator=randomness, device=edges.device) * edges[:, -1:]
    return torch.searchsorted(edges, drawn, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
