"""Drafts that predict blocks as torch modules: DFlash (arXiv 2602.06036), DSpark (2607.05147).

Layout and names are the public ones: `fc`, `hidden_norm`, `layers.N.*`, `norm`, of DSpark
`markov_head.*`; `lm_head` where the head is not the base's. Shapes: B texts, S tokens, A anchors of
a text, whose blocks begin with the token that stands there, L rows of a block, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from edgellm.tools.train_draft.methods.eagle_network import (
    DraftShape,
    Layer,
    Norm,
    Unrolled,
    rotate,
)


class BlockLayer(Layer):
    """A transformer layer over blocks, whose attention sees the text's features, too."""

    def __init__(self, shape: DraftShape, *, has_norms: bool) -> None:
        """`has_norms`: queries and keys are normalized, as Qwen3 does it."""
        super().__init__(shape, shape.hidden_size)
        self.shape, size = shape, shape.head_dim
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        for name in ("q_norm", "k_norm") if has_norms else ():
            self.self_attn.add_module(name, Norm(size, shape.rms_norm_eps))
        self.has_norms = has_norms

    def forward(self, x: Tensor, text: Tensor, turns: tuple[Turn, Turn], before: Tensor) -> Tensor:
        """Rows of blocks [B, A, L, H] with what layers make keys of, `text` [B, S, H].

        Args:
            x: the blocks.
            text: see above.
            turns: of blocks [B, A * L] and of the text [1, S], see `Unrolled.turns`.
            before: bool [B, A, S]; what of the text a block sees.
        """
        read = self.input_layernorm(x).flatten(1, 2)  # [B, A * L, H]
        own, given = turns
        query, key = (self._heads(name, read, own) for name in ("q", "k"))
        value, text_value = self._heads("v", read), self._heads("v", text)
        mixed = _attend(
            query, (self._heads("k", text, given), key), (text_value, value), before, x.shape[2]
        )
        x = x + self.self_attn.o_proj(mixed.transpose(1, 2).flatten(2)).view_as(x)
        return x + self.mlp(self.post_attention_layernorm(x))

    def _heads(self, part: str, rows: Tensor, turn: Turn | None = None) -> Tensor:
        """Projected rows [B, R, H] by query heads [B, heads, R, D], turned."""
        attention, shape = self.self_attn, self.shape
        x = attention.get_submodule(f"{part}_proj")(rows).unflatten(2, (-1, shape.head_dim))
        if self.has_norms and part != "v":
            x = attention.get_submodule(f"{part}_norm")(x)
        x = x.transpose(1, 2)
        x = x if turn is None else rotate(x, *turn)
        groups = shape.num_attention_heads // x.shape[1]
        return x.repeat_interleave(groups, 1) if groups > 1 else x


Turn = tuple[Tensor, Tensor]  # cosine and sine


class BlockDraft(Unrolled):
    """The trained parameters."""

    def __init__(
        self,
        shape: DraftShape,
        num_layers: int,
        *,
        has_norms: bool,
        has_head: bool,
        markov: tuple[int, int] | None = None,
    ) -> None:
        """`has_head`: not the base's; `markov`: tokens of the base, and rank of DSpark's tables."""
        super().__init__(shape)
        size = shape.hidden_size
        self.fc = nn.Linear(shape.num_taps * size, size, bias=False)
        self.hidden_norm = Norm(size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(
            BlockLayer(shape, has_norms=has_norms) for _ in range(num_layers)
        )
        self.norm = Norm(size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(size, shape.draft_vocab_size, bias=False) if has_head else None
        self.markov_head = None if markov is None else _Markov(*markov, shape.draft_vocab_size)

    def forward(self, taps: Tensor, blocks: Tensor, anchors: Tensor) -> Tensor:
        """Normed rows of blocks [B, A, L, H].

        Args:
            taps: features of the texts [B, S, num_taps * H].
            blocks: embeddings of the tokens of blocks [B, A, L, H].
            anchors: where blocks begin, int64 [B, A].
        """
        text = self.hidden_norm(self.fc(taps))
        places = torch.arange(text.shape[1], device=text.device)
        rows = anchors[..., None] + torch.arange(blocks.shape[2], device=text.device)
        turns = (
            self.turns(rows.flatten(1)[None], text.dtype),
            self.turns(places[None, None], text.dtype),
        )
        before = places < anchors[..., None]
        for layer in self.layers:
            blocks = layer(blocks, text, turns, before)
        return self.norm(blocks)


class _Markov(nn.Module):
    """What a token adds to the logits of the next."""

    def __init__(self, num_tokens: int, rank: int, draft_vocab_size: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(num_tokens, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=0.02)
        nn.init.zeros_(self.markov_w2.weight)


def _attend(
    query: Tensor,
    keys: tuple[Tensor, Tensor],
    values: tuple[Tensor, Tensor],
    before: Tensor,
    length: int,
) -> Tensor:
    """Attention of blocks to the text before them and to themselves, [B, heads, A * L, D].

    Args:
        query: of blocks.
        keys: of the text [B, heads, S, D], and of blocks.
        values: the same.
        before: see `BlockLayer.forward`.
        length: rows of a block.
    """
    scale = query.shape[-1] ** -0.5
    hidden = ~before.repeat_interleave(length, 1)[:, None]  # [B, 1, A * L, S]
    of_text = (query @ keys[0].transpose(2, 3) * scale).masked_fill(hidden, float("-inf"))
    apart = (2, (-1, length))
    own = (query.unflatten(*apart) @ keys[1].unflatten(*apart).transpose(3, 4) * scale).flatten(
        2, 3
    )
    weights = torch.cat([of_text, own], -1).float().softmax(-1).to(query.dtype)
    seen = of_text.shape[-1]
    mixed = weights[..., seen:].unflatten(*apart) @ values[1].unflatten(*apart)
    return weights[..., :seen] @ values[0] + mixed.flatten(2, 3)
