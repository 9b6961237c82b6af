"""Training of Medusa heads (arXiv 2401.10774, Medusa-1 with a frozen base)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from edgellm.tools.train_draft.base import Base
from edgellm.tools.train_draft.checkpoint_writers import HEADS, read_weights, write_checkpoint
from edgellm.tools.train_draft.data.corpus import Sample
from edgellm.tools.train_draft.data.hidden_states import Batch, TappedBase
from edgellm.tools.train_draft.methods.losses import token_loss


class ResBlock(nn.Module):
    """`x + silu(linear(x))`, initialized as the identity."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., H] for x [..., H]."""
        return x + functional.silu(self.linear(x))


class Medusa:
    """See `Learner`; head d reads token t's hidden state and predicts token t + 2 + d."""

    def __init__(self, *, base: Base, base_name: str, num_heads: int, decay: float) -> None:
        """Create the heads, with one block each.

        Args:
            base: the base model.
            base_name: its name in the heads' config.
            num_heads: number of heads, which are levels of a tree.
            decay: the loss weight of head d is decay ** (d + 1).
        """
        size, vocab_size = base.config.hidden_size, len(base.head)
        self.tapped, self.steps = TappedBase(base, ()), num_heads
        self._base_name, self._decay = base_name, decay
        heads = (
            nn.Sequential(ResBlock(size), nn.Linear(size, vocab_size, bias=False))
            for _ in range(num_heads)
        )
        self.module = nn.ModuleList(heads)
        self.outputs = frozenset(f"{head}.1.weight" for head in range(num_heads))

    def start(self, samples: Sequence[Sample]) -> None:
        """See `Learner`: each head starts as the base's."""
        del samples
        with torch.no_grad():
            for name in self.outputs:
                self.module.get_parameter(name).copy_(self.tapped.base.head)

    def load(self, folder: Path) -> None:
        """See `Learner`."""
        read_weights(self.module, folder / HEADS)

    def loss(self, batch: Batch, features: Tensor, step: int) -> Tensor:
        """See `Learner`: cross entropy of the next tokens."""
        del step  # nothing is random
        total = torch.zeros((), device=features.device)
        for index in range(self.steps):
            rows, places = self._learned(batch, index)
            tokens = batch.rows.ids[rows, places + 2 + index].to(features.device)
            hidden, weight = self._predicted(index, features[rows, places, 0])
            total = total + self._decay ** (index + 1) * token_loss(hidden, weight, tokens)
        return total

    def _learned(self, batch: Batch, index: int) -> tuple[Tensor, Tensor]:
        """Return indices [R] of conversations and tokens t; token t + 2 + `index` is trained."""
        rows, places = batch.learned[:, 2 + index :].nonzero(as_tuple=True)
        return rows, places

    def _predicted(self, index: int, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of a head's output layer, [R, H], and its weight [V, H]."""
        dtype = self.tapped.base.head.dtype
        with torch.autocast(features.device.type, dtype, enabled=dtype != torch.float32):
            hidden = self.module.get_submodule(f"{index}.0")(features.to(dtype))
        return hidden.to(dtype), self.module.get_parameter(f"{index}.1.weight").to(dtype)

    def hits(self, batch: Batch, features: Tensor) -> tuple[Tensor, Tensor]:
        """See `Learner`."""
        head, found = self.tapped.base.head, []
        for index in range(self.steps):
            rows, places = self._learned(batch, index)
            hidden, weight = self._predicted(index, features[rows, places, 0])
            states = features[rows, places + 1 + index, 0].to(head.dtype)
            same = (hidden @ weight.T).argmax(-1) == (states @ head.T).argmax(-1)
            found.append((same.sum(), len(same)))
        hits, counts = zip(*found, strict=True)
        return torch.stack(hits), torch.tensor(counts, device=features.device)

    def write(self, folder: Path, training: dict[str, Any]) -> None:
        """See `Learner`."""
        config = {
            "medusa_num_heads": self.steps,
            "medusa_num_layers": 1,
            "base_model_name_or_path": self._base_name,
        }
        write_checkpoint(folder, HEADS, self.module.state_dict(), config, training)
