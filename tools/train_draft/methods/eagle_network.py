"""EAGLE drafts as torch modules, with the training-time test of EAGLE3's paper.

Layout and names are the public ones (github.com/SafeAILab/EAGLE): EAGLE-3 `fc`, `midlayer.*`,
`norm`, `lm_head`; EAGLE-1 `fc`, `layers.0.*`. Shapes: B texts, S tokens, H hidden size, D head
size, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from edgellm.export.config.reader import ConfigReader
from edgellm.export.config.rope import read_rope

_CHUNK = 256  # queries that attend together in a window


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """Sizes of a draft; most are its base's."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    draft_vocab_size: int
    num_taps: int
    rms_norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, ...] = ()  # () for positions on one axis
    mrope_interleaved: bool = False
    sliding_window: int = 0  # tokens that a token attends to, itself included; 0: all

    def window_config(self, num_layers: int) -> dict[str, Any]:
        """Return config fields of the window of all layers."""
        if not self.sliding_window:
            return {}
        return {
            "sliding_window": self.sliding_window,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention"] * num_layers,
        }

    @property
    def rope_config(self) -> dict[str, Any]:
        """Config fields of RoPE."""
        config: dict[str, Any] = {"rope_theta": self.rope_theta}
        if self.mrope_section:
            # Both keys of the type, since readers differ.
            config["rope_scaling"] = {
                "type": "mrope",
                "rope_type": "default",
                "mrope_section": [*self.mrope_section],
            }
            if self.mrope_interleaved:
                config["rope_scaling"]["mrope_interleaved"] = True
        return config


class Norm(nn.RMSNorm):
    """RMSNorm with the weight in the activations' dtype, as the fused kernel requires."""

    def forward(self, x: Tensor) -> Tensor:
        """X [..., H] -> [..., H]."""
        return functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class _Attention(nn.Module):
    """Projections of the draft's attention; `wide` is its input size."""

    def __init__(self, shape: DraftShape, wide: int) -> None:
        super().__init__()
        hidden = shape.hidden_size
        queries = shape.num_attention_heads * shape.head_dim
        keys = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(wide, queries, bias=False)
        self.k_proj = nn.Linear(wide, keys, bias=False)
        self.v_proj = nn.Linear(wide, keys, bias=False)
        self.o_proj = nn.Linear(queries, hidden, bias=False)


