"""Block drafters as torch modules: DFlash (arXiv 2602.06036), DSpark (2607.05147).

Layout and names are the public ones: `fc`, `hidden_norm`, `layers.N.*`, `norm`, DSpark's
`markov_head.*`, and `lm_head` if the head is not the base's. Shapes: B texts, S tokens, A anchors
of a text, which begin blocks, L tokens of a block, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from edgellm.tools.train_draft.methods.eagle_network import (
    DraftShape,
    Layer,
    Norm,
    Unrolled,
    apply_rope,
)


class BlockLayer(Layer):
    """A transformer layer over blocks, which also attends to the text's hidden states."""

    def __init__(self, shape: DraftShape, *, has_norms: bool) -> None:
        """Create the layer; `has_norms`: queries and keys are normalized, as in Qwen3."""
        super().__init__(shape, shape.hidden_size)
        self.shape, size = shape, shape.head_dim
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        for name in ("q_norm", "k_norm") if has_norms else ():
            self.self_attn.add_module(name, Norm(size, shape.rms_norm_eps))
        self.has_norms = has_norms

    def forward(self, x: Tensor, text: Tensor, ropes: tuple[Rope, Rope], before: Tensor) -> Tensor:
        """Return the blocks' hidden states [B, A, L, H].

        Args:
            x: hidden states of the blocks [B, A, L, H].
            text: hidden states of the text [B, S, H].
            ropes: RoPE of blocks [B, A * L] and of the text [1, S], see `Unrolled.rope`.
            before: bool [B, A * L, S]; text that a token attends to.
        """
        normed = self.input_layernorm(x).flatten(1, 2)  # [B, A * L, H]
        own, given = ropes
        query, key = (self._heads(name, normed, own) for name in ("q", "k"))
        value, text_value = self._heads("v", normed), self._heads("v", text)
        mixed = _attend(
            query, (self._heads("k", text, given), key), (text_value, value), before, x.shape[2]
        )
        x = x + self.self_attn.o_proj(mixed.transpose(1, 2).flatten(2)).view_as(x)
        return x + self.mlp(self.post_attention_layernorm(x))

    def _heads(self, part: str, hidden: Tensor, rope: Rope | None = None) -> Tensor:
        """Project hidden states [B, R, H] to query heads [B, heads, R, D], with RoPE."""
        attention, shape = self.self_attn, self.shape
        x = attention.get_submodule(f"{part}_proj")(hidden).unflatten(2, (-1, shape.head_dim))
        if self.has_norms and part != "v":
            x = attention.get_submodule(f"{part}_norm")(x)
        x = x.transpose(1, 2)
        x = x if rope is None else apply_rope(x, *rope)
        groups = shape.num_attention_heads // x.shape[1]
        return x.repeat_interleave(groups, 1) if groups > 1 else x


Rope = tuple[Tensor, Tensor]  # cosine and sine


class BlockDraft(Unrolled):
    """The network of a block drafter."""

    def __init__(
        self,
        *,
        shape: DraftShape,
        num_layers: int,
        has_norms: bool,
        has_head: bool,
        markov: tuple[int, int] | None = None,
    ) -> None:
        """Create the network.

        Args:
            shape: sizes of the draft.
            num_layers: number of layers.
            has_norms: see `BlockLayer`.
            has_head: whether the head is its own instead of the base's.
            markov: vocabulary of the base and rank of DSpark's tables; None without.
        """
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
        """Return normed hidden states of blocks [B, A, L, H].

        Args:
            taps: auxiliary hidden states of the texts [B, S, num_taps * H].
            blocks: embeddings of the tokens of blocks [B, A, L, H].
            anchors: first positions of blocks, int64 [B, A].
        """
        text = self.hidden_norm(self.fc(taps))
        text_positions = torch.arange(text.shape[1], device=text.device)
        positions = anchors[..., None] + torch.arange(blocks.shape[2], device=text.device)
        ropes = (
            self.rope(positions.flatten(1)[None], text.dtype),
            self.rope(text_positions[None, None], text.dtype),
        )
        before = (text_positions < anchors[..., None])[:, :, None]  # [B, A, 1, S]
        before = before.expand(-1, -1, blocks.shape[2], -1)
        if window := self.shape.sliding_window:
            before = before & (text_positions > positions[..., None] - window)
        before = before.flatten(1, 2)
        for layer in self.layers:
            blocks = layer(blocks, text, ropes, before)
        return self.norm(blocks)


class _Markov(nn.Module):
    """Low-rank bias of the next token's logits by the current token."""

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
    """Attend from blocks to the text before them and to themselves, [B, heads, A * L, D].

    Args:
        query: queries of blocks.
        keys: keys of the text [B, heads, S, D], and of blocks.
        values: values of the text and of blocks.
        before: see `BlockLayer.forward`.
        length: tokens of a block.
    """
    scale = query.shape[-1] ** -0.5
    text_scores = query @ keys[0].transpose(2, 3) * scale
    text_scores = text_scores.masked_fill(~before[:, None], float("-inf"))
    apart = (2, (-1, length))
    own = (query.unflatten(*apart) @ keys[1].unflatten(*apart).transpose(3, 4) * scale).flatten(
        2, 3
    )
    weights = torch.cat([text_scores, own], -1).float().softmax(-1).to(query.dtype)
    num_text = text_scores.shape[-1]
    mixed = weights[..., num_text:].unflatten(*apart) @ values[1].unflatten(*apart)
    return weights[..., :num_text] @ values[0] + mixed.flatten(2, 3)
