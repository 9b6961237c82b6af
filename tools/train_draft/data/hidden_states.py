"""Hidden states of the base over training text: auxiliary ones (taps) and the final one."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from edgellm.core.resources import require_space
from edgellm.tools.train_draft.base import Base, Rows, padded
from edgellm.tools.train_draft.data.corpus import Sample


class TappedBase:
    """A frozen base that returns auxiliary hidden states.

    `taps` are numbers of layers whose inputs are returned, as in `DraftSpec`.
    """

    def __init__(self, base: Base, taps: Sequence[int]) -> None:
        base.model.eval().requires_grad_(False)
        self.base, self.taps = base, tuple(taps)
        self._streams: dict[int, Tensor] = {}
        for tap in self.taps:
            base.layers[tap].register_forward_pre_hook(self._record(tap), with_kwargs=True)

    def _record(self, tap: int) -> Callable[[nn.Module, tuple, dict], None]:
        def hook(_: nn.Module, args: tuple, kwargs: dict) -> None:
            self._streams[tap] = args[0] if args else kwargs["hidden_states"]

        return hook

    @property
    def num_streams(self) -> int:
        """Hidden states per token: the taps, the final one, and embeddings if images are used."""
        return len(self.taps) + (1 if self.base.pictures is None else 2)

    @torch.inference_mode()
    def __call__(self, rows: Rows) -> Tensor:
        """Return hidden states of right-padded conversations, bfloat16 [B, S, num_streams, H]."""
        inputs = self.base.inputs(rows, self.base.positions(rows))
        output = self.base.decoder(**inputs, use_cache=False)
        streams = [*(self._streams[tap] for tap in self.taps), output.last_hidden_state]
        if self.base.pictures is not None:
            streams.append(inputs["inputs_embeds"])
        return torch.stack(streams, 2).to(torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Batch:
    """B conversations, right-padded to S tokens."""

    rows: Rows
    learned: Tensor  # bool [B, S]; tokens of the answer
    samples: tuple[int, ...]  # indices in the corpus

    @property
    def num_tokens(self) -> int:
        """Number of tokens without padding."""
        return int(self.rows.attends.sum())


def row_lengths(samples: Sequence[Sample], max_tokens: int) -> list[int]:
    """Return the tokens of each conversation, at most `max_tokens`."""
    return [min(len(sample.ids), max_tokens) for sample in samples]


def plan(
    lengths: Sequence[int], batch_tokens: int, order: np.random.Generator | None
) -> list[list[int]]:
    """Group conversations of similar lengths to batches.

    Args:
        lengths: tokens of each conversation.
        batch_tokens: maximum of B * S, unless B is 1.
        order: shuffles conversations of similar length, and the batches; None: order by length.
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
    """Batch the conversations `numbers` of the corpus, truncated at `max_tokens`."""
    chosen = [samples[number] for number in numbers]
    ids, attends = padded([sample.ids[:max_tokens] for sample in chosen], left=False)
    prompts = torch.tensor([[len(sample.prompt.ids)] for sample in chosen])
    learned = attends & (torch.arange(ids.shape[1]) >= prompts)
    rows = Rows(ids, attends, tuple(sample.prompt.pictures for sample in chosen))
    return Batch(rows, learned, tuple(numbers))


def _reserve(path: Path, num_bytes: int) -> None:
    """Create a file of a size, with allocated blocks: SIGBUS ends a process on a full disk."""
    require_space(path.parent, num_bytes)
    with path.open("wb") as stream:
        try:
            os.posix_fallocate(stream.fileno(), 0, num_bytes)
        except OSError:
            path.unlink()
            raise


class FeatureCache:
    """Hidden states of a whole corpus in one file, so that later epochs skip the base.

    bfloat16 [tokens, streams, H], conversations concatenated; a second file flags the stored ones.
    The base's rounding depends on the batch, so a resumed run must read the same hidden states:
    they survive an interrupt.
    """

    def __init__(self, path: Path, lengths: Sequence[int], width: tuple[int, int]) -> None:
        """Open or create the files; `lengths` must be those of the corpus that created them."""
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        shape = (int(self._starts[-1]), *width)
        self._known_path = path.with_suffix(".known")
        self._known = np.zeros(len(lengths), np.bool_)
        if path.exists() and path.stat().st_size == 2 * math.prod(shape):
            self._values = np.memmap(path, np.int16, "r+", shape=shape)
            self._known |= _read_flags(self._known_path, len(lengths))
        else:
            self._known_path.unlink(missing_ok=True)
            _reserve(path, 2 * math.prod(shape))
            self._values = np.memmap(path, np.int16, "r+", shape=shape)

    def save(self) -> None:
        """Write all stored hidden states to disk."""
        self._values.flush()
        partial = self._known_path.with_suffix(".partial")
        partial.write_bytes(self._known.tobytes())
        partial.replace(self._known_path)

    def has(self, batch: Batch) -> bool:
        """Return whether all conversations of a batch are stored."""
        return bool(self._known[list(batch.samples)].all())

    def store(self, batch: Batch, features: Tensor) -> None:
        """Store hidden states, bfloat16 [B, S, streams, H]."""
        rows = features.view(torch.int16).cpu().numpy()
        for row, number in enumerate(batch.samples):
            begin, end = self._starts[number : number + 2]
            self._values[begin:end] = rows[row, : end - begin]
            self._known[number] = True

    def load(self, batch: Batch) -> Tensor:
        """Return hidden states, bfloat16 [B, S, streams, H], zero for padding."""
        shape = (*batch.rows.ids.shape, *self._values.shape[1:])
        rows = np.zeros(shape, np.int16)
        for row, number in enumerate(batch.samples):
            begin, end = self._starts[number : number + 2]
            rows[row, : end - begin] = self._values[begin:end]
        return torch.from_numpy(rows).view(torch.bfloat16)


def _read_flags(path: Path, count: int) -> np.ndarray:
    """Return bool [count], all False if the file is missing."""
    content = path.read_bytes() if path.exists() else b""
    return np.frombuffer(content if len(content) == count else bytes(count), np.bool_)
