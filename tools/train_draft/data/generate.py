"""Batched generation with the base, for training data.

A draft predicts the base's outputs, so the base's own text is the best training text. Finished
sequences leave the batch once they are a fifth of it.

On a GPU, a step of a small base takes as long for thousands of sequences as for one: its kernels
start one by one. So batches are large, tokens stay on the GPU, and the host reads them rarely.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicLayer

from edgellm.tools.train_draft.base import Base, Prompt, Rows, padded
from edgellm.tools.train_draft.data.grouped_attention import grouped_attention

# Steps between two reads of the tokens; a GPU's reads wait for all of its kernels.
_STEPS_PER_READ = {"cpu": 1, "cuda": 8}

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
    deadline: float | None = None,
) -> Iterator[Output]:
    """Generate outputs for `prompts`, in batches of similar length; temperature 0 is greedy.

    An output ends with a stop token, or without one at `max_new_tokens`. No batch begins after
    `deadline` (of `time.monotonic`). A batch that exceeds a GPU's memory is halved, with a message.
    """
    randomness = torch.Generator(base.model.device).manual_seed(seed)
    by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index].ids))
    waiting = [by_length[start : start + batch] for start in range(0, len(by_length), batch)][::-1]
    while waiting and (deadline is None or time.monotonic() < deadline):
        chosen = waiting.pop()
        own = [prompts[index] for index in chosen]
        try:
            with grouped_attention(base.model):
                answers = _complete(base, own, stop_ids, max_new_tokens, temperature, randomness)
        except torch.OutOfMemoryError:
            if len(chosen) == 1:
                raise
            half = len(chosen) // 2
            print(
                f"{len(chosen)} prompts exceed the GPU's memory; trying {half} in a batch",
                file=sys.stderr,
                flush=True,
            )
            waiting += [chosen[half:], chosen[:half]]
        else:
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
    device = base.model.device
    steps_per_read = _STEPS_PER_READ.get(device.type, 1)
    ids, attends = padded([prompt.ids for prompt in prompts], left=True)
    rows = Rows(ids, attends, tuple(prompt.pictures for prompt in prompts))
    positions, cache = base.positions(rows), Cache(layer_class_to_replicate=_PreallocatedLayer)
    attends, positions = attends.to(device), positions.to(device)
    answers: list[list[int]] = [[] for _ in prompts]
    running, unread = answers, []
    for step in range(1, max_new_tokens + 1):
        output = base.decoder(**base.inputs(rows, positions), past_key_values=cache, use_cache=True)
        logits = nn.functional.linear(output.last_hidden_state[:, -1], base.head)
        picked = _pick(logits.float(), temperature, randomness)
        unread.append(picked)
        # The position after a picture is that after its longer side, on all axes.
        positions = positions[..., -1:].amax(0, keepdim=True).expand_as(positions[..., -1:]) + 1
        attends = torch.cat([attends, attends.new_ones(len(running), 1)], dim=1)
        if step % steps_per_read == 0 or step == max_new_tokens:
            finished = _append(running, torch.stack(unread, 1).tolist(), stop_ids)
            unread = []
            if sum(finished) * 5 >= len(running):
                keep = [index for index, done in enumerate(finished) if not done]
                if not keep:
                    break
                running = [running[index] for index in keep]
                kept = torch.tensor(keep, device=device)
                cache.batch_select_indices(kept)
                picked, attends, positions = picked[kept], attends[kept], positions[:, kept]
        rows = Rows(picked[:, None], attends, ((),) * len(running))
    return answers


def _append(
    answers: Sequence[list[int]], tokens: Sequence[list[int]], stop_ids: frozenset[int]
) -> list[bool]:
    """Append new tokens to each answer, up to a stop token; return which answers have ended."""
    for answer, new in zip(answers, tokens, strict=True):
        for token in new:
            if answer and answer[-1] in stop_ids:
                break
            answer.append(token)
    return [answer[-1] in stop_ids for answer in answers]


def _pick(logits: torch.Tensor, temperature: float, randomness: torch.Generator) -> torch.Tensor:
    """Sample one token id per sequence, [batch], from logits [batch, V]."""
    if temperature == 0:
        return logits.argmax(-1)
    # Inverse transform sampling: torch.multinomial would draw a number for every token.
    edges = torch.softmax(logits / temperature, -1).cumsum(-1)
    drawn = torch.rand(len(edges), 1, generator=randomness, device=edges.device) * edges[:, -1:]
    return torch.searchsorted(edges, drawn, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
