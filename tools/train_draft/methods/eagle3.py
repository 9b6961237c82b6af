"""Training of EAGLE-3 drafts (arXiv 2503.01840): training-time test, no loss on hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edgellm.tools.train_draft.base import Base
from edgellm.tools.train_draft.checkpoint_writers import (
    draft_shape,
    read_draft,
    start_from_base,
    write_draft,
)
from edgellm.tools.train_draft.data.corpus import Sample, draft_vocabulary
from edgellm.tools.train_draft.data.hidden_states import Batch, TappedBase
from edgellm.tools.train_draft.methods.eagle_network import Draft
from edgellm.tools.train_draft.methods.losses import cut_head, head_loss
from edgellm.tools.train_draft.methods.method import unrolled


class Eagle3:
    """See `Learner`; its head has only the most frequent tokens of the corpus."""

    outputs = frozenset(["lm_head.weight"])

    def __init__(
        self,
        *,
        base: Base,
        taps: tuple[int, ...],
        draft_vocab_size: int,
        unrolls: int,
        decay: float,
        sliding_window: int = 0,
    ) -> None:
        """Create the network.

        Args:
            base: the base model.
            taps: layers whose inputs the draft reads.
            draft_vocab_size: tokens of its head.
            unrolls: draft steps of the training-time test.
            decay: the loss weight of step j is decay ** j.
            sliding_window: see `DraftShape`.
        """
        self.tapped, self.steps, self._decay = TappedBase(base, taps), unrolls, decay
        shape = draft_shape(base.config, draft_vocab_size, len(taps), sliding_window)
        self.module = Draft(shape)

    def start(self, samples: Sequence[Sample]) -> None:
        """See `Learner`."""
        base, size = self.tapped.base, self.module.shape.draft_vocab_size
        self._set_vocabulary(draft_vocabulary(list(samples), base.config.vocab_size, size))
        start_from_base(self.module, base, self.vocabulary)

    def load(self, folder: Path) -> None:
        """See `Learner`."""
        vocab_size = self.tapped.base.config.vocab_size
        self._set_vocabulary(read_draft(self.module, folder, self.tapped.taps, vocab_size))

    def _set_vocabulary(self, vocabulary: np.ndarray) -> None:
        self.vocabulary = vocabulary
        self._base_head, known = cut_head(self.tapped.base.head, vocabulary)
        self._in_vocabulary = known.cpu()

    def loss(self, batch: Batch, features: Tensor, step: int) -> Tensor:
        """See `Learner`: soft cross entropy with the base's distribution."""
        del step  # nothing is random
        hidden, targets = self.predictions(batch, features)
        head = self.module.lm_head.weight.to(hidden.dtype)
        return head_loss(hidden, head, targets, self.importance(hidden.device))

    def importance(self, device: torch.device) -> Tensor:
        """Return the loss weight of each step, float32 [unrolls], with sum 1."""
        found = self._decay ** torch.arange(self.steps, device=device)
        return found / found.sum()

    def predictions(self, batch: Batch, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return normed hidden states [unrolls, R, H] and the base's probabilities [R, Vd]."""
        # On the CPU: the shapes that follow from it do not wait for the GPU.
        known = batch.learned[:, 1:] & self._in_vocabulary[batch.rows.ids[:, 1:]]
        known[:, : self.steps] = False
        taps = features[:, :, : len(self.tapped.taps)]
        hidden, states = unrolled(
            self.module, self.tapped, batch, features, unrolls=self.steps, known=known, taps=taps
        )
        with torch.no_grad():
            targets = (states @ self._base_head.T).softmax(-1)
        return self.module.norm(hidden), targets

    def hits(self, batch: Batch, features: Tensor) -> tuple[Tensor, Tensor]:
        """See `Learner`; tokens outside of the head's vocabulary are misses."""
        hidden, targets = self.predictions(batch, features)
        logits = (x @ self.module.lm_head.weight.to(x.dtype).T for x in hidden)
        wanted = targets.argmax(-1)
        hits = torch.stack([(x.argmax(-1) == wanted).sum() for x in logits])
        return hits, torch.full_like(hits, int(batch.learned[:, self.steps + 1 :].sum()))

    def write(self, folder: Path, training: dict[str, Any]) -> None:
        """See `Learner`."""
        config = self.tapped.base.config
        write_draft(self.module, folder, self.vocabulary, self.tapped.taps, config, training)
