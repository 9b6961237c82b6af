"""Training of EAGLE-1 drafts (arXiv 2401.15077): regression of the next hidden state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from edgellm.tools.train_draft.base import Base
from edgellm.tools.train_draft.checkpoint_writers import (
    EAGLE1_EMBEDDING,
    copy_layer,
    draft_config,
    draft_shape,
    read_weights,
    write_checkpoint,
)
from edgellm.tools.train_draft.data.corpus import Sample
from edgellm.tools.train_draft.data.hidden_states import Batch, TappedBase
from edgellm.tools.train_draft.methods.eagle_network import Eagle1Draft
from edgellm.tools.train_draft.methods.losses import head_loss
from edgellm.tools.train_draft.methods.method import unrolled

_TOKEN_WEIGHT = 0.1  # weight of the cross entropy; the regression's is 1
_WEIGHTS = "model.safetensors"


class Eagle1:
    """See `Learner`; predicts the input of the base's head."""

    outputs: frozenset[str] = frozenset()

    def __init__(self, *, base: Base, steps: int, noise: float, sliding_window: int = 0) -> None:
        """Create the network.

        Args:
            base: the base model.
            steps: draft steps of the estimate; one is trained.
            noise: width of uniform noise on hidden states in training.
            sliding_window: see `DraftShape`.
        """
        self.tapped, self.steps, self._noise = TappedBase(base, ()), steps, noise
        shape = draft_shape(base.config, base.config.vocab_size, 1, sliding_window)
        self.module = Eagle1Draft(shape)

    def start(self, samples: Sequence[Sample]) -> None:
        """See `Learner`: the draft starts as the identity of the hidden state.

        The layer is the base's last one with zero output projections: they are scaled for the
        residual stream, which is larger than the normed hidden states of the draft.
        """
        del samples
        fc, size = self.module.fc, self.module.shape.hidden_size
        with torch.no_grad():
            nn.init.normal_(fc.weight, std=0.01)
            fc.weight[:, size:] += torch.eye(size, device=fc.weight.device)
            nn.init.zeros_(fc.bias)
        copy_layer(self.module.layer, self.tapped.base)
        nn.init.zeros_(self.module.layer.get_parameter("self_attn.o_proj.weight"))
        nn.init.zeros_(self.module.layer.get_parameter("mlp.down_proj.weight"))

    def load(self, folder: Path) -> None:
        """See `Learner`."""
        read_weights(self.module, folder / _WEIGHTS, ignored=(EAGLE1_EMBEDDING,))

    def loss(self, batch: Batch, features: Tensor, step: int) -> Tensor:
        """See `Learner`: smooth L1 to the hidden state, and cross entropy after the base's head."""
        random = torch.Generator(features.device).manual_seed(step)
        noise = torch.rand(features.shape, generator=random, device=features.device) - 0.5
        hidden, states = self._predictions(batch, features, features + self._noise * noise, 1)
        if not len(states):
            return hidden.sum()
        head = self.tapped.base.head
        with torch.no_grad():
            targets = (states @ head.T).softmax(-1)
        regression = functional.smooth_l1_loss(hidden[0].float(), states.float())
        one = torch.ones(1, device=head.device)
        tokens = head_loss(hidden.to(head.dtype), head, targets, one)
        return regression + _TOKEN_WEIGHT * tokens

    def _predictions(
        self, batch: Batch, features: Tensor, taps: Tensor, unrolls: int
    ) -> tuple[Tensor, Tensor]:
        """Return the draft's hidden states [unrolls, R, H] and the base's [R, H]."""
        known = batch.learned[:, 1:].to(features.device).clone()
        known[:, :unrolls] = False
        return unrolled(
            self.module, self.tapped, batch, features,
            unrolls=unrolls, known=known, taps=taps[:, :, :1],
        )  # fmt: skip

    def hits(self, batch: Batch, features: Tensor) -> tuple[Tensor, Tensor]:
        """See `Learner`."""
        head = self.tapped.base.head
        hidden, states = self._predictions(batch, features, features, self.steps)
        wanted = (states @ head.T).argmax(-1)
        steps = (x.to(head.dtype) @ head.T for x in hidden)
        hits = torch.stack([(logits.argmax(-1) == wanted).sum() for logits in steps])
        return hits, torch.full_like(hits, len(states))

    def write(self, folder: Path, training: dict[str, Any]) -> None:
        """See `Learner`; includes the embedding, as public drafts do."""
        base = self.tapped.base
        tensors = {**self.module.state_dict(), EAGLE1_EMBEDDING: base.embedding}
        config = draft_config(self.module.shape, base.config, "LlamaForCausalLM")
        write_checkpoint(folder, _WEIGHTS, tensors, {**config, "bias": True}, training)
