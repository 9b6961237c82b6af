"""EAGLE drafts as torch modules, with the training-time test of EAGLE3's paper.

Layout and names are the public ones (github.com/SafeAILab/EAGLE): `fc`, `midlayer.*`, `norm`,
`lm_head`; of EAGLE-1 `fc`, `layers.0.*`. Shapes: B rows, S tokens, H hidden size, D head size,
V draft vocabulary.
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


@dataclass(frozen=True, slots=True)
class DraftShape:
    """The sizes of a draft; they equal its base's unless the user says otherwise."""

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

    @property
    def rope_config(self) -> dict[str, Any]:
        """The part of a config that tells of rotary embeddings."""
        config: dict[str, Any] = {"rope_theta": self.rope_theta}
        if self.mrope_section:
            # With both spellings of the type: readers differ.
            config["rope_scaling"] = {
                "type": "mrope",
                "rope_type": "default",
                "mrope_section": [*self.mrope_section],
            }
            if self.mrope_interleaved:
                config["rope_scaling"]["mrope_interleaved"] = True
        return config


class Norm(nn.RMSNorm):
    """RMSNorm whose weight follows the activations' type, which the fused kernel asks for."""

    def forward(self, x: Tensor) -> Tensor:
        """X [..., H] -> [..., H]."""
        return functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class _Attention(nn.Module):
    """Projections of the draft's attention, whose input is `wide`."""

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
        """`wide`: of the input of its attention."""
        super().__init__()
        self.self_attn, self.mlp = _Attention(shape, wide), _MLP(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)


class Unrolled(nn.Module):
    """What the drafts share: one layer that goes on from its own hidden states.

    The embedding is the base's and stays frozen outside.
    """

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        rope = read_rope(ConfigReader(shape.rope_config), shape.head_dim, 0)
        self._inverse_frequencies = torch.from_numpy(rope.inv_freq)  # [D/2]
        self._axes = torch.tensor(rope.axes or (0,) * len(rope.inv_freq))

    @property
    def layer(self) -> Layer:
        """The layer."""
        raise NotImplementedError

    def first_hidden(self, taps: Tensor) -> Tensor:
        """The base's features [B, S, num_taps * H] as hidden rows [B, S, H]."""
        raise NotImplementedError

    def enter(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the attention reads [B, S, wide], and what it is added to [B, S, H]."""
        raise NotImplementedError

    def unroll(
        self, taps: Tensor, embeddings: Tensor, positions: Tensor, steps: int, first: int = 0
    ) -> Iterator[Tensor]:
        """The recycled hidden states of `steps` draft steps in a row, each [B, S - first, H].

        Args:
            taps: base features at tokens 0..S-1, [B, S, num_taps * H].
            embeddings: of the tokens that follow, 1..S+steps-1, [B, S + steps - 1, H].
            positions: of the tokens 0..S+steps-2, int64 [axes, B, S + steps - 1].
            steps: step j, row i reads the draft's own hidden of step j-1 in place of the feature
                it could not yet have, and the embedding of token i + 1 + j. It attends to the
                true rows 0..i and to its own earlier steps.
            first: the rows before it are only attended to.
        """
        hidden, length, skipped = self.first_hidden(taps), taps.shape[1], 0
        keys: list[Tensor] = []
        values: list[Tensor] = []
        turns = self.turns(positions, hidden.dtype)
        for step in range(steps):
            rows = slice(step + skipped, step + length)
            turn = tuple(part[:, :, rows] for part in turns)
            hidden = self._step(embeddings[:, rows], hidden, turn, keys, values, first - skipped)
            skipped = first
            yield hidden

    def turns(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine of positions [axes, B, S]: each pair's, [B, 1, S, D/2]."""
        of_pairs = positions[self._axes.to(positions.device)].float()  # [D/2, B, S]
        angles = of_pairs.permute(1, 2, 0) * self._inverse_frequencies.to(positions.device)
        return angles.cos()[:, None].to(dtype), angles.sin()[:, None].to(dtype)

    def _step(
        self,
        embedding: Tensor,
        hidden: Tensor,
        turn: tuple[Tensor, ...],
        keys: list[Tensor],
        values: list[Tensor],
        skip: int,
    ) -> Tensor:
        """One step, whose rows from `skip` on give a state."""
        layer, attention, shape = self.layer, self.layer.self_attn, self.shape
        wide, residual = self.enter(embedding, hidden)
        query, key, value = (
            projection(rows).unflatten(2, (-1, shape.head_dim)).transpose(1, 2)
            for projection, rows in (
                (attention.q_proj, wide[:, skip:]),
                (attention.k_proj, wide),
                (attention.v_proj, wide),
            )
        )
        groups = shape.num_attention_heads // shape.num_key_value_heads
        keys.append(rotate(key, *turn).repeat_interleave(groups, 1))
        values.append(value.repeat_interleave(groups, 1))
        own_turn = (part[:, :, skip:] for part in turn)
        mixed = _attend(rotate(query, *own_turn), keys, values)
        hidden = residual[:, skip:] + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


class _WideLayer(Layer):
    """EAGLE3's: its attention reads the normed embedding and hidden row side by side."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__(shape, 2 * shape.hidden_size)
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = Norm(shape.hidden_size, shape.rms_norm_eps)


class Draft(Unrolled):
    """The trained parameters of EAGLE3."""

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
    """The trained parameters of EAGLE-1, whose hidden rows are features of the base."""

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


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in halves (Llama), x [B, heads, S, D]."""
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def _attend(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Causal attention to the first keys, and to one key of the own row for every later step.

    The queries are those of the last rows.
    """
    (length, size), seen = query.shape[2:], keys[0].shape[2]
    scale = size**-0.5
    future = torch.ones(length, seen, dtype=torch.bool, device=query.device)
    future = future.triu(1 + seen - length)
    scores = [(query @ keys[0].transpose(2, 3) * scale).masked_fill(future, float("-inf"))]
    scores += [(query * key).sum(-1, keepdim=True) * scale for key in keys[1:]]
    weights = torch.cat(scores, -1).float().softmax(-1).to(query.dtype)
    mixed = weights[..., :seen] @ values[0]
    for own, value in enumerate(values[1:]):
        mixed = mixed + weights[..., seen + own, None] * value
    return mixed
