"""What the training loop asks of a method, and the pass that both kinds of EAGLE share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from edgellm.tools.train_draft.base import Base
from edgellm.tools.train_draft.data.corpus import Sample
from edgellm.tools.train_draft.data.hidden_states import Batch, TappedBase
from edgellm.tools.train_draft.methods.eagle_network import Unrolled


class Learner(Protocol):
    """A draft in training, by one method; steps are tokens that it predicts in a row."""

    tapped: TappedBase
    steps: int
    outputs: frozenset[str]  # parameters that are heads over tokens

    @property
    def module(self) -> nn.Module:
        """All that is trained."""
        ...

    def start(self, samples: Sequence[Sample]) -> None:
        """Take first weights from the base, and from the corpus what is to be known of it."""
        ...

    def load(self, folder: Path) -> None:
        """Take the weights of a draft that this command wrote, instead of `start`.

        Raises:
            EdgeLLMError: it is none, or of other sizes.
        """
        ...

    def loss(self, batch: Batch, features: Tensor, step: int) -> Tensor:
        """The loss of a batch; `step` of the training decides what is random."""
        ...

    def hits(self, batch: Batch, features: Tensor) -> tuple[Tensor, Tensor]:
        """Of every step, how often the draft predicts what the base says, and out of how many."""
        ...

    def write(self, folder: Path, training: dict[str, Any]) -> None:
        """Write the checkpoint and what was done into the existing `folder`."""
        ...


def embedded(base: Base, batch: Batch, features: Tensor) -> Tensor:
    """What the base reads, [B, S, H]; a picture has rows that are in the features."""
    if base.pictures is not None:
        return features[:, :, -1]
    return nn.functional.embedding(batch.rows.ids.to(features.device), base.embedding)


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
    """The draft's states of tokens that are learned, and the base's.

    The state of token p gives the distribution of token p + 1. Unroll j predicts it from row
    p - 1 - j: the last true feature it reads is that much older.

    Args:
        draft: the network.
        tapped: the base.
        batch: conversations.
        features: of the batch, [B, S, streams, H].
        unrolls: draft steps in a row.
        known: bool [B, S - 1], the tokens p whose follower is learned; none before `unrolls`.
        taps: what the draft reads of the features, [B, S, num_taps, H].

    Returns:
        Hidden states [unrolls, R, H] and the base's final states [R, H].
    """
    device, dtype = features.device, tapped.base.head.dtype
    rows, places = known.nonzero(as_tuple=True)
    states = features[rows, places, len(tapped.taps)].to(dtype)
    ahead = (0, unrolls - 1)
    embeddings = embedded(tapped.base, batch, features)[:, 1:].to(dtype)
    embeddings = nn.functional.pad(embeddings, (0, 0, *ahead))
    positions = tapped.base.positions(batch.rows)[..., :-1].to(device)
    positions = nn.functional.pad(positions, ahead)
    true_rows = taps[:, :-1].flatten(2).to(dtype)
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        first = int(places.min()) - unrolls if len(places) else 0
        newest = places - 1 - first
        hidden = draft.unroll(true_rows, embeddings, positions, unrolls, first)
        return torch.stack([x[rows, newest - step] for step, x in enumerate(hidden)]), states
