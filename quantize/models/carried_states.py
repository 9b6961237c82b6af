"""Hidden states of Gemma 4 with all values that a later layer reads besides the residual stream.

A model of one layer computes neither per-layer embeddings (PLE) nor the keys and values of an
earlier layer. So the states [B, S, H + W] carry them after the residual stream: the embeddings of
all layers, then keys and values of the layers that others share. D is the size of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import KVSharingDict

from edgellm.export.checkpoints.checkpoint import TensorSource
from edgellm.export.models import gemma4_text
from edgellm.quantize.formats.tensors import read_tensor

_TABLE = "embed_tokens_per_layer"
_PROJECTION, _NORM = "per_layer_model_projection", "per_layer_projection_norm"
MODULES = (f"model.{_TABLE}", f"model.{_PROJECTION}")  # that stay float
OF_SHARED = tuple(f"self_attn.{name}." for name in gemma4_text.OF_KV)  # of a layer, unused


class CarriedStates:
    """The layout of these states, and hooks of one-layer models that read and write them."""

    def __init__(self, config: gemma4_text.Config) -> None:
        self.config = config
        kinds = config.kinds
        found = sorted({kind.source for kind in kinds if kind and kind.source is not None})
        self.sources = [source for source in found if source is not None]
        self.per_layer = config.num_hidden_layers * config.per_layer_size
        self.width = self.per_layer + sum(2 * heads * size for heads, size in self._heads())

    def _heads(self) -> list[tuple[int, int]]:
        """KV heads and their size of each source."""
        return [self.config.heads_of(source) for source in self.sources]

    def is_shared(self, layer: int) -> bool:
        """Return whether a layer reads the keys and values of another."""
        kind = self.config.kinds[layer]
        return kind is not None and kind.source is not None

    def added(
        self, tensors: TensorSource, rows: np.ndarray, embedded: Iterator[torch.Tensor], table: Any
    ) -> Iterator[torch.Tensor]:
        """Yield states [B, S, H + W] before the first layer.

        Args:
            tensors: of the checkpoint.
            rows: token ids [samples, S].
            embedded: the scaled embeddings of batches of rows [B, S, H].
            table: yields rows of a table in the same batches.
        """
        config, size = self.config, self.config.per_layer_size
        given = table(f"model.{_TABLE}.weight", rows) if size else iter(())
        projection, norm = (
            torch.from_numpy(read_tensor(tensors, f"model.{name}.weight").floats().copy())
            if size
            else torch.empty(0)
            for name in (_PROJECTION, _NORM)
        )
        for states in embedded:
            parts = [states]
            if size:
                x = (states @ projection.T * config.hidden_size**-0.5).unflatten(-1, (-1, size))
                x = x * (x.square().mean(-1, keepdim=True) + config.rms_norm_eps) ** -0.5 * norm
                parts.append((x.flatten(-2) + next(given) * size**0.5) * 2**-0.5)
            kept = self.width - self.per_layer  # written by the sources
            yield torch.cat([*parts, states.new_zeros(*states.shape[:2], kept)], -1)

    def attach(self, model: PreTrainedModel, layer: int) -> PreTrainedModel:
        """Make a model of one layer read and return such states [B, S, H + W]."""
        inner: Any = model.model
        inner.project_per_layer_inputs = lambda _, inputs=None: inputs
        kind = inner.config.layer_types[0]
        held: list[tuple[torch.Tensor, KVSharingDict]] = []

        def before(
            _: nn.Module, args: tuple, kwargs: dict[str, Any]
        ) -> tuple[tuple, dict[str, Any]]:
            states = kwargs.get("inputs_embeds")
            if states is None:  # ModelOpt's export runs token ids
                return args, {**kwargs, "shared_kv_states": self._zeros(kind, layer, args, kwargs)}
            residual, given, *pairs = states.split(self._sizes(), -1)
            shared = KVSharingDict()
            own = self.config.kinds[layer]
            if own is not None and own.source is not None:
                shared[kind] = self._pair(pairs, own.source)
            held[:] = [(states, shared)]
            if size := self.config.per_layer_size:
                kwargs = {
                    **kwargs,
                    "per_layer_inputs": given.unflatten(-1, (-1, size))[:, :, [layer]],
                }
            return args, {**kwargs, "inputs_embeds": residual, "shared_kv_states": shared}

        def after(_: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
            del args, kwargs
            if held:
                states, shared = held.pop()
                output.last_hidden_state = self._joined(
                    output.last_hidden_state, states, layer, shared.get(kind)
                )
            return output

        inner.register_forward_pre_hook(before, with_kwargs=True)
        inner.register_forward_hook(after, with_kwargs=True)
        return model

    def attach_norm(self, model: PreTrainedModel) -> PreTrainedModel:
        """Make a model without layers read the residual stream of such states."""
        inner: Any = model.model
        inner.hidden_size_per_layer_input = 0
        hidden = self.config.hidden_size

        def before(
            _: nn.Module, args: tuple, kwargs: dict[str, Any]
        ) -> tuple[tuple, dict[str, Any]]:
            states = kwargs.get("inputs_embeds")
            own = {} if states is None else {"inputs_embeds": states[..., :hidden]}
            return args, {**kwargs, **own}

        inner.register_forward_pre_hook(before, with_kwargs=True)
        return model

    def _sizes(self) -> list[int]:
        """Sizes of the residual stream, the embeddings, and keys and values of each source."""
        kv = [heads * size for heads, size in self._heads() for _ in range(2)]
        return [self.config.hidden_size, self.per_layer, *kv]

    def _pair(self, pairs: list[torch.Tensor], source: int) -> tuple[torch.Tensor, ...]:
        """Return keys and values [B, heads, S, D] of a source."""
        at, size = 2 * self.sources.index(source), self.config.heads_of(source)[1]
        return tuple(
            each.unflatten(-1, (-1, size)).transpose(1, 2).contiguous()
            for each in pairs[at : at + 2]
        )

    def _zeros(self, kind: str, layer: int, args: tuple, kwargs: dict[str, Any]) -> KVSharingDict:
        """Return keys and values for token ids [B, S], of a layer that computes none."""
        ids, (heads, size) = kwargs.get("input_ids"), self.config.heads_of(layer)
        ids = args[0] if ids is None else ids
        rows = torch.zeros(ids.shape[0], heads, ids.shape[1], size, device=ids.device)
        return KVSharingDict({kind: (rows, rows)} if self.is_shared(layer) else {})

    def _joined(
        self, residual: torch.Tensor, states: torch.Tensor, layer: int, pair: Any
    ) -> torch.Tensor:
        """Return the states after a layer, which may be a source."""
        _, given, *pairs = states.split(self._sizes(), -1)
        if layer in self.sources:
            at = 2 * self.sources.index(layer)
            pairs[at : at + 2] = [each.transpose(1, 2).flatten(-2) for each in pair]
        return torch.cat([residual, given, *pairs], -1)
