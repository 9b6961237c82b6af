"""What the base computes over training text: the taps, and the state before its head."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from edgellm.contract import EdgeLLMError
from edgellm.tools.train_draft.corpus import Sample


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The base's layers; raises `EdgeLLMError` where they are not one list."""
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise EdgeLLMError(f"{type(model).__name__} has no list of decoder layers to tap")
    return layers


class TappedBase:
    """A frozen base whose residual streams can be read.

    `taps` are ids of residual streams as in `contract.DraftSpec`: stream i enters layer i.
    """

    def __init__(self, model: PreTrainedModel, taps: Sequence[int]) -> None:
        self.model, self.taps = model.eval().requires_grad_(False), tuple(taps)
        self._streams: dict[int, Tensor] = {}
        decoder = model.get_decoder()
        layers = decoder_layers(model)
        for tap in self.taps:
            layers[tap].register_forward_pre_hook(self._keep(tap), with_kwargs=True)
        self._decoder = decoder

    def _keep(self, tap: int) -> Callable[[nn.Module, tuple, dict], None]:
        def hook(_: nn.Module, args: tuple, kwargs: dict) -> None:
            self._streams[tap] = args[0] if args else kwargs["hidden_states"]

        return hook

    @torch.inference_mode()
    def __call__(self, ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Token ids int64 [B, S], right-padded -> taps and final state, [B, S, taps + 1, H]."""
        mask = torch.arange(ids.shape[1])[None] < torch.tensor(lengths)[:, None]
        output = self._decoder(
            input_ids=ids, attention_mask=mask.long().to(ids.device), use_cache=False
        )
        streams = [self._streams[tap] for tap in self.taps]
        return torch.stack([*streams, output.last_hidden_state], 2)


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded conversations: B rows of S tokens."""

    ids: Tensor  # int64 [B, S]
    learned: Tensor  # bool [B, S]; tokens of the answer
    lengths: list[int]
    samples: tuple[int, ...]  # their numbers in the corpus


def row_lengths(samples: Sequence[Sample], max_tokens: int) -> list[int]:
    """Tokens of each conversation, cut at `max_tokens`."""
    return [min(len(sample.prompt) + len(sample.answer), max_tokens) for sample in samples]


def plan(
    lengths: Sequence[int], batch_tokens: int, order: np.random.Generator | None
) -> list[list[int]]:
    """Which conversations share a batch: alike lengths, about `batch_tokens` with padding.

    Args:
        lengths: tokens of each conversation.
        batch_tokens: B * S at most (but at least one row).
        order: shuffles rows of alike length, and the batches; None keeps the order by length.
    """
    noise = order.uniform(0, 8, len(lengths)) if order is not None else np.zeros(len(lengths))
    groups: list[list[int]] = []
    longest = 0
    for index in np.argsort(np.asarray(lengths) + noise, kind="stable").tolist():
        longest = max(longest, lengths[index])
        if not groups or longest * (len(groups[-1]) + 1) > batch_tokens:
            groups.append([])
            longest = lengths[index]
        groups[-1].append(index)
    if order is None:
        return groups
    return [groups[group] for group in order.permutation(len(groups))]


def make_batch(samples: Sequence[Sample], numbers: Sequence[int], max_tokens: int) -> Batch:
    """The conversations `numbers` of the corpus, cut at `max_tokens`."""
    rows = [samples[number] for number in numbers]
    lengths = row_lengths(rows, max_tokens)
    ids = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
    learned = torch.zeros(len(rows), max(lengths), dtype=torch.bool)
    for row, (sample, length) in enumerate(zip(rows, lengths, strict=True)):
        ids[row, :length] = torch.tensor((sample.prompt + sample.answer)[:length])
        learned[row, len(sample.prompt) : length] = True
    return Batch(ids, learned, lengths, tuple(numbers))


class FeatureCache:
    """Features of a whole corpus in one file, so that later epochs skip the base.

    bfloat16 [tokens, taps + 1, H], conversations one after another. Another file tells which are
    there. The base rounds a conversation otherwise in another batch, so a run that goes on must
    read what it read before: features outlive an interrupt.
    """

    def __init__(self, path: Path, lengths: Sequence[int], width: tuple[int, int]) -> None:
        """Open or make the files; `lengths` must be those of the corpus of the first time."""
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        shape = (int(self._starts[-1]), *width)
        self._known_path = path.with_suffix(".known")
        self._known = np.zeros(len(lengths), np.bool_)
        if path.exists() and path.stat().st_size == 2 * math.prod(shape):
            self._values = np.memmap(path, np.int16, "r+", shape=shape)
            self._known |= _read_flags(self._known_path, len(lengths))
        else:
            self._known_path.unlink(missing_ok=True)
            self._values = np.memmap(path, np.int16, "w+", shape=shape)

    def save(self) -> None:
        """Make what was stored so far outlive this process."""
        self._values.flush()
        partial = self._known_path.with_suffix(".partial")
        partial.write_bytes(self._known.tobytes())
        partial.replace(self._known_path)

    def has(self, batch: Batch) -> bool:
        """Whether every row was stored."""
        return bool(self._known[list(batch.samples)].all())

    def store(self, batch: Batch, features: Tensor) -> None:
        """Keep features [B, S, taps + 1, H]."""
        rows = features.to(torch.bfloat16).view(torch.int16).cpu().numpy()
        for row, number in enumerate(batch.samples):
            begin, end = self._starts[number : number + 2]
            self._values[begin:end] = rows[row, : end - begin]
            self._known[number] = True

    def load(self, batch: Batch) -> Tensor:
        """Features [B, S, taps + 1, H] bfloat16, zero where a row is padded."""
        shape = (len(batch.samples), batch.ids.shape[1], *self._values.shape[1:])
        rows = np.zeros(shape, np.int16)
        for row, number in enumerate(batch.samples):
            begin, end = self._starts[number : number + 2]
            rows[row, : end - begin] = self._values[begin:end]
        return torch.from_numpy(rows).view(torch.bfloat16)


def _read_flags(path: Path, count: int) -> np.ndarray:
    """Bool [count], all False when there is no such file."""
    content = path.read_bytes() if path.exists() else b""
    return np.frombuffer(content if len(content) == count else bytes(count), np.bool_)
