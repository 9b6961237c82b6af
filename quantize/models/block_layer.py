"""A layer of a block draft as a model: it changes the states of blocks, not of the text.

The states of a text are S fused hidden states, then N blocks of R tokens, one every R tokens. A
block attends to the fused hidden states before its first token, and to itself. Keys and values
include the text; all other linear layers compute blocks only, so that they are calibrated with the
same inputs as in the engine's graph. T = S + N * R positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from edgellm.export.draft_checkpoints.block_config import BlockConfig
from edgellm.export.layers.blocks import Convolution
from edgellm.quantize.formats.modelopt import F32
from edgellm.quantize.models.one_layer_model import empty_draft_layer, head_model, load_layer

CONVOLUTIONS = ("attention_conv", "mlp_conv")


@dataclass(frozen=True, slots=True)
class Places:
    """The positions of a text's blocks."""

    text: int  # number of tokens of the text
    count: int  # number of blocks
    size: int  # tokens of a block

    @classmethod
    def of_text(cls, tokens: int, size: int) -> Places:
        """Return the maximum number of blocks of a text, after at least one token."""
        return cls(tokens, (tokens - 1) // size, size)

    @classmethod
    def of_rows(cls, rows: int, size: int) -> Places:
        """Return the places of `rows` states; few states are one block without text."""
        if rows <= 2 * size:
            return cls(0, 1, rows)
        count = (rows - 1) // (2 * size)
        return cls(rows - count * size, count, size)

    @property
    def firsts(self) -> NDArray[np.int64]:
        """The position of each block's first token, [N]."""
        return self.text - self.size * np.arange(self.count, 0, -1)

    @property
    def tokens(self) -> NDArray[np.int64]:
        """The position in the text of each block token, [N * R]."""
        return (self.firsts[:, None] + np.arange(self.size)).reshape(-1)

    def attention_mask(self, *, is_causal: bool, window: int | None = None) -> NDArray[np.bool_]:
        """Return the attention mask [T, T]; tokens of the text attend to themselves, unused.

        In a window, a block's token attends to itself and the `window` - 1 positions before it,
        besides those after it.
        """
        own = np.ones((self.size, self.size), np.bool_)
        blocks = np.kron(np.eye(self.count, dtype=np.bool_), np.tril(own) if is_causal else own)
        before = np.arange(self.text) < np.repeat(self.firsts, self.size)[:, None]
        features = np.eye(self.text, self.text + len(blocks), dtype=np.bool_)
        seen = np.concatenate([before, blocks], 1)
        if window is not None:
            places = np.concatenate([np.arange(self.text), self.tokens])
            seen &= self.tokens[:, None] - places < window
        return np.concatenate([features, seen])


def block_layer_model(
    config: Mapping[str, Any],
    blocks: BlockConfig,
    tensors: Mapping[str, F32],
    device: torch.device,
    window: int | None,
) -> PreTrainedModel:
    """Return a float32 model of one layer over states [B, T, D].

    Args:
        config: sizes, RoPE and architecture, as transformers names them.
        blocks: the draft.
        tensors: of the layer, such as "self_attn.q_proj.weight".
        device: where it computes.
        window: tokens that a token attends to, itself included; None: all.
    """
    model = empty_draft_layer(config, tensors, device)
    model.model.layers[0] = _BlockLayer(
        layer=model.model.layers[0], blocks=blocks, tensors=tensors, device=device, window=window
    )
    model.model.register_forward_pre_hook(_places_of(blocks.block.size), with_kwargs=True)
    load_layer(model, tensors, "")
    return model.eval().requires_grad_(False)


def block_head_model(
    config: Mapping[str, Any],
    blocks: BlockConfig,
    norm: Mapping[str, F32],
    head: F32 | None,
    device: torch.device,
) -> PreTrainedModel:
    """Return `head_model` for the states of [B, T, D] that predict a token."""
    model, size = head_model(config, norm, head, device), blocks.block.size
    skipped = int(not blocks.block.from_newest)

    def predicting(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        states = kwargs.get("inputs_embeds")
        if states is None:
            return args, kwargs
        rows = states[:, Places.of_rows(states.shape[1], size).text :]
        rows = rows.unflatten(1, (-1, size))[:, :, skipped:].flatten(1, 2)
        return args, {**kwargs, "inputs_embeds": rows}

    model.model.register_forward_pre_hook(predicting, with_kwargs=True)
    return model


class _BlockLayer(nn.Module):
    """A draft's layer, built of the parts of transformers' layer."""

    def __init__(
        self,
        *,
        layer: Any,
        blocks: BlockConfig,
        tensors: Mapping[str, F32],
        device: torch.device,
        window: int | None,
    ) -> None:
        super().__init__()
        self.size, self.is_causal = blocks.block.size, blocks.block.is_causal
        self.window = window
        self.attention_type = getattr(layer, "attention_type", "full_attention")
        self.input_layernorm, self.self_attn = layer.input_layernorm, layer.self_attn
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.mlp = layer.mlp
        convolution = blocks.convolution
        for name in CONVOLUTIONS if convolution is not None else ():
            assert convolution is not None
            setattr(
                self, name, _Convolve(config=convolution, tensors=tensors, name=name, device=device)
            )
        # Only the projections of queries, keys and values compute the text's positions.
        self.self_attn.o_proj.register_forward_pre_hook(self._own_rows)

    def _own_rows(self, _: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (args[0][:, Places.of_rows(args[0].shape[1], self.size).text :],)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Compute states [B, T, D]."""
        places = Places.of_rows(hidden_states.shape[1], self.size)
        text, x = hidden_states[:, : places.text], hidden_states[:, places.text :]
        seen = places.attention_mask(is_causal=self.is_causal, window=self.window)
        mask = torch.from_numpy(seen).to(x.device)[None, None]

        def attend(rows: torch.Tensor) -> torch.Tensor:
            found, _ = self.self_attn(
                hidden_states=torch.cat([text, rows], 1),
                position_embeddings=position_embeddings,
                attention_mask=mask,
            )
            return found

        x = x + self._around("attention_conv", self.input_layernorm(x), attend, places)
        x = x + self._around("mlp_conv", self.post_attention_layernorm(x), self.mlp, places)
        return torch.cat([text, x], 1)

    def _around(self, name: str, x: torch.Tensor, part: Any, places: Places) -> torch.Tensor:
        convolve = getattr(self, name, None)
        if not isinstance(convolve, _Convolve):
            return part(x)
        first, second = convolve.kernels(x)
        return convolve(part(convolve(x, first, places)), second, places)


class _Convolve(nn.Module):
    """DFlash2's causal convolution within a block, see `layers.blocks`."""

    def __init__(
        self, *, config: Convolution, tensors: Mapping[str, F32], name: str, device: torch.device
    ) -> None:
        super().__init__()
        self.config = config
        for own in ("base_kernel", "kernel_projection.weight"):
            empty = torch.empty(tensors[f"{name}.{own}"].shape, device=device)
            place = self if "." not in own else nn.Module()
            if place is not self:
                self.kernel_projection = place
            place.register_parameter(own.rpartition(".")[2], nn.Parameter(empty))

    def kernels(self, x: torch.Tensor) -> torch.Tensor:
        """Return the kernels before and after a part, [2, B, N * R, taps, D]."""
        added = x @ self.kernel_projection.get_parameter("weight").T
        added = added.unflatten(-1, (2, self.config.taps, -1))
        added = added.repeat_interleave(self.config.group_size, -1)
        return (added + self.get_parameter("base_kernel")).movedim(2, 0)

    def forward(self, x: torch.Tensor, kernel: torch.Tensor, places: Places) -> torch.Tensor:
        """Convolve X [B, N * R, D]."""
        rows, total = x.unflatten(1, (-1, places.size)), torch.zeros_like(x)
        for tap in range(self.config.taps):
            total = total + rows.flatten(1, 2) * kernel[:, :, tap]
            rows = torch.cat([torch.zeros_like(rows[:, :, :1]), rows[:, :, :-1]], 2)
        return total


def _places_of(size: int) -> Any:
    """Return a hook that sets the position ids of states [B, T, D]."""

    def set_positions(
        _: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        states = kwargs.get("inputs_embeds")
        if states is None:  # ModelOpt's export runs token ids; the result is unused
            return args, kwargs
        places = Places.of_rows(states.shape[1], size)
        rows = np.concatenate([np.arange(places.text), places.tokens])
        return args, {**kwargs, "position_ids": torch.from_numpy(rows).to(states.device)[None]}

    return set_positions
