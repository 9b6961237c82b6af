"""Hidden states of Gemma 3n and 4 with all values that a later layer reads.

A model of one layer computes neither per-layer embeddings (PLE) nor the keys and values of an
earlier layer. So the states [B, S, R + W] carry them after the R numbers of the residual streams:
the embeddings of all layers, then keys and values of the layers that others share. R is H, and A
times H for Gemma 3n, whose tokens have A hidden states. D is the size of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import KVSharingDict

from edgellm.export.checkpoints.checkpoint import TensorSource
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.models import gemma3n_text, gemma4_text
from edgellm.quantize.formats.tensors import read_tensor

_TABLE = "embed_tokens_per_layer"
_PROJECTION, _NORM = "per_layer_model_projection", "per_layer_projection_norm"
_ENTERING, _LEAVING = "altup_projections", "altup_unembed_projections"


def carried_states(config: DecoderConfig) -> CarriedStates | None:
    """Return the layout of such states; None if the residual stream is all that layers read."""
    if isinstance(config, gemma3n_text.Config):
        return AltUpStates(config)
    return CarriedStates(config) if isinstance(config, gemma4_text.Config) else None


@dataclass
class _Pass:
    """A forward pass of a one-layer model."""

    states: torch.Tensor  # of its input
    shared: KVSharingDict
    residual: torch.Tensor | None = None  # of the layer's output


class CarriedStates:
    """The layout of these states, and hooks of one-layer models that read and write them."""

    of_shared = tuple(f"self_attn.{name}." for name in gemma4_text.OF_KV)  # unused tensors

    def __init__(self, config: gemma4_text.SharedKVConfig) -> None:
        self.config = config
        kinds = config.kinds
        found = sorted({kind.source for kind in kinds if kind and kind.source is not None})
        self.sources = [source for source in found if source is not None]
        self.per_layer = config.num_hidden_layers * config.per_layer_size

    @property
    def residual(self) -> int:
        """R."""
        return self.config.hidden_size

    @property
    def width(self) -> int:
        """R + W."""
        return sum(self._sizes())

    @property
    def float_modules(self) -> tuple[str, ...]:
        """Modules before and after the layers that stay float."""
        return (f"model.{_TABLE}", f"model.{_PROJECTION}") if self.per_layer else ()

    def _heads(self) -> list[tuple[int, int]]:
        """KV heads and their size of each source."""
        return [self.config.heads_of(source) for source in self.sources]

    def _sizes(self) -> list[int]:
        """Sizes of the residual, the embeddings, and keys and values of each source."""
        kv = [heads * size for heads, size in self._heads() for _ in range(2)]
        return [self.residual, self.per_layer, *kv]

    def is_shared(self, layer: int) -> bool:
        """Return whether a layer reads the keys and values of another."""
        kind = self.config.kinds[layer]
        return kind is not None and kind.source is not None

    def added(
        self, tensors: TensorSource, rows: np.ndarray, embedded: Iterator[torch.Tensor], table: Any
    ) -> Iterator[torch.Tensor]:
        """Yield states [B, S, R + W] before the first layer.

        Args:
            tensors: of the checkpoint.
            rows: token ids [samples, S].
            embedded: the scaled embeddings of batches of rows [B, S, H].
            table: yields rows of a table in the same batches.
        """
        config, size = self.config, self.config.per_layer_size
        known = np.where(rows < config.per_layer_vocab_size, rows, 0)
        given = table(f"model.{_TABLE}.weight", known) if size else iter(())
        projection, norm = (
            _weight(tensors, name) if size else torch.empty(0) for name in (_PROJECTION, _NORM)
        )
        for states in embedded:
            parts = [self.entering(tensors, states)]
            if size:
                x = (states @ projection.T * config.hidden_size**-0.5).unflatten(-1, (-1, size))
                x = x * (x.square().mean(-1, keepdim=True) + config.rms_norm_eps) ** -0.5 * norm
                parts.append((x.flatten(-2) + next(given) * size**0.5) * 2**-0.5)
            kept = sum(self._sizes()[2:])  # written by the sources
            yield torch.cat([*parts, states.new_zeros(*states.shape[:2], kept)], -1)

    def entering(self, tensors: TensorSource, x: torch.Tensor) -> torch.Tensor:
        """Return the residual [B, S, R] before the first layer for embeddings [B, S, H]."""
        del tensors
        return x

    def leaving(self, tensors: TensorSource, residual: torch.Tensor) -> torch.Tensor:
        """Return the final norm's input [B, S, H] for a residual [B, S, R]."""
        del tensors
        return residual

    def to_layer(self, residual: torch.Tensor) -> torch.Tensor:
        """Return a residual [B, S, R] in the form of transformers' layers."""
        return residual

    def of_layer(self, output: torch.Tensor) -> torch.Tensor:
        """Return the residual [B, S, R] of a layer's output."""
        return output

    def plain(self, inner: Any, *, is_shared: bool) -> None:
        """Take from transformers' model what these states replace.

        Args:
            inner: the model without its head, of one layer or none.
            is_shared: whether its layer reads the keys and values of another.
        """
        del is_shared
        inner.project_per_layer_inputs = lambda _, inputs=None: inputs

    def attach(self, model: PreTrainedModel, layer: int) -> PreTrainedModel:
        """Make a model of one layer read and return such states [B, S, R + W]."""
        inner: Any = model.model
        kind = inner.config.layer_types[0]
        held: list[_Pass] = []

        def before(
            _: nn.Module, args: tuple, kwargs: dict[str, Any]
        ) -> tuple[tuple, dict[str, Any]]:
            states = kwargs.get("inputs_embeds")
            if states is None:  # ModelOpt's export runs token ids
                return args, kwargs
            _, given, *pairs = states.split(self._sizes(), -1)
            own = self.config.kinds[layer]
            shared = KVSharingDict()
            if own is not None and own.source is not None:
                shared[kind] = self._pair(pairs, own.source)
            held[:] = [_Pass(states, shared)]
            kwargs = {**kwargs, "inputs_embeds": states[..., : self.config.hidden_size]}
            if size := self.config.per_layer_size:
                kwargs["per_layer_inputs"] = given.unflatten(-1, (-1, size))[:, :, [layer]]
            return args, kwargs

        def before_layer(
            _: nn.Module, args: tuple, kwargs: dict[str, Any]
        ) -> tuple[tuple, dict[str, Any]]:
            if not held:
                return args, {**kwargs, "shared_kv_states": self._zeros(kind, layer, args[0])}
            residual = self.to_layer(held[0].states[..., : self.residual])
            return (residual, *args[1:]), {**kwargs, "shared_kv_states": held[0].shared}

        def after_layer(_: nn.Module, args: tuple, output: torch.Tensor) -> None:
            del args
            if held:
                held[0].residual = self.of_layer(output)

        def after(_: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
            del args, kwargs
            if held:
                output.last_hidden_state = self._joined(held.pop(), layer, kind)
            return output

        inner.register_forward_pre_hook(before, with_kwargs=True)
        inner.register_forward_hook(after, with_kwargs=True)
        inner.layers[0].register_forward_pre_hook(before_layer, with_kwargs=True)
        inner.layers[0].register_forward_hook(after_layer)
        return model

    def attach_norm(self, model: PreTrainedModel, tensors: TensorSource) -> PreTrainedModel:
        """Make a model without layers read the residual of such states."""
        inner: Any = model.model
        inner.hidden_size_per_layer_input = 0

        def before(
            _: nn.Module, args: tuple, kwargs: dict[str, Any]
        ) -> tuple[tuple, dict[str, Any]]:
            states = kwargs.get("inputs_embeds")
            if states is None:
                return args, kwargs
            return args, {
                **kwargs,
                "inputs_embeds": self.leaving(tensors, states[..., : self.residual]),
            }

        inner.register_forward_pre_hook(before, with_kwargs=True)
        return model

    def _pair(self, pairs: list[torch.Tensor], source: int) -> tuple[torch.Tensor, ...]:
        """Return keys and values [B, heads, S, D] of a source."""
        at, size = 2 * self.sources.index(source), self.config.heads_of(source)[1]
        return tuple(
            each.unflatten(-1, (-1, size)).transpose(1, 2).contiguous()
            for each in pairs[at : at + 2]
        )

    def _zeros(self, kind: str, layer: int, x: torch.Tensor) -> KVSharingDict:
        """Return keys and values for a layer's input [..., B, S, H]; none if it computes them."""
        heads, size = self.config.heads_of(layer)
        rows = x.new_zeros(x.shape[-3], heads, x.shape[-2], size)
        return KVSharingDict({kind: (rows, rows)} if self.is_shared(layer) else {})

    def _joined(self, done: _Pass, layer: int, kind: str) -> torch.Tensor:
        """Return the states after a layer, which may be a source."""
        _, given, *pairs = done.states.split(self._sizes(), -1)
        if layer in self.sources:
            at = 2 * self.sources.index(layer)
            pairs[at : at + 2] = [each.transpose(1, 2).flatten(-2) for each in done.shared[kind]]
        assert done.residual is not None
        return torch.cat([done.residual, given, *pairs], -1)


class AltUpStates(CarriedStates):
    """States of Gemma 3n, with A hidden states of each token."""

    config: gemma3n_text.Config

    @property
    def residual(self) -> int:
        """See `CarriedStates`."""
        return self.config.num_states * self.config.hidden_size

    @property
    def float_modules(self) -> tuple[str, ...]:
        """See `CarriedStates`."""
        own = [f"model.{name}.{index}" for name in (_ENTERING, _LEAVING) for index in self._others]
        return (*super().float_modules, *own)

    @property
    def _others(self) -> range:
        """The projections: one for each hidden state but the first."""
        return range(self.config.num_states - 1)

    def entering(self, tensors: TensorSource, x: torch.Tensor) -> torch.Tensor:
        """See `CarriedStates`."""
        weights = (_weight(tensors, f"{_ENTERING}.{index}") for index in self._others)
        return torch.cat([x, *(_scaled(x @ weight.T, x) for weight in weights)], -1)

    def leaving(self, tensors: TensorSource, residual: torch.Tensor) -> torch.Tensor:
        """See `CarriedStates`."""
        first, *others = residual.split(self.config.hidden_size, -1)
        weights = (_weight(tensors, f"{_LEAVING}.{index}") for index in self._others)
        projected = [
            _scaled(state @ weight.T.to(state.device), first)
            for state, weight in zip(others, weights, strict=True)
        ]
        return torch.stack([first, *projected]).mean(0)

    def to_layer(self, residual: torch.Tensor) -> torch.Tensor:
        """See `CarriedStates`; a layer has the hidden states [A, B, S, H]."""
        return residual.unflatten(-1, (-1, self.config.hidden_size)).permute(2, 0, 1, 3)

    def of_layer(self, output: torch.Tensor) -> torch.Tensor:
        """See `CarriedStates`."""
        return output.permute(1, 2, 0, 3).flatten(-2)

    def plain(self, inner: Any, *, is_shared: bool) -> None:
        """See `CarriedStates`; transformers' config cannot state one layer that shares KV."""
        super().plain(inner, is_shared=is_shared)
        for name in (_ENTERING, _LEAVING):
            setattr(inner, name, nn.ModuleList(nn.Identity() for _ in self._others))
        for layer in inner.layers:
            layer.altup.router_input_scale.fill_(1 / self.config.hidden_size)
            attention = layer.self_attn
            attention.is_kv_shared_layer, attention.store_full_length_kv = is_shared, not is_shared
            for name in gemma4_text.OF_KV if is_shared else ():
                delattr(attention, name)


def _weight(tensors: TensorSource, name: str) -> torch.Tensor:
    """Return a matrix of the model, in float32."""
    return torch.from_numpy(read_tensor(tensors, f"model.{name}.weight").floats().copy())


def _scaled(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return x [B, S, H] with the root mean square of another."""
    squares = (each.square().mean(-1, keepdim=True) for each in (other, x))
    wanted, own = squares
    return x * (wanted / own.clamp(min=gemma3n_text.SMALLEST_SQUARE)).sqrt()
