"""Inputs of a draft's first layer, from a base's hidden states and token embeddings."""

from __future__ import annotations

from typing import Protocol

import torch

from edgellm.export.checkpoints.checkpoint import TensorSource
from edgellm.export.draft_checkpoints.config import DraftConfig
from edgellm.quantize.formats.tensors import read_tensor


def fused_features(
    tensors: TensorSource, facts: DraftConfig, taps: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """Fuse auxiliary hidden states, each [B, S, H], for a block draft: [B, S, D]."""
    inputs = DraftInputs(facts, tensors, taps[0].device)
    return inputs.normed(inputs.fuse(taps), "hidden_norm")


class Inputs(Protocol):
    """Computes the input of a draft's first layer."""

    def fuse(self, taps: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Fuse auxiliary hidden states, each [B, S, H], to [B, S, D]."""
        ...

    def join(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Join embeddings and hidden states to [B, S, ...]."""
        ...


class DraftInputs:
    """The float modules before a draft's first layer."""

    def __init__(self, facts: DraftConfig, tensors: TensorSource, device: torch.device) -> None:
        """Open the modules; `tensors` are the draft's, loaded at first use."""
        self._facts, self._tensors, self._device = facts, tensors, device
        self._cache: dict[str, torch.Tensor] = {}

    def fuse(self, taps: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Fuse auxiliary hidden states, each [B, S, H], to [B, S, D]."""
        facts = self._facts
        if not facts.fuses:
            return taps[0]
        if facts.norms.fc_norm:
            taps = tuple(self.normed(x, f"fc_norm.{index}") for index, x in enumerate(taps))
        x = torch.cat(taps, -1)
        return self._fc(self.normed(x, "input_norm") if facts.norms.before_fc else x)

    def join(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the residual and, after it, the input of attention: [B, S, D + W]."""
        facts = self._facts
        if not facts.fuses:
            x = self._fc(torch.cat([tokens, hidden], -1))
            return torch.cat([x, x], -1)
        normed = self.normed(hidden, f"{facts.first_layer}.hidden_norm")
        attended = self.normed(tokens, f"{facts.first_layer}.input_layernorm")
        residual = normed if facts.norms.before_residual else hidden
        return torch.cat([residual, attended, normed], -1)

    def _fc(self, x: torch.Tensor) -> torch.Tensor:
        bias = self._tensor("fc.bias") if self._facts.fc_bias else None
        return torch.nn.functional.linear(x, self._tensor("fc.weight"), bias)

    def normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Normalize X [..., W] with the norm `name`."""
        epsilon = self._facts.decoder.rms_norm_eps
        return torch.nn.functional.rms_norm(
            x, x.shape[-1:], self._tensor(f"{name}.weight"), epsilon
        )

    def _tensor(self, name: str) -> torch.Tensor:
        if name not in self._cache:
            values = read_tensor(self._tensors, name).floats()
            self._cache[name] = torch.from_numpy(values.copy()).to(self._device)
        return self._cache[name]