class _MLP(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """The layer of a draft."""

    def __init__(self, shape: DraftShape, wide: int) -> None:
        """Create the layer; `wide` is the input size of its attention."""
        super().__init__()
        self.self_attn, self.mlp = _Attention(shape, wide), _MLP(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)


class Unrolled(nn.Module):
    """Base class of the drafts: one layer that recycles its own hidden states.

    The embedding is the base's, and frozen.
    """

    _inverse_frequencies: Tensor
    _axes: Tensor

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        rope = read_rope(ConfigReader(shape.rope_config), shape.head_dim, 0)
        frequencies, axes = torch.from_numpy(rope.inv_freq), rope.axes  # [D/2]
        self.register_buffer("_inverse_frequencies", frequencies, persistent=False)
        self.register_buffer(
            "_axes", torch.tensor(axes or (0,) * len(frequencies)), persistent=False
        )

    @property
    def layer(self) -> Layer:
        """The layer."""
        raise NotImplementedError

    def first_hidden(self, taps: Tensor) -> Tensor:
        """Fuse auxiliary hidden states [B, S, num_taps * H] to hidden states [B, S, H]."""
        raise NotImplementedError

    def enter(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention's input [B, S, wide] and the residual [B, S, H]."""
        raise NotImplementedError

    def unroll(
        self, taps: Tensor, embeddings: Tensor, positions: Tensor, steps: int, first: int = 0
    ) -> Iterator[Tensor]:
        """Yield the hidden states of `steps` consecutive draft steps, each [B, S - first, H].

        Args:
            taps: auxiliary hidden states of tokens 0..S-1, [B, S, num_taps * H].
            embeddings: embeddings of the next tokens, 1..S+steps-1, [B, S + steps - 1, H].
            positions: positions of tokens 0..S+steps-2, int64 [axes, B, S + steps - 1].
            steps: in step j, token i uses the draft's hidden state of step j-1 instead of the
                base's, and the embedding of token i + 1 + j. It attends to the base's tokens 0..i
                and to its own earlier steps.
            first: tokens before it are only attended to.
        """
        hidden, length, skipped = self.first_hidden(taps), taps.shape[1], 0
        keys: list[Tensor] = []
        values: list[Tensor] = []
        rope = self.rope(positions, hidden.dtype)
        for step in range(steps):
            tokens = slice(step + skipped, step + length)
            own = tuple(part[:, :, tokens] for part in rope)
            hidden = self._step(embeddings[:, tokens], hidden, own, keys, values, first - skipped)
            skipped = first
            yield hidden

    def rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of RoPE for positions [axes, B, S], each [B, 1, S, D/2]."""
        of_pairs = positions[self._axes].float()  # [D/2, B, S]
        angles = of_pairs.permute(1, 2, 0) * self._inverse_frequencies
        return angles.cos()[:, None].to(dtype), angles.sin()[:, None].to(dtype)

    def _step(
        self,
        embedding: Tensor,
        hidden: Tensor,
        rope: tuple[Tensor, ...],
        keys: list[Tensor],
        values: list[Tensor],
        skip: int,
    ) -> Tensor:
        """Run one step; return the hidden states of the tokens from `skip` on."""
        layer, attention, shape = self.layer, self.layer.self_attn, self.shape
        wide, residual = self.enter(embedding, hidden)
        query, key, value = (
            projection(x).unflatten(2, (-1, shape.head_dim)).transpose(1, 2)
            for projection, x in (
                (attention.q_proj, wide[:, skip:]),
                (attention.k_proj, wide),
                (attention.v_proj, wide),
            )
        )
        groups = shape.num_attention_heads // shape.num_key_value_heads
        keys.append(apply_rope(key, *rope).repeat_interleave(groups, 1))
        values.append(value.repeat_interleave(groups, 1))
        query_rope = (part[:, :, skip:] for part in rope)
        mixed = _attend(apply_rope(query, *query_rope), keys, values, shape.sliding_window)
        hidden = residual[:, skip:] + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


class _WideLayer(Layer):
    """EAGLE-3's layer, whose attention reads the concatenated normed embedding and hidden state."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__(shape, 2 * shape.hidden_size)
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = Norm(shape.hidden_size, shape.rms_norm_eps)


class Draft(Unrolled):
    """The network of EAGLE-3."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__(shape)
        self.fc = nn.Linear(shape.num_taps * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = _WideLayer(shape)
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)

    @property
    def layer(self) -> Layer:
        """See `Unrolled`."""
        return self.midlayer

    def first_hidden(self, taps: Tensor) -> Tensor:
        """See `Unrolled`."""
        return self.fc(taps)

    def enter(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See `Unrolled`."""
        layer = self.midlayer
        parts = layer.input_layernorm(embedding), layer.hidden_norm(hidden)
        return torch.cat(parts, -1), hidden


class Eagle1Draft(Unrolled):
    """The network of EAGLE-1, which predicts the base's final hidden states."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__(shape)
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size)
        self.layers = nn.ModuleList([Layer(shape, shape.hidden_size)])

    @property
    def layer(self) -> Layer:
        """See `Unrolled`."""
        (layer,) = self.layers
        assert isinstance(layer, Layer)
        return layer

    def first_hidden(self, taps: Tensor) -> Tensor:
        """See `Unrolled`."""
        return taps

    def enter(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See `Unrolled`."""
        both = self.fc(torch.cat([embedding, hidden], -1))
        return both, both


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE in halves (Llama) to x [B, heads, S, D]."""
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def _attend(query: Tensor, keys: list[Tensor], values: list[Tensor], window: int) -> Tensor:
    """Attend as `_attend_chunk`; with a window, chunks of queries skip keys before it."""
    length = query.shape[2]
    if not window or length <= _CHUNK:
        return _attend_chunk(query, keys, values, window)
    newest, step = keys[0].shape[2] - length, len(keys) - 1  # newest: key of the first query
    mixed = []
    for begin in range(0, length, _CHUNK):
        own = slice(begin, begin + _CHUNK)
        end = newest + min(begin + _CHUNK, length)
        reached = slice(min(max(newest + begin + step - window + 1, 0), end), end)
        key_chunk, value_chunk = (
            [every[0][:, :, reached], *(later[:, :, own] for later in every[1:])]
            for every in (keys, values)
        )
        mixed.append(_attend_chunk(query[:, :, own], key_chunk, value_chunk, window))
    return torch.cat(mixed, 2)


def _attend_chunk(query: Tensor, keys: list[Tensor], values: list[Tensor], window: int) -> Tensor:
    """Attend causally to the keys of the first step, and to the token's own key of later steps.

    The queries belong to the last tokens. A token of step j is j positions after that of the first
    step, so j keys fewer of the first step are in its window (0: none).
    """
    (length, size), (num_keys, step) = query.shape[2:], (keys[0].shape[2], len(keys) - 1)
    scale, window = size**-0.5, window or num_keys + step
    every = torch.ones(length, num_keys, dtype=torch.bool, device=query.device)
    newest = num_keys - length  # key of the first query
    hidden = every.triu(newest + 1) | every.tril(newest + step - window)
    own = range(max(1, step - window + 1), step + 1)
    scores = [(query @ keys[0].transpose(2, 3) * scale).masked_fill(hidden, float("-inf"))]
    scores += [(query * keys[at]).sum(-1, keepdim=True) * scale for at in own]
    weights = torch.cat(scores, -1).float().softmax(-1).to(query.dtype)
    mixed = weights[..., :num_keys] @ values[0]
    for place, at in enumerate(own):
        mixed = mixed + weights[..., num_keys + place, None] * values[at]
    return mixed
