"""The protocol of training methods, and the unrolled forward pass of EAGLE drafts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from edgellm.tools.train_draft.base import Base, to_device
from edgellm.tools.train_draft.data.corpus import Sample
from edgellm.tools.train_draft.data.hidden_states import Batch, TappedBase
from edgellm.tools.train_draft.methods.eagle_network import Unrolled


class Learner(Protocol):
    """A draft that is trained by one method; `steps` is the number of predicted tokens."""

    tapped: TappedBase
    steps: int
    outputs: frozenset[str]  # parameters of output heads

    @property
    def module(self) -> nn.Module:
        """The trained network."""
        ...

    def start(self, samples: Sequence[Sample]) -> None:
        """Initialize weights from the base, and the vocabulary from the corpus."""
        ...

    def load(self, folder: Path) -> None:
        """Load a draft that this command wrote, instead of `start`.

        Raises:
            EdgeLLMError: the folder is not such a draft, or has other sizes.
        """
        ...

    def loss(self, batch: Batch, features: Tensor, step: int) -> Tensor:
        """Return the loss of a batch; training step `step` is the random seed."""
        ...

    def hits(self, batch: Batch, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return, per step, the number of predictions equal to the base's, and of all."""
        ...

    def write(self, folder: Path, training: dict[str, Any]) -> None:
        """Write the checkpoint and the training settings into the existing `folder`."""
        ...


def embedded(base: Base, batch: Batch, features: Tensor) -> Tensor:
    """Return the base's input embeddings, [B, S, H]; with images, they are in `features`."""
    if base.pictures is not None:
        return features[:, :, -1]
    return nn.functional.embedding(to_device(batch.rows.ids, features.device), base.embedding)


def unrolled(
    draft: Unrolled,
    tapped: TappedBase,
    batch: Batch,
    features: Tensor,
    *,
    unrolls: int,
    known: Tensor,
    taps: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return hidden states of the draft and of the base for trained tokens.

    The state of token p gives the distribution of token p + 1. Unroll j predicts it from the
    base's hidden state of token p - 1 - j.

    Args:
        draft: the network.
        tapped: the base.
        batch: conversations.
        features: hidden states of the batch, [B, S, streams, H].
        unrolls: consecutive draft steps.
        known: bool [B, S - 1], tokens p whose next token is trained; False before `unrolls`. On
            the CPU, its shapes do not wait for a GPU.
        taps: the draft's part of `features`, [B, S, num_taps, H].

    Returns:
        Hidden states [unrolls, R, H] and the base's final states [R, H].
    """
    device, dtype = features.device, tapped.base.head.dtype
    rows, places = known.nonzero(as_tuple=True)
    first = int(places.min()) - unrolls if len(places) else 0
    rows, places = to_device(rows, device), to_device(places, device)
    states = features[rows, places, len(tapped.taps)].to(dtype)
    padding = (0, unrolls - 1)
    embeddings = embedded(tapped.base, batch, features)[:, 1:].to(dtype)
    embeddings = nn.functional.pad(embeddings, (0, 0, *padding))
    positions = to_device(tapped.base.positions(batch.rows)[..., :-1], device)
    positions = nn.functional.pad(positions, padding)
    true_states = taps[:, :-1].flatten(2).to(dtype)
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        newest = places - 1 - first
        hidden = draft.unroll(true_states, embeddings, positions, unrolls, first)
        return torch.stack([x[rows, newest - step] for step, x in enumerate(hidden)]), states
