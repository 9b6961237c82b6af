"""What the base computes over training text: the taps, and the state before its head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from edgellm.contract import EdgeLLMError
from edgellm.tools.train_draft.corpus import Sample


class TappedBase:
    """A frozen base whose residual streams can be read.

    `taps` are ids of residual streams as in `contract.DraftSpec`: stream i enters layer i.
    """

    def __init__(self, model: PreTrainedModel, taps: Sequence[int]) -> None:
        self.model, self.taps = model.eval().requires_grad_(False), tuple(taps)
        self._streams: dict[int, Tensor] = {}
        decoder = model.get_decoder()
        layers = getattr(decoder, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise EdgeLLMError(f"{type(model).__name__} has no list of decoder layers to tap")
        for tap in self.taps:
            layers[tap].register_forward_pre_hook(self._keep(tap), with_kwargs=True)
        self._decoder = decoder

    def _keep(self, tap: int):  # noqa: ANN202 - a hook, typed by torch
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


def batches(
    samples: Sequence[Sample], max_tokens: int, batch_tokens: int, order: np.random.Generator | None
) -> Iterator[Batch]:
    """Conversations of alike length together, about `batch_tokens` with padding in each.

    Args:
        samples: the corpus; longer conversations are cut at `max_tokens`.
        max_tokens: longest row.
        batch_tokens: B * S at most (but at least one row).
        order: shuffles rows of alike length, and the batches; None keeps the order by length.
    """
    lengths = np.array([min(len(s.prompt) + len(s.answer), max_tokens) for s in samples])
    noise = order.uniform(0, 8, len(samples)) if order is not None else np.zeros(len(samples))
    groups: list[list[int]] = [[]]
    for index in np.argsort(lengths + noise, kind="stable"):
        longest = max([lengths[index], *(lengths[other] for other in groups[-1])])
        if groups[-1] and longest * (len(groups[-1]) + 1) > batch_tokens:
            groups.append([])
        groups[-1].append(int(index))
    for group in order.permutation(len(groups)) if order is not None else range(len(groups)):
        yield _batch([samples[index] for index in groups[group]], tuple(groups[group]), lengths)


def _batch(rows: Sequence[Sample], numbers: tuple[int, ...], lengths: np.ndarray) -> Batch:
    width = int(max(lengths[number] for number in numbers))
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    learned = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, (sample, number) in enumerate(zip(rows, numbers, strict=True)):
        length = int(lengths[number])
        ids[row, :length] = torch.tensor((sample.prompt + sample.answer)[:length])
        learned[row, len(sample.prompt) : length] = True
    return Batch(ids, learned, [int(lengths[number]) for number in numbers], numbers)


class FeatureCache:
    """Features of a whole corpus in one file, so that later epochs skip the base.

    bfloat16 [tokens, taps + 1, H], conversations one after another.
    """

    def __init__(self, path: Path, lengths: Sequence[int], width: tuple[int, int]) -> None:
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        self._known = np.zeros(len(lengths), bool)
        shape = (int(self._starts[-1]), *width)
        self._values = np.memmap(path, np.int16, "w+", shape=shape)

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
